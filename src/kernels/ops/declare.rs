//! Macros of operations. `kernel` and `ops` declare them: of each the structure that calls it, its scalars, operands and
//! kernels.

/// A kernel: its pass, name and operation on devices, the structure that has its scalars, and its operands, each with what
/// is done to it (`read`, `write`, `update` for both) and what it holds ([`crate::kernels::cuda_call::Content`]). The file has
/// a function of the kernel's name in a module `formulas`: what it computes by libtorch.
macro_rules! kernel {
    (
        $family:ident $kernel:ident = $device:ident told $told:ident
        [$($operand:ident: $access:ident $content:ident),* $(,)?]
    ) => {
        crate::kernels::cuda_call::Kernel {
            name: stringify!($kernel),
            device: stringify!($device),
            family: crate::kernels::cuda_call::Family::$family,
            told: stringify!($told),
            scalars: $told::SCALARS,
            formula: formulas::$kernel,
            operands: &[$(
                crate::kernels::cuda_call::Operand {
                    name: stringify!($operand),
                    reads: kernel!(@reads $access),
                    writes: kernel!(@writes $access),
                    content: kernel!(@content $content),
                }
            ),*],
        }
    };
    (@reads read) => { true };
    (@reads update) => { true };
    (@reads write) => { false };
    (@writes read) => { false };
    (@writes update) => { true };
    (@writes write) => { true };
    (@content param) => { crate::kernels::cuda_call::Content::Param };
    (@content plain) => { crate::kernels::cuda_call::Content::Plain };
    (@content signed) => { crate::kernels::cuda_call::Content::Signed };
    (@content unsigned) => { crate::kernels::cuda_call::Content::Unsigned };
}

/// Operations of one file. First the header with the operations for devices, by its name, with the text where it has no
/// file of its own. Then structures: their scalars, in the order in which a device gets them (`* lr`: proportional to the
/// learning rate; `* lr if name`: where that setting says so), behind a semicolon settings, and what each job has of its own
/// with the function of [`crate::kernels::cuda_call::Pass`] that takes it. Behind a structure the elementwise kernels that
/// it calls: for each the file has an `Op` on as many operands. `also` lists kernels that are declared by `kernel!`.
macro_rules! ops {
    (
        cuda $header:literal $($text:literal)? $(also [$($other:expr),* $(,)?])?;
        $(
            $(#[$meta:meta])*
            $vis:vis struct $name:ident $(<$life:lifetime>)? {
                $( $(#[$doc:meta])* $field:ident: $type:ident $(* lr $(if $when:ident)?)?, )*
                $(; $( $(#[$more:meta])* $own:ident: $own_type:ty $(=> $takes:ident)?, )*)?
            }
            $(=> {
                $( $kernel:ident = $device:ident [$($operand:ident: $access:ident $content:ident),* $(,)?]; )*
            })?
        )*
    ) => {
        /// Kernels that this file declares.
        pub(in crate::kernels) const DECLARED: crate::kernels::cuda_call::Declared =
            crate::kernels::cuda_call::Declared {
                header: ($header, ops!(@text $header $($text)?)),
                is_inline: ops!(@inline $($text)?),
                kernels: &[
                    $($($(
                        &kernel!(Elementwise $kernel = $device told $name [$($operand: $access $content),*]),
                    )*)?)*
                    $($( $other, )*)?
                ],
            };
        $(
            $(#[$meta])*
            $vis struct $name $(<$life>)? {
                $( $(#[$doc])* $vis $field: $type, )*
                $($( $(#[$more])* $vis $own: $own_type, )*)?
            }

            impl $(<$life>)? $name $(<$life>)? {
                /// Its scalars.
                pub(in crate::kernels) const SCALARS: &'static [crate::kernels::cuda_call::Scalar] = &[$(
                    crate::kernels::cuda_call::Scalar {
                        name: stringify!($field),
                        is_flag: ops!(@flag $type),
                        follows_rate: ops!(@may $(lr $($when)?)?),
                    }
                ),*];

                /// A kernel that is told the scalars.
                #[allow(dead_code, clippy::useless_conversion)]
                fn told<'p>(&self, kernel: &'static crate::kernels::cuda_call::Kernel) -> crate::kernels::cuda_call::Pass<'p> {
                    crate::kernels::cuda_call::Pass::new(
                        kernel,
                        [$( (f64::from(self.$field), ops!(@follows self $(lr $($when)?)?)) ),*],
                    )
                }

                /// The same with what each job has of its own.
                #[allow(dead_code)]
                pub(in crate::kernels) fn call(
                    &self,
                    kernel: &'static crate::kernels::cuda_call::Kernel,
                ) -> crate::kernels::cuda_call::Pass<'_> {
                    self.told(kernel) $($( $(.$takes(&self.$own))? )*)?
                }
            }

            ops!(@launch $name [$(<$life>)?] $( $( $kernel = $device [$($operand: $access $content),*]; )* )?);
        )*
    };
    (@launch $name:ident $generics:tt $( $kernel:ident = $device:ident $operands:tt; )*) => {
        $( ops!(@launch_one $name $generics $kernel = $device $operands); )*
    };
    (@launch_one $name:ident [$($generics:tt)*] $kernel:ident = $device:ident
        [$($operand:ident: $access:ident $content:ident),*]
    ) => {
        impl $($generics)* crate::kernels::cuda_call::Launch<{ [$(stringify!($operand)),*].len() }>
            for $name $($generics)*
        {
            fn on_cuda(&self) -> Option<crate::kernels::cuda_call::Pass<'_>> {
                Some(self.call(&kernel!(Elementwise $kernel = $device told $name [$($operand: $access $content),*])))
            }
        }

        const _: () = {
            const KERNEL: crate::kernels::cuda_call::Kernel =
                kernel!(Elementwise $kernel = $device told $name [$($operand: $access $content),*]);
            const OPERANDS: usize = [$(stringify!($operand)),*].len();
            const READ: usize = KERNEL.operands_that_are(false);
            const WRITTEN: usize = KERNEL.operands_that_are(true);
            assert!(KERNEL.takes(<$name as crate::kernels::cpu::Op<OPERANDS, READ, WRITTEN>>::ORDER));
        };
    };
    (@text $header:literal) => { include_str!($header) };
    (@text $header:literal $text:literal) => { $text };
    (@inline) => { false };
    (@inline $text:literal) => { true };
    (@flag f64) => { false };
    (@flag bool) => { true };
    (@may) => { false };
    (@may lr $($when:ident)?) => { true };
    (@follows $self:ident) => { false };
    (@follows $self:ident lr) => { true };
    (@follows $self:ident lr $when:ident) => { $self.$when };
}

pub(in crate::kernels) use {kernel, ops};
