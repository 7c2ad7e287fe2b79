//! How a group stores states: in which type, and whether in 8 bits.

use super::Options;
use crate::error::{Error, Result};
use crate::spec::{ParamSpec, Quantization, StateSpec};
use crate::tensor::DType;

/// The option keys that say so.
pub const OPTIONS: [&str; 4] = ["state_dtype", "state_bits", "block_size", "min_quant_numel"];

/// The most elements that a block may have.
pub const MOST_BLOCK: usize = 512;

/// The code book of an 8-bit state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// Of numbers of either sign.
    Signed,
    /// Of numbers that are not negative.
    Unsigned,
}

impl Code {
    fn dtype(self) -> DType {
        match self {
            Self::Signed => DType::Q8,
            Self::Unsigned => DType::UQ8,
        }
    }
}

/// The settings of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateStorage {
    dtype: Option<DType>,
    eight_bit: bool,
    block: usize,
    least: usize,
}

impl StateStorage {
    /// What a group asks for.
    ///
    /// # Errors
    /// `Error::Value` for settings of the wrong kind, and for blocks of no power of two elements.
    pub fn from_options(options: &Options) -> Result<Self> {
        let block = options.count("block_size", 256)?;
        if !block.is_power_of_two() || block > MOST_BLOCK {
            return Err(Error::Value(format!(
                "block_size must be a power of two of at most {MOST_BLOCK}, got {block}"
            )));
        }
        Ok(Self {
            dtype: options.dtype("state_dtype")?,
            eight_bit: options.count("state_bits", 32)? == 8,
            block,
            least: options.count("min_quant_numel", 4096)?,
        })
    }

    /// The type of states that are not of 8 bits; none is the parameter's.
    #[must_use]
    pub fn dtype(&self) -> Option<DType> {
        self.dtype
    }

    /// As `StateSpec::like`, of type `dtype`, else the group's, else the parameter's.
    #[must_use]
    pub fn like(&self, role: &'static str, p: &ParamSpec, dtype: Option<DType>) -> StateSpec {
        StateSpec::like(role, p, dtype.or(self.dtype).unwrap_or(p.dtype))
    }

    /// A momentum: as `like`, in 8 bits where the group asks for that.
    #[must_use]
    pub fn momentum(&self, p: &ParamSpec, dtype: Option<DType>) -> StateSpec {
        self.like("momentum", p, dtype).eight_bit(Code::Signed, self)
    }
}

impl StateSpec {
    /// The state, in 8 bits where the group asks for that, the whole state has as many elements as it says, and it
    /// takes less memory so. What decides is the same wherever the state lies.
    #[must_use]
    pub fn eight_bit(mut self, code: Code, storage: &StateStorage) -> Self {
        let coded = Quantization { dtype: code.dtype(), block: storage.block };
        self.coded = Some(coded);
        let numel: usize = self.shape.iter().product();
        if storage.eight_bit && !self.shape.is_empty() && numel >= storage.least.max(1) {
            let scales: usize = coded.scales(&self.shape).iter().product();
            if numel + scales * DType::F32.bytes() < numel * self.dtype.bytes() {
                self.dtype = coded.dtype;
            }
        }
        self
    }
}
