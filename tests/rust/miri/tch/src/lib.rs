//! As much of the bindings of libtorch as the rooms under Miri name. Nothing of it computes.

#![allow(clippy::all, clippy::pedantic)]

#[derive(Debug)]
pub struct TchError;
impl std::fmt::Display for TchError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("no libtorch")
    }
}
impl std::error::Error for TchError {}
type Result<T> = std::result::Result<T, TchError>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Uint8,
    Half,
    BFloat16,
    Float,
    Double,
    Bool,
    Int64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    Cpu,
    Cuda(usize),
    Mps,
}

/// A contiguous tensor with memory of its own.
#[derive(Debug)]
pub struct Tensor {
    memory: Vec<u64>,
    size: Vec<i64>,
    kind: Kind,
}

impl Tensor {
    pub fn zeros(size: &[i64], (kind, _): (Kind, Device)) -> Self {
        let count = size.iter().product::<i64>() as usize;
        Self { memory: vec![0; count], size: size.to_vec(), kind }
    }
    pub fn kind(&self) -> Kind {
        self.kind
    }
    pub fn f_kind(&self) -> Result<Kind> {
        Ok(self.kind)
    }
    pub fn device(&self) -> Device {
        Device::Cpu
    }
    pub fn size(&self) -> Vec<i64> {
        self.size.clone()
    }
    pub fn numel(&self) -> usize {
        self.size.iter().product::<i64>() as usize
    }
    pub fn is_contiguous(&self) -> bool {
        true
    }
    pub fn data_ptr(&self) -> *mut std::ffi::c_void {
        self.memory.as_ptr().cast_mut().cast()
    }
    pub fn as_ptr(&self) -> *const std::ffi::c_void {
        std::ptr::from_ref(self).cast()
    }
    pub unsafe fn clone_from_ptr(_: *mut std::ffi::c_void) -> Self {
        unreachable!()
    }
    pub unsafe fn f_from_blob(_: *const u8, _: &[i64], _: &[i64], _: Kind, _: Device) -> Result<Self> {
        Err(TchError)
    }
    pub fn f_empty(_: impl AsRef<[i64]>, _: (Kind, Device)) -> Result<Self> {
        Err(TchError)
    }
    pub fn f_ones(_: impl AsRef<[i64]>, _: (Kind, Device)) -> Result<Self> {
        Err(TchError)
    }
    pub fn f_zero_(&mut self) -> Result<Self> {
        Err(TchError)
    }
    pub fn f_to_kind(&self, _: Kind) -> Result<Self> {
        Err(TchError)
    }
    pub fn f_dot(&self, _: &Self) -> Result<Self> {
        Err(TchError)
    }
    pub fn f_isfinite(&self) -> Result<Self> {
        Err(TchError)
    }
    pub fn f_all(&self) -> Result<Self> {
        Err(TchError)
    }
    pub fn f_logical_and_(&mut self, _: &Self) -> Result<Self> {
        Err(TchError)
    }
    pub fn f_where_self(&self, _: &Self, _: &Self) -> Result<Self> {
        Err(TchError)
    }
    pub fn shallow_clone(&self) -> Self {
        unreachable!()
    }
}

impl TryFrom<Tensor> for f64 {
    type Error = TchError;
    fn try_from(_: Tensor) -> Result<f64> {
        Err(TchError)
    }
}
