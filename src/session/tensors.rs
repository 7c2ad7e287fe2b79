//! Tensors of the user that a session works on, and what it refuses of them.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

use tch::Tensor;

use crate::error::{Error, Result};
use crate::kernels;
use crate::layout::spans;
use crate::plan::{LocalState, Param, average};
use crate::tensor::{
    Blocks, DType, Device, Elements, Encoding, FlatPtr, Gradient, Held, Owner, Places, Rounding, Watch,
    check_storage, replaced, require_memory,
};

/// Separates the random numbers by which parameters are rounded from those of other uses.
const ROUNDING_TAG: u32 = 2;
/// The same for those by which states are rounded, by the number of the state: behind the tags of all other uses.
const STATES_TAG: u32 = 16;

/// Positions of an average among the states of a parameter.
#[derive(Clone, Copy, Debug)]
pub(super) struct AveragePlaces {
    pub(super) average: usize,
    pub(super) step: usize,
    /// The sum of weights, the largest learning rate, and the share of the average that the parameter holds.
    pub(super) schedule_free: Option<[usize; 3]>,
}

impl AveragePlaces {
    /// The positions of the average of a parameter, if it has one.
    pub(super) fn of(planned: &Param) -> Option<Self> {
        let at = |role: &str| planned.states.iter().position(|state| state.spec.role == role);
        let [weight_sum, lr_max, share] = average::SCHEDULE_FREE.map(at);
        let schedule_free = weight_sum.zip(lr_max).zip(share).map(|((sum, most), share)| [sum, most, share]);
        Some(Self { average: at(average::AVERAGE)?, step: at(average::STEP)?, schedule_free })
    }
}

/// A tensor of the user and, when it is not contiguous, the contiguous copy that is worked on.
#[derive(Debug)]
pub(super) struct BoundTensor {
    /// None between steps, for the tensor of an object that may get another one.
    tensor: Option<Tensor>,
    owner: Option<Owner>,
    dtype: DType,
    device: Device,
    staged: Option<Tensor>,
    /// The bytes of the tensor's elements where it was not contiguous when its memory was looked for.
    strided: Option<Box<Elements>>,
    pub(super) flat: FlatPtr,
    /// Encoding of the elements, if they are more than numbers of their type.
    pub(super) encoding: Option<Box<Encoding>>,
    /// A fast path at the tensor, where one suffices.
    pub(super) watch: Option<Watch>,
}

impl BoundTensor {
    pub(super) fn new(tensor: Tensor, dtype: DType, device: Device) -> Self {
        let tensor = Some(tensor);
        Self {
            tensor,
            owner: None,
            dtype,
            device,
            staged: None,
            strided: None,
            flat: FlatPtr::EMPTY,
            encoding: None,
            watch: None,
        }
    }

    /// The tensor, which is there from `hold` on until `let_go`.
    pub(super) fn tensor(&self) -> Result<&Tensor> {
        self.tensor.as_ref().ok_or_else(|| Error::Internal("a tensor was let go".into()))
    }

    /// Says whose tensor it is: it is let go between steps, as its owner may then get another one.
    pub(super) fn own(&mut self, owner: Owner) {
        self.owner = Some(owner);
        self.watch = self.watch.and_then(|watch| watch.owned_by(owner));
    }

    /// Takes the tensor that the owner has now.
    pub(super) fn hold(&mut self, tensor: Tensor) {
        let same = self.watch.as_ref().is_some_and(|watch| watch.is_of(&tensor));
        if !same {
            let watch = Watch::of(&tensor, self.dtype, self.device);
            self.watch = watch.zip(self.owner).and_then(|(watch, owner)| watch.owned_by(owner));
        }
        self.tensor = Some(tensor);
    }

    /// Lets go of a tensor that has an owner, and returns it.
    pub(super) fn let_go(&mut self) -> Option<Tensor> {
        self.owner.and_then(|_| self.tensor.take())
    }

    /// Returns the tensor; no reference to it is left here.
    pub(super) fn into_tensor(self) -> Option<Tensor> {
        self.tensor
    }

    /// The bytes of the tensor's own elements, those of a copy aside; none where there are none.
    pub(super) fn elements(&self) -> Option<Elements> {
        match (&self.tensor, &self.strided) {
            (Some(tensor), _) => Elements::of(tensor),
            (None, Some(strided)) => Some(strided.as_ref().clone()),
            (None, None) => Elements::solid(self.flat.address(), self.flat.bytes()),
        }
    }

    /// Number that identifies the places of the elements: the address of contiguous ones, else a hash of their layout.
    pub(super) fn place(&self) -> usize {
        let Some(strided) = &self.strided else { return self.flat.address() };
        let mut hasher = DefaultHasher::new();
        strided.hash(&mut hasher);
        usize::try_from(hasher.finish() >> 1).unwrap_or(usize::MAX)
    }

    /// As `new`, of a tensor that is looked at in every step.
    pub(super) fn watched(tensor: Tensor, dtype: DType, device: Device) -> Self {
        let watch = Watch::of(&tensor, dtype, device);
        Self { watch, ..Self::new(tensor, dtype, device) }
    }

    /// Finds the memory again, where a fast path suffices for that.
    #[inline]
    fn peek(&mut self, held: &mut Held) -> bool {
        let Some(flat) = self.watch.as_ref().and_then(|watch| watch.memory(held)) else { return false };
        (self.flat, self.strided) = (flat, None);
        true
    }

    /// Finds the memory again, and holds it: the user may have swapped it since the last step.
    ///
    /// # Errors
    /// `Error::Value` for a tensor without memory, or with elements that share it.
    pub(super) fn refresh(&mut self, held: &mut Held) -> Result<()> {
        // Another thread may give the tensor another storage meanwhile: what is read and held is that of this one.
        let (tensor, own) = (self.tensor()?, self.tensor()?.f_detach()?);
        require_memory(&own)?;
        // A lazy negation is not in the memory: it has to be written out before a kernel reads it.
        let staged = if own.f_is_neg()? {
            Some(own.f_resolve_neg()?.f_contiguous()?)
        } else if own.is_contiguous() {
            None
        } else {
            Some(own.f_contiguous()?)
        };
        let strided = if staged.is_some() { Elements::of(&own).map(Box::new) } else { None };
        held.push(tensor, &own);
        let tensor = staged.as_ref().unwrap_or(&own);
        if tensor.device() != self.device.torch() {
            return Err(Error::Value(format!("a tensor was moved to {:?}: bind it again", tensor.device())));
        }
        self.flat = FlatPtr::typed(tensor, self.dtype)?.on(self.device);
        (self.staged, self.strided, self.encoding) = (staged, strided, None);
        Ok(())
    }

    /// Says what the elements mean, until the next `refresh`.
    fn set_encoding(&mut self, encoding: Encoding) {
        self.encoding = Some(Box::new(encoding));
    }

    /// Has a copy of a gradient worked on. The gradient is kept, as its storage is held.
    pub(super) fn copy(&mut self) -> Result<()> {
        let copy =
            self.staged.take().map_or_else(|| self.tensor()?.f_detach_copy().map_err(Error::from), Ok)?;
        self.flat = FlatPtr::typed(&copy, self.dtype)?.on(self.device);
        self.staged = Some(copy);
        Ok(())
    }

    /// Replaces the elements of a gradient.
    pub(super) fn fill(&mut self, from: &Tensor) -> Result<()> {
        if let Some(tensor) = &mut self.tensor {
            tensor.f_copy_(from)?;
        }
        Ok(())
    }

    /// Tests whether a copy of the tensor is worked on.
    pub(super) fn is_copied(&self) -> bool {
        self.staged.is_some()
    }

    /// Brings the result of a step home.
    pub(super) fn commit(&mut self) -> Result<()> {
        if let (Some(copy), Some(tensor)) = (self.staged.take(), &mut self.tensor) {
            require_memory(tensor)?;
            tensor.f_copy_(&copy)?;
        }
        Ok(())
    }

    /// Tests whether the tensor has its type and this shape, and is on its device.
    pub(super) fn is(&self, shape: &[usize]) -> bool {
        self.tensor.as_ref().is_some_and(|tensor| {
            tensor.kind() == self.dtype.kind()
                && tensor.device() == self.device.torch()
                && same_shape(tensor, shape)
        })
    }
}

/// A parameter with its states and, during a step, its gradient.
#[derive(Debug)]
pub(super) struct BoundParam {
    pub(super) param: BoundTensor,
    pub(super) states: Vec<BoundTensor>,
    pub(super) grad: Option<BoundTensor>,
    /// Which state counts its steps, where the session does that (`Algorithm::counted`).
    pub(super) counter: Option<usize>,
    /// Positions of its average among the states, if it has one.
    pub(super) average: Option<AveragePlaces>,
    /// Position of the low halves of its weights among the states, if it has them.
    pub(super) master: Option<usize>,
    /// Positions of its storages, and of that of its gradient, among those that the session holds for a step.
    pub(super) held: Range<usize>,
    /// The steps that it has taken before this one.
    pub(super) steps: f64,
    /// True if a fast path may suffice: no element is a code, or rounded at random.
    pub(super) fast: bool,
    /// True if the fast path sufficed in this step.
    pub(super) took_fast_path: bool,
}

/// Outcome of a fast path at a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FastPath {
    /// It has no gradient and is skipped in the step; it is as it was bound.
    Absent,
    /// It has one, and is ready for the step.
    Ready,
    /// It has to be looked at closely.
    Unknown,
}

impl BoundParam {
    /// Checks parameter, states and gradient, and takes them for a step where nothing is unusual. No other code may set the
    /// gradient meanwhile.
    #[inline]
    pub(super) fn try_fast(&mut self, held: &mut Held) -> FastPath {
        (self.grad, self.took_fast_path) = (None, false);
        let first = held.len();
        let found = self.look_fast(held);
        if found == FastPath::Unknown {
            held.truncate(first);
        }
        self.held = first..held.len();
        found
    }

    #[inline]
    fn look_fast(&mut self, held: &mut Held) -> FastPath {
        if !self.fast || !self.param.peek(held) || !self.states.iter_mut().all(|state| state.peek(held)) {
            return FastPath::Unknown;
        }
        self.join_halves();
        match self.param.watch.as_ref().map_or(Gradient::Other, |watch| watch.gradient(held)) {
            Gradient::Absent => FastPath::Absent,
            Gradient::Other => FastPath::Unknown,
            Gradient::Plain(tensor, flat) => {
                self.took_fast_path = true;
                let BoundTensor { dtype, device, .. } = self.param;
                self.grad = Some(BoundTensor { flat, ..BoundTensor::new(tensor, dtype, device) });
                FastPath::Ready
            }
        }
    }

    /// Has the parameter read and written with the low halves of its weights, where these are.
    #[inline]
    fn join_halves(&mut self) {
        if let Some(at) = self.master {
            self.param.set_encoding(Encoding::Master(self.states[at].flat));
        }
    }

    /// Tensors that the slot works on, its gradient left out.
    pub(super) fn own(&self) -> impl Iterator<Item = &BoundTensor> {
        std::iter::once(&self.param).chain(&self.states)
    }

    /// Looks again at the memory that a step takes: Python may have given a tensor another storage, or resized it.
    ///
    /// # Errors
    /// `Error::Mode` that names the parameter.
    #[inline]
    pub(super) fn look_again(&self, held: &Held, planned: &Param) -> Result<()> {
        if self.grad.is_none() || held.are_there(self.held.clone()) {
            return Ok(());
        }
        Err(replaced(&planned.spec.name))
    }

    /// Tests whether parameter and states still have the types and shapes of the plan.
    pub(super) fn fits(&self, planned: &Param) -> bool {
        self.param.is(&planned.local)
            && self.states.iter().zip(&planned.states).all(|(s, local)| s.is(&local.shape()))
    }

    /// Finds the memory for a step with this gradient; `step` is its number in the group.
    ///
    /// # Errors
    /// As `BoundTensor::refresh`.
    pub(super) fn take(
        &mut self,
        grad: Option<Tensor>,
        planned: &Param,
        step: u64,
        held: &mut Held,
    ) -> Result<()> {
        self.held = held.len()..held.len();
        // Its type may be another than the parameter's.
        let device = self.param.device;
        self.grad =
            grad.and_then(|g| DType::from_kind(g.kind()).map(|dtype| BoundTensor::new(g, dtype, device)));
        let Some(grad) = &mut self.grad else { return Ok(()) };
        let all = [grad, &mut self.param].into_iter().chain(&mut self.states);
        { all }.try_for_each(|bound| bound.refresh(held)).map_err(|e| e.of(&planned.spec.name))?;
        self.held.end = held.len();
        let key = |seed: u64, tag: u32| {
            let [first, .., last] = kernels::stream([seed, planned.spec.stream, step], tag);
            [first, last]
        };
        if let Some(seed) = planned.rounding {
            let (key, places) = (key(seed, ROUNDING_TAG), places(planned));
            self.param.set_encoding(Encoding::Rounding(Rounding { key, places, stays_positive: false }));
        }
        self.join_halves();
        let rounding = |own: &LocalState, tag: u32| {
            let (key, stays_positive) = (key(own.rounding?, tag), own.is_second_moment());
            Some(Rounding { key, places: own.places(), stays_positive })
        };
        for ((state, own), tag) in self.states.iter_mut().zip(&planned.states).zip(STATES_TAG..) {
            if let (None, Some(rounding)) = (own.quantized(), rounding(own, tag)) {
                state.set_encoding(Encoding::Rounding(rounding));
            }
        }
        for (at, scales) in planned.states.iter().enumerate() {
            let (Some(of), memory) = (scales.scales_of, self.states[at].flat) else { continue };
            let (own, tag) = (&planned.states[of], STATES_TAG + u32::try_from(of).unwrap_or(0));
            if let Some(quantized) = own.quantized() {
                self.states[of].set_encoding(Encoding::Blocks(Blocks {
                    scales: memory,
                    width: own.width(),
                    block: quantized.block,
                    rounding: rounding(own, tag),
                }));
            }
        }
        Ok(())
    }
}

/// Positions of the stored elements of a parameter in the whole one.
pub(super) fn places(planned: &Param) -> Places {
    Places::new(&planned.spec.shape, &spans(&planned.spec.shape, &planned.layout))
}

fn same_shape(tensor: &Tensor, shape: &[usize]) -> bool {
    let size = tensor.size();
    size.len() == shape.len() && size.iter().zip(shape).all(|(a, b)| usize::try_from(*a) == Ok(*b))
}

/// Refuses a tensor to write to whose elements share memory, as an expanded one's do, or are not in its storage.
pub(super) fn check_written(tensor: &Tensor, name: &str) -> Result<()> {
    check_storage(tensor).map_err(|e| e.of(name))?;
    if tensor.is_contiguous() || tensor.numel() == 0 || are_distinct(&tensor.size(), &tensor.stride()) {
        return Ok(());
    }
    Err(Error::Value(format!(
        "{name}: elements of parameters and states must not share memory, got strides {:?} for shape {:?}: it is expanded \
         or overlaps itself. Use .clone()",
        tensor.stride(),
        tensor.size()
    )))
}

/// Most elements whose positions are compared one by one where strides alone do not show that they are distinct.
const COMPARED: usize = 1 << 22;

/// Tests whether the elements of a tensor have positions of their own.
fn are_distinct(size: &[i64], stride: &[i64]) -> bool {
    let mut dims: Vec<(i64, i64)> = stride.iter().copied().zip(size.iter().copied()).collect();
    dims.retain(|(_, n)| *n > 1);
    dims.sort_unstable();
    let mut reach = 0;
    let nested = dims.iter().all(|(step, n)| {
        let free = *step > reach;
        reach += step * (n - 1);
        free
    });
    let count = dims.iter().map(|(_, n)| usize::try_from(*n).unwrap_or(0)).product::<usize>();
    if nested || count > COMPARED || dims.iter().any(|(step, _)| *step == 0) {
        return nested;
    }
    let mut positions = vec![0];
    for (step, n) in dims {
        positions = positions.iter().flat_map(|at| (0..n).map(move |i| at + i * step)).collect();
    }
    positions.sort_unstable();
    positions.windows(2).all(|pair| pair[0] != pair[1])
}

/// Refuses a gradient that no kernel may touch.
///
/// # Errors
/// `Error::Type` for a sparse or complex one, `Error::Value` for another shape or device.
pub fn check_gradient(grad: &Tensor, param: &Tensor, name: &str) -> Result<()> {
    if grad.is_sparse() || grad.is_mkldnn() {
        return Err(Error::Type(format!(
            "{name}: the gradient must be dense, got a sparse one. Use sparse=False, or torch.optim.SparseAdam for this parameter"
        )));
    }
    let kind = grad.f_kind()?;
    if DType::from_kind(kind).is_none() {
        return Err(Error::Type(format!("{name}: the gradient must be real floating-point, got {kind:?}")));
    }
    if grad.size() != param.size() {
        return Err(Error::Value(format!(
            "{name}: the gradient must have the parameter's shape {:?}, got {:?}",
            param.size(),
            grad.size()
        )));
    }
    if grad.device() != param.device() {
        return Err(Error::Value(format!(
            "{name}: the gradient must be on the parameter's device {:?}, got {:?}",
            param.device(),
            grad.device()
        )));
    }
    Ok(())
}
