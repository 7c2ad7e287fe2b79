//! Macros that declare operations ([`operation`], [`operation_of`]) and their kernels ([`kernel`]).

/// A kernel of the operation in whose `impl` it stands: its pass, its name, the name of its structure on devices, and its
/// operands, each with what is done to it (`read`, `write`, `update` for both) and what it holds
/// ([`crate::kernels::op::Content`]). Behind them: the number of sums, and `stored` where they are of the last operand as
/// it is stored.
macro_rules! kernel {
    (Row $kernel:ident = $device:ident $operands:tt) => {
        kernel!(@of Row $kernel = $device $operands by {
            crate::kernels::ops::factored::record::<
                Self, { kernel!(@all $operands) }, { kernel!(@read $operands) }, { kernel!(@written $operands) }
            >
        } false)
    };
    ($family:ident $kernel:ident = $device:ident $operands:tt) => {
        kernel!($family $kernel = $device $operands 0 of numbers)
    };
    ($family:ident $kernel:ident = $device:ident $operands:tt $sums:literal) => {
        kernel!($family $kernel = $device $operands $sums of numbers)
    };
    ($family:ident $kernel:ident = $device:ident $operands:tt $sums:literal of $terms:ident) => {
        kernel!(@of $family $kernel = $device $operands by {
            crate::kernels::op::record::<
                Self,
                { kernel!(@all $operands) },
                { kernel!(@read $operands) },
                { kernel!(@written $operands) },
                $sums,
            >
        } kernel!(@stored $terms))
    };
    (@of $family:ident $kernel:ident = $device:ident
        [$($operand:ident: $access:ident $content:ident),* $(,)?] by $record:block $stored:expr
    ) => {
        &crate::kernels::op::Kernel {
            name: stringify!($kernel),
            device: stringify!($device),
            family: crate::kernels::op::Family::$family,
            scalars: <Self as crate::kernels::op::Operation>::SCALARS,
            tape: || {
                static TAPE: std::sync::OnceLock<crate::kernels::formula::tape::Tape> = std::sync::OnceLock::new();
                TAPE.get_or_init($record)
            },
            operands: &[$(
                crate::kernels::op::Operand {
                    name: stringify!($operand),
                    reads: kernel!(@reads $access),
                    writes: kernel!(@writes $access),
                    content: kernel!(@content $content),
                }
            ),*],
            sums_stored: $stored,
        }
    };
    (@all [$($operand:ident: $access:ident $content:ident),* $(,)?]) => {
        0 $(+ kernel!(@one $access))*
    };
    (@read [$($operand:ident: $access:ident $content:ident),* $(,)?]) => {
        0 $(+ !kernel!(@writes $access) as usize)*
    };
    (@written [$($operand:ident: $access:ident $content:ident),* $(,)?]) => {
        0 $(+ kernel!(@writes $access) as usize)*
    };
    (@one $access:ident) => { 1 };
    (@stored numbers) => { false };
    (@stored stored) => { true };
    (@reads read) => { true };
    (@reads update) => { true };
    (@reads write) => { false };
    (@writes read) => { false };
    (@writes update) => { true };
    (@writes write) => { true };
    (@content param) => { crate::kernels::op::Content::Param };
    (@content plain) => { crate::kernels::op::Content::Plain };
    (@content signed) => { crate::kernels::op::Content::Signed };
    (@content unsigned) => { crate::kernels::op::Content::Unsigned };
}

/// The structure of an operation: its scalars, in the order in which a device gets them (`* lr`: proportional to the learning
/// rate; `* lr if name`: where that setting says so), behind a semicolon settings, and what each job has of its own with the
/// function of [`crate::kernels::op::Pass`] that takes it. `as` names the structure of its scalars as numbers of any kind.
macro_rules! operation {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident $(<$life:lifetime>)? as $scalars:ident {
            $( $(#[$doc:meta])* $field:ident: $type:ident $(* lr $(if $when:ident)?)?, )*
            $(; $( $(#[$more:meta])* $own:ident: $own_type:ty $(=> $takes:ident)?, )*)?
        }
    ) => {
        $(#[$meta])*
        $vis struct $name $(<$life>)? {
            $( $(#[$doc])* $vis $field: $type, )*
            $($( $(#[$more])* $vis $own: $own_type, )*)?
        }

        #[doc = concat!("Scalars of [`", stringify!($name), "`].")]
        #[allow(missing_debug_implementations, unreachable_pub)] // of the module of an operation
        pub struct $scalars<W: crate::kernels::formula::Num> {
            $( $(#[$doc])* pub $field: operation!(@kind $type W), )*
            kind: std::marker::PhantomData<W>,
        }

        #[allow(clippy::expl_impl_clone_on_copy)] // a derived one would ask more of the flags
        impl<W: crate::kernels::formula::Num> Clone for $scalars<W> {
            fn clone(&self) -> Self {
                *self
            }
        }

        impl<W: crate::kernels::formula::Num> Copy for $scalars<W> {}

        impl $(<$life>)? crate::kernels::op::Operation for $name $(<$life>)? {
            const SCALARS: &'static [crate::kernels::op::Scalar] = &[$(
                crate::kernels::op::Scalar {
                    name: stringify!($field),
                    is_flag: operation!(@is_flag $type),
                    follows_rate: operation!(@may $(lr $($when)?)?),
                }
            ),*];
            type Scalars<W: crate::kernels::formula::Num> = $scalars<W>;

            #[inline(always)]
            #[allow(clippy::inline_always)] // inside a formula's caller
            fn scalars(&self) -> $scalars<f64> {
                $scalars { $( $field: self.$field, )* kind: std::marker::PhantomData }
            }

            #[allow(unused_mut, unused_assignments, unused_variables)] // there may be no scalars
            fn recorded() -> $scalars<crate::kernels::formula::tape::Expr> {
                let mut at = 0;
                $scalars {
                    $( $field: {
                        at += 1;
                        crate::kernels::formula::tape::push(operation!(@node $type)(at - 1))
                    }, )*
                    kind: std::marker::PhantomData,
                }
            }

            #[inline(always)]
            #[allow(clippy::inline_always, unused_variables)] // inside a formula's caller; a job may have no numbers
            fn own(&self, job: usize) -> crate::kernels::formula::Own<f64> {
                let own = crate::kernels::formula::Own::NONE;
                $($( $( let own = operation!(@own $takes own self $own job); )? )*)?
                own
            }

            #[allow(clippy::useless_conversion)]
            fn call(&self, kernel: &'static crate::kernels::op::Kernel) -> crate::kernels::op::Pass<'_> {
                crate::kernels::op::Pass::new(
                    kernel,
                    [$( (f64::from(self.$field), operation!(@follows self $(lr $($when)?)?)) ),*],
                )
                $($( $(.$takes(&self.$own))? )*)?
            }
        }
    };
    (@kind f64 $w:ident) => { $w };
    (@kind bool $w:ident) => { $w::Flag };
    (@node f64) => { crate::kernels::formula::tape::Node::Scalar };
    (@node bool) => { crate::kernels::formula::tape::Node::Flag };
    (@own with $numbers:ident $self:ident $own:ident $job:ident) => { $numbers.with($self.$own[$job]) };
    (@own reading $numbers:ident $self:ident $own:ident $job:ident) => { $numbers.reading($self.$own.of($job)) };
    (@own after $numbers:ident $self:ident $own:ident $job:ident) => { $numbers };
    (@is_flag f64) => { false };
    (@is_flag bool) => { true };
    (@may) => { false };
    (@may lr $($when:ident)?) => { true };
    (@follows $self:ident) => { false };
    (@follows $self:ident lr) => { true };
    (@follows $self:ident lr $when:ident) => { $self.$when };
}

/// An operation with the scalars of another one, which is a field of it.
macro_rules! operation_of {
    ([$($generics:tt)*] $name:ty: $field:tt is $inner:ident as $scalars:ident) => {
        impl $($generics)* crate::kernels::op::Operation for $name {
            const SCALARS: &'static [crate::kernels::op::Scalar] =
                <$inner as crate::kernels::op::Operation>::SCALARS;
            type Scalars<W: crate::kernels::formula::Num> = $scalars<W>;

            #[inline(always)]
            #[allow(clippy::inline_always)] // inside a formula's caller
            fn scalars(&self) -> $scalars<f64> {
                self.$field.scalars()
            }

            fn recorded() -> $scalars<crate::kernels::formula::tape::Expr> {
                $inner::recorded()
            }

            #[inline(always)]
            #[allow(clippy::inline_always)] // inside a formula's caller
            fn own(&self, job: usize) -> crate::kernels::formula::Own<f64> {
                self.$field.own(job)
            }

            fn call(&self, kernel: &'static crate::kernels::op::Kernel) -> crate::kernels::op::Pass<'_> {
                self.$field.call(kernel)
            }
        }
    };
}

pub(in crate::kernels) use {kernel, operation, operation_of};
