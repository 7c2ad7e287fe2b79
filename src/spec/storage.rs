//! Storage of a group's states: element type, and 8 bits or not.

use super::{Code, Options};
use crate::error::{Error, Result};
use crate::spec::{ParamSpec, Quantization, StateSpec};
use crate::tensor::DType;

/// Option keys of state storage.
pub const OPTIONS: [&str; 4] = ["state_dtype", "state_bits", "block_size", "min_quant_numel"];

/// The most elements that a block may have.
pub const MOST_BLOCK: usize = 512;

/// Settings of a group for the storage of its states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateStorage {
    dtype: Option<DType>,
    eight_bit: bool,
    block: usize,
    least: usize,
}

impl StateStorage {
    /// Reads the settings from the options of a group.
    ///
    /// # Errors
    /// `Error::Value` for settings of the wrong kind, and for blocks of no power of two elements.
    pub fn from_options(options: &Options) -> Result<Self> {
        let block = options.count("block_size")?;
        if !block.is_power_of_two() || block > MOST_BLOCK {
            return Err(Error::Value(format!(
                "block_size must be a power of two of at most {MOST_BLOCK}, got {block}"
            )));
        }
        Ok(Self {
            dtype: options.dtype("state_dtype")?,
            eight_bit: options.count("state_bits")? == 8,
            block,
            least: options.count("min_quant_numel")?,
        })
    }

    /// Element type of states that are not of 8 bits; none is the parameter's.
    #[must_use]
    pub fn dtype(&self) -> Option<DType> {
        self.dtype
    }

    /// A momentum, in 8 bits where the group asks for that.
    #[must_use]
    pub fn momentum(&self, p: &ParamSpec, dtype: Option<DType>) -> StateSpec {
        self.moment("momentum", p, dtype, Code::Signed).eight_bit(Code::Signed, self)
    }

    /// A moment that is never of 8 bits: of type `dtype`, else the group's, else that of the arithmetic. Rounded to the nearest
    /// number of 16 bits it would stand still where a step changes it by less than half of the distance of two numbers.
    #[must_use]
    pub fn moment(&self, role: &'static str, p: &ParamSpec, dtype: Option<DType>, code: Code) -> StateSpec {
        let dtype = dtype.or(self.dtype).unwrap_or(p.dtype.arithmetic());
        StateSpec { moment: Some(code), ..StateSpec::like(role, p, dtype) }
    }

    /// A second moment, in 8 bits where the group asks for that.
    #[must_use]
    pub fn second_moment(&self, p: &ParamSpec, dtype: Option<DType>) -> StateSpec {
        self.moment("variance", p, dtype, Code::Unsigned).eight_bit(Code::Unsigned, self)
    }
}

impl StateSpec {
    /// Stores the state in 8 bits where the group asks for that, the whole state has at least as many elements as it
    /// says, and it takes less memory so. The decision is the same on every process.
    #[must_use]
    pub fn eight_bit(mut self, code: Code, storage: &StateStorage) -> Self {
        let quantized = Quantization { dtype: code.dtype(), block: storage.block };
        (self.moment, self.quantized) = (Some(code), Some(quantized));
        let numel: usize = self.shape.iter().product();
        if storage.eight_bit && !self.shape.is_empty() && numel >= storage.least.max(1) {
            let scales: usize = quantized.scales(&self.shape).iter().product();
            if numel + scales * DType::F32.bytes() < numel * self.dtype.bytes() {
                self.dtype = quantized.dtype;
            }
        }
        self
    }

    /// The counter of a group's steps, which is where the parameters are for graphs that count.
    ///
    /// # Errors
    /// `Error::Value` when the group does not say which.
    pub fn steps(options: &Options) -> Result<Self> {
        Ok(Self { on_host: !options.capturable()?, ..Self::counter("step") })
    }
}
