//! What a stage of an algorithm gets to work on.

use std::collections::BTreeMap;

use tch::Tensor;

use crate::batch::Slab;
use crate::error::{Error, Result};
use crate::plan::{BufferId, BufferSpec};

/// Most states that one algorithm keeps for a parameter.
pub const MAX_STATES: usize = 6;

/// One block with its gradient and states: equally long slabs, or the block's part of a state of another shape.
#[derive(Clone, Copy, Debug)]
pub struct UnitIo {
    /// Index of the parameter: also the stream of its random numbers.
    pub param_index: usize,
    /// Index of the block within the parameter.
    pub block_index: usize,
    /// Rows of the block.
    pub rows: usize,
    /// Columns of the block.
    pub cols: usize,
    /// The block's parameters, written in place.
    pub param: Slab,
    /// The block's gradient, read only.
    pub grad: Slab,
    /// The block's states in the order of `Algorithm::state`, written in place.
    pub state: [Slab; MAX_STATES],
}

/// Measurements of one step by name, each with its parameter's index. Taken only when somebody asks.
pub type Probe = BTreeMap<&'static str, Vec<(usize, f64)>>;

/// The units of a bucket that have a gradient, the bucket's buffers, and the step's common facts.
#[derive(Debug)]
pub struct StageIo<'a> {
    /// Units with a gradient, in bucket order; unit i owns matrix i of every buffer.
    pub units: &'a [UnitIo],
    /// Factor of every gradient: -1 to maximize, divided by the loss scale.
    pub grad_factor: f64,
    /// Where measurements go, when asked for.
    pub probe: Option<&'a mut Probe>,
    pub(crate) buffers: &'a [(BufferSpec, Slab)],
}

impl StageIo<'_> {
    fn spec(&self, buffer: BufferId) -> Result<&(BufferSpec, Slab)> {
        self.buffers.get(buffer).ok_or_else(|| Error::Internal(format!("no buffer {buffer}")))
    }

    /// Unit `unit`'s matrix of a buffer, as elements. A shared buffer has one for all.
    ///
    /// # Errors
    /// `Error::Internal` for a buffer that the program did not declare.
    pub fn slab(&self, buffer: BufferId, unit: usize) -> Result<Slab> {
        let (spec, slab) = self.spec(buffer)?;
        let each = spec.rows * spec.cols;
        Ok(if spec.shared { *slab } else { slab.part(unit * each, each) })
    }

    /// Unit `unit`'s matrix of a buffer, as a tensor `[rows, cols]`.
    ///
    /// # Errors
    /// As `slab`.
    pub fn matrix(&self, buffer: BufferId, unit: usize) -> Result<Tensor> {
        let (spec, _) = self.spec(buffer)?;
        self.slab(buffer, unit)?.tensor(&[spec.rows, spec.cols])
    }

    /// The matrices of units `first..first + count` of a buffer, as a tensor `[count, rows, cols]`.
    ///
    /// # Errors
    /// As `slab`.
    pub fn matrices(&self, buffer: BufferId, first: usize, count: usize) -> Result<Tensor> {
        let (spec, slab) = self.spec(buffer)?;
        let each = spec.rows * spec.cols;
        slab.part(first * each, count * each).tensor(&[count, spec.rows, spec.cols])
    }

    /// A shared buffer as a flat tensor.
    ///
    /// # Errors
    /// As `slab`.
    pub fn scratch(&self, buffer: BufferId) -> Result<Tensor> {
        let slab = self.slab(buffer, 0)?;
        slab.tensor(&[slab.len()])
    }

    /// Notes a measurement of unit `unit`, when somebody asked for them. The value is computed only then.
    ///
    /// # Errors
    /// Whatever `value` returns.
    pub fn record(
        &mut self,
        name: &'static str,
        unit: usize,
        value: impl FnOnce() -> Result<f64>,
    ) -> Result<()> {
        if let Some(probe) = self.probe.as_deref_mut() {
            let value = value()?;
            probe.entry(name).or_default().push((self.units[unit].param_index, value));
        }
        Ok(())
    }
}

/// `‖AᵀA - I‖_F / √k` over the short side k of a matrix.
///
/// # Errors
/// Whatever libtorch says.
pub fn orthogonality_error(matrix: &Tensor) -> Result<f64> {
    let wide = matrix.f_to_kind(tch::Kind::Double)?;
    let tall = if wide.size()[0] < wide.size()[1] { wide.f_tr()? } else { wide };
    let short = tall.size()[1];
    let identity = Tensor::f_eye(short, (tch::Kind::Double, tall.device()))?;
    let distance = tall.f_tr()?.f_mm(&tall)?.f_sub(&identity)?.f_norm()?;
    #[allow(clippy::cast_precision_loss)] // matrix sides are small
    Ok(f64::try_from(distance)? / (short.max(1) as f64).sqrt())
}
