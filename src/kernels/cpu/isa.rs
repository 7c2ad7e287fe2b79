//! The instruction sets that the kernels use: what the processor has, up to the one that a variable of the environment
//! names; and the types of their arithmetic.

use std::sync::OnceLock;

use crate::kernels::formula::Num;
use crate::tensor::Element;

/// The variable of the environment that names the last instruction set to use.
const LIMIT: &str = "OXIDION_MAX_CPU_ISA";

/// Instruction sets, each with those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Instructions that the compiler takes for every processor.
    Baseline,
    /// AVX2.
    Avx2,
    /// AVX-512 F, VL, DQ and BW.
    Avx512,
    /// AVX512-BF16.
    Avx512Bf16,
    /// AMX with bfloat16.
    Amx,
}

impl Isa {
    const NAMES: [(&'static str, Self); 5] = [
        ("baseline", Self::Baseline),
        ("avx2", Self::Avx2),
        ("avx512", Self::Avx512),
        ("avx512_bf16", Self::Avx512Bf16),
        ("amx", Self::Amx),
    ];

    /// Tests whether kernels may use the instruction set, if the processor has it.
    #[must_use]
    pub fn is_allowed(self) -> bool {
        static ALLOWED: OnceLock<Isa> = OnceLock::new();
        // A name that is none was refused when the package was imported.
        self <= *ALLOWED.get_or_init(|| limit().unwrap_or(Self::Amx))
    }
}

/// The last instruction set that may be used.
///
/// # Errors
/// Message with the names that are taken, where something else is named.
pub fn limit() -> Result<Isa, String> {
    let Some(value) = std::env::var_os(LIMIT) else { return Ok(Isa::Amx) };
    let known = Isa::NAMES.iter().find(|(name, _)| value == *name);
    known.map(|(_, isa)| *isa).ok_or_else(|| {
        let names: Vec<_> = Isa::NAMES.iter().map(|(name, _)| *name).collect();
        format!("{LIMIT} must be one of {}, got {}", names.join(", "), value.to_string_lossy())
    })
}

/// The last of those sets up to AVX512-BF16 that the processor has and kernels may use.
#[must_use]
pub fn best() -> Isa {
    static BEST: OnceLock<Isa> = OnceLock::new();
    *BEST.get_or_init(|| {
        let allowed = |isa: &Isa| isa.is_allowed() && is_there(*isa);
        let ladder = [Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16];
        ladder.into_iter().take_while(allowed).last().unwrap_or(Isa::Baseline)
    })
}

#[cfg(target_arch = "x86_64")]
fn is_there(isa: Isa) -> bool {
    use std::arch::is_x86_feature_detected as has;
    match isa {
        Isa::Baseline => true,
        Isa::Avx2 => has!("avx2"),
        Isa::Avx512 => has!("avx512f") && has!("avx512vl") && has!("avx512dq") && has!("avx512bw"),
        Isa::Avx512Bf16 => has!("avx512bf16"),
        Isa::Amx => false, // the module of its products asks for it
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn is_there(isa: Isa) -> bool {
    isa == Isa::Baseline
}

/// An arithmetic type: float32 or float64.
pub trait Real: Element + Default + PartialOrd + Num<Wide = f64, Flag = bool> {
    /// Widens to float64.
    fn wide(self) -> f64;
    /// Converts float32 storage.
    fn from_f32(x: f32) -> Self;
    /// Rounds to float32.
    fn to_f32(self) -> f32;
    /// Numbers of this type, of those in both.
    fn pick<'a>(narrow: &'a [f32], wide: &'a [f64]) -> &'a [Self];
    /// Numbers that are float32 already, to be written.
    fn as_f32_mut(values: &mut [Self]) -> Option<&mut [f32]>;
}

impl Real for f32 {
    #[inline]
    fn wide(self) -> f64 {
        f64::from(self)
    }
    #[inline]
    fn from_f32(x: f32) -> Self {
        x
    }
    #[inline]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline]
    fn pick<'a>(narrow: &'a [f32], _wide: &'a [f64]) -> &'a [Self] {
        narrow
    }
    #[inline]
    fn as_f32_mut(values: &mut [Self]) -> Option<&mut [f32]> {
        Some(values)
    }
}

impl Real for f64 {
    #[inline]
    fn wide(self) -> f64 {
        self
    }
    #[inline]
    fn from_f32(x: f32) -> Self {
        Self::from(x)
    }
    #[inline]
    #[allow(clippy::cast_possible_truncation)] // rounding is the purpose
    fn to_f32(self) -> f32 {
        self as f32
    }
    #[inline]
    fn pick<'a>(_narrow: &'a [f32], wide: &'a [f64]) -> &'a [Self] {
        wide
    }
    #[inline]
    fn as_f32_mut(_values: &mut [Self]) -> Option<&mut [f32]> {
        None
    }
}

/// Work that is compiled for each instruction set: `run` has to be `#[inline(always)]`, and what it calls too.
///
/// The compiler puts a generic method into the unit of its type's module, for a tuple that of the first type. Passes are
/// tuples for that reason, the operation first: after an edit of one operation no other is compiled again.
pub(in crate::kernels) trait Work: Sized {
    /// Result of the work.
    type Out;

    /// Does it, with arithmetic of this type.
    fn run<C: Real>(self) -> Self::Out;

    /// Does it with the instructions of every processor.
    #[inline(never)]
    fn run_baseline<C: Real>(self) -> Self::Out {
        self.run::<C>()
    }

    /// Does it with AVX2.
    ///
    /// # Safety
    /// The processor has it.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[target_feature(enable = "avx2")]
    unsafe fn run_avx2<C: Real>(self) -> Self::Out {
        self.run::<C>()
    }

    /// Does it with AVX-512.
    ///
    /// # Safety
    /// The processor has its parts F, VL, DQ and BW.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw")]
    unsafe fn run_avx512<C: Real>(self) -> Self::Out {
        self.run::<C>()
    }
}

/// Does work with the best instruction set that may be used.
#[inline]
pub(in crate::kernels) fn vectorised<C: Real, K: Work>(work: K) -> K::Out {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        let best = best();
        if best >= Isa::Avx2 {
            // SAFETY: `best` found AVX2 in this processor, and for the other the parts F, VL, DQ and BW of AVX-512.
            return unsafe {
                if best >= Isa::Avx512 { work.run_avx512::<C>() } else { work.run_avx2::<C>() }
            };
        }
    }
    work.run_baseline::<C>()
}
