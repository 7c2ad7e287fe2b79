//! Element types of parameters, states and buffers.

use crate::error::{Error, Result};

/// An element type that parameters, states and buffers may have. What has a torch type of its own is floating-point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DType {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    BF16,
    /// IEEE single precision.
    F32,
    /// IEEE double precision.
    F64,
    /// One byte: a code of the signed dynamic code book, to be scaled by the block that it lies in. States only.
    Q8,
    /// The same with the unsigned code book.
    UQ8,
    /// A signed integer of 16 bits: the low half of a float32 weight. States only.
    I16,
}

impl DType {
    /// The largest finite number.
    #[must_use]
    pub fn largest(self) -> f64 {
        match self {
            Self::F16 => half::f16::MAX.to_f64(),
            Self::BF16 => half::bf16::MAX.to_f64(),
            Self::F32 | Self::Q8 | Self::UQ8 => f64::from(f32::MAX),
            Self::F64 => f64::MAX,
            Self::I16 => f64::from(i16::MAX),
        }
    }

    /// Bytes of one element.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::Q8 | Self::UQ8 => 1,
            Self::F16 | Self::BF16 | Self::I16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }

    /// Returns the largest relative error of rounding to the type; for quantized types, about that of the largest element of
    /// a block.
    #[must_use]
    pub fn roundoff(self) -> f64 {
        match self {
            Self::F64 => f64::EPSILON / 2.0,
            Self::F32 => f64::from(f32::EPSILON) / 2.0,
            Self::F16 => half::f16::EPSILON.to_f64() / 2.0,
            Self::BF16 => half::bf16::EPSILON.to_f64() / 2.0,
            Self::Q8 | Self::UQ8 => 1.0 / 256.0,
            Self::I16 => 0.0,
        }
    }

    /// torch's name of the type.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "float16",
            Self::BF16 => "bfloat16",
            Self::F32 => "float32",
            Self::F64 => "float64",
            Self::Q8 | Self::UQ8 => "uint8",
            Self::I16 => "int16",
        }
    }

    /// The type of torch's name `name`, without the `torch.` prefix.
    ///
    /// # Errors
    /// `Error::Value` for a name that is no supported floating-point type.
    pub fn parse(name: &str) -> Result<Self> {
        [Self::F16, Self::BF16, Self::F32, Self::F64].into_iter().find(|d| d.name() == name).ok_or_else(
            || Error::Value(format!("dtype must be float16, bfloat16, float32 or float64, got '{name}'")),
        )
    }

    /// The corresponding type of libtorch.
    #[must_use]
    pub fn kind(self) -> tch::Kind {
        match self {
            Self::F16 => tch::Kind::Half,
            Self::BF16 => tch::Kind::BFloat16,
            Self::F32 => tch::Kind::Float,
            Self::F64 => tch::Kind::Double,
            Self::Q8 | Self::UQ8 => tch::Kind::Uint8,
            Self::I16 => tch::Kind::Int16,
        }
    }

    /// The floating-point type of a libtorch type, `None` where no algorithm takes it.
    #[must_use]
    pub fn from_kind(kind: tch::Kind) -> Option<Self> {
        match kind {
            tch::Kind::Half => Some(Self::F16),
            tch::Kind::BFloat16 => Some(Self::BF16),
            tch::Kind::Float => Some(Self::F32),
            tch::Kind::Double => Some(Self::F64),
            _ => None,
        }
    }

    /// Tests whether elements are block-quantized, with a scale for each block.
    #[must_use]
    pub fn is_quantized(self) -> bool {
        matches!(self, Self::Q8 | Self::UQ8)
    }

    /// Tests whether this is a floating-point type of less than 32 bits.
    #[must_use]
    pub fn is_narrow(self) -> bool {
        matches!(self, Self::F16 | Self::BF16)
    }

    /// The type in which arithmetic on elements of this type is done: float64 for itself, else float32.
    #[must_use]
    pub fn arithmetic(self) -> Self {
        if self == Self::F64 { Self::F64 } else { Self::F32 }
    }
}

/// Tests whether AMD has made this CPU.
#[must_use]
pub fn cpu_is_of_amd() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let vendor = std::arch::x86_64::__cpuid(0);
        [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == b"AuthenticAMD"
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// Tests whether this CPU names AMX for bfloat16 but no kind of tiles, as some virtual machines do: libtorch's products
/// in bfloat16 end the process there, unless `ONEDNN_MAX_CPU_ISA` keeps them from AMX.
#[must_use]
pub fn cpu_hides_tiles() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__cpuid, __cpuid_count};
        let is_reported = __cpuid(0).eax >= 0x1D && __cpuid_count(0x1D, 0).eax >= 1;
        cpu_names_amx() && !is_reported
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// Tests whether this CPU names AMX for bfloat16. Whether a process may use it, its system says.
#[must_use]
pub fn cpu_names_amx() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__cpuid, __cpuid_count};
        const TILES_AND_BF16: u32 = 1 << 24 | 1 << 22;
        __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & TILES_AND_BF16 == TILES_AND_BF16
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// The type in which large products are fastest at the accuracy that an orthonormalization needs, for parameters of
/// type `param`: bfloat16 where `bfloat16` says that it is, else float32; float64 parameters keep float64.
#[must_use]
pub fn product_dtype(param: DType, bfloat16: bool) -> DType {
    match param {
        DType::F64 => DType::F64,
        _ if bfloat16 => DType::BF16,
        _ => DType::F32,
    }
}
