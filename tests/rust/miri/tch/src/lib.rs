//! As much of the bindings of libtorch as the rooms under Miri name. Nothing of it computes.

#![allow(clippy::all, clippy::pedantic)]

#[derive(Debug)]
pub enum TchError {
    Torch(String),
}
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
    Int,
    Int16,
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
        Err(TchError::Torch(String::new()))
    }
    pub fn f_empty(_: impl AsRef<[i64]>, _: (Kind, Device)) -> Result<Self> {
        Err(TchError::Torch(String::new()))
    }
    pub fn f_ones(_: impl AsRef<[i64]>, _: (Kind, Device)) -> Result<Self> {
        Err(TchError::Torch(String::new()))
    }
    pub fn f_zero_(&mut self) -> Result<Self> {
        Err(TchError::Torch(String::new()))
    }
    pub fn f_to_kind(&self, _: Kind) -> Result<Self> {
        Err(TchError::Torch(String::new()))
    }
    pub fn f_dot(&self, _: &Self) -> Result<Self> {
        Err(TchError::Torch(String::new()))
    }
    pub fn f_isfinite(&self) -> Result<Self> {
        Err(TchError::Torch(String::new()))
    }
    pub fn f_all(&self) -> Result<Self> {
        Err(TchError::Torch(String::new()))
    }
    pub fn f_logical_and_(&mut self, _: &Self) -> Result<Self> {
        Err(TchError::Torch(String::new()))
    }
    pub fn f_where_self(&self, _: &Self, _: &Self) -> Result<Self> {
        Err(TchError::Torch(String::new()))
    }
    pub fn f_copy_(&mut self, _: &Self) -> Result<()> {
        Err(TchError::Torch(String::new()))
    }
    pub fn f_sort_stable(&self, _: bool, _: i64, _: bool) -> Result<(Self, Self)> {
        Err(TchError::Torch(String::new()))
    }
    pub fn f_from_slice<T>(_: &[T]) -> Result<Self> {
        Err(TchError::Torch(String::new()))
    }
    pub fn f_zeros(_: impl AsRef<[i64]>, _: (Kind, Device)) -> Result<Self> {
        Err(TchError::Torch(String::new()))
    }
    pub fn f_arange_start(_: i64, _: i64, _: (Kind, Device)) -> Result<Self> {
        Err(TchError::Torch(String::new()))
    }
    pub fn f_scalar_tensor(_: f64, _: (Kind, Device)) -> Result<Self> {
        Err(TchError::Torch(String::new()))
    }
    pub fn f_stack<T>(_: &[T], _: i64) -> Result<Self> {
        Err(TchError::Torch(String::new()))
    }
    pub fn f_cat<T>(_: &[T], _: i64) -> Result<Self> {
        Err(TchError::Torch(String::new()))
    }
    pub fn stride(&self) -> Vec<i64> {
        unreachable!("all are contiguous")
    }
    pub fn size2(&self) -> Result<(i64, i64)> {
        Err(TchError::Torch(String::new()))
    }
    pub fn f_fill_<T>(&mut self, _: T) -> Result<Self> {
        Err(TchError::Torch(String::new()))
    }
    pub fn shallow_clone(&self) -> Self {
        unreachable!()
    }
}

impl TryFrom<Tensor> for f64 {
    type Error = TchError;
    fn try_from(_: Tensor) -> Result<f64> {
        Err(TchError::Torch(String::new()))
    }
}
impl TryFrom<&Tensor> for f64 {
    type Error = TchError;
    fn try_from(_: &Tensor) -> Result<f64> {
        Err(TchError::Torch(String::new()))
    }
}
impl Kind {
    pub fn elt_size_in_bytes(self) -> usize {
        match self {
            Self::Uint8 | Self::Bool => 1,
            Self::Half | Self::BFloat16 | Self::Int16 => 2,
            Self::Float | Self::Int => 4,
            Self::Double | Self::Int64 => 8,
        }
    }
}

/// Operations by the number of their arguments: none can be done.
macro_rules! refused {
    ($($arguments:tt: $($name:ident)*;)*) => {
        impl Tensor {
            $($(refused!(@one $name $arguments);)*)*
        }
    };
    (@one $name:ident 0) => { pub fn $name(&self) -> Result<Self> { Err(TchError::Torch(String::new())) } };
    (@one $name:ident tensor) => { pub fn $name(&self, _: &Self) -> Result<Self> { Err(TchError::Torch(String::new())) } };
    (@one $name:ident 1) => { pub fn $name<A>(&self, _: A) -> Result<Self> { Err(TchError::Torch(String::new())) } };
    (@one $name:ident 2) => { pub fn $name<A, B>(&self, _: A, _: B) -> Result<Self> { Err(TchError::Torch(String::new())) } };
    (@one $name:ident 3) => { pub fn $name<A, B, C>(&self, _: A, _: B, _: C) -> Result<Self> { Err(TchError::Torch(String::new())) } };
}
refused! {
    0: f_abs f_any f_contiguous f_empty_like f_exp f_isnan f_logical_not f_neg f_ones_like f_reciprocal f_sign
        f_sqrt f_square f_tr f_zeros_like;
    1: f_add_scalar f_bitwise_and f_bitwise_or f_bitwise_right_shift_tensor_scalar
        f_bitwise_xor f_clamp_max f_clamp_min f_constant_pad_nd f_eq
        f_ge f_gt f_lt
        f_mul_scalar f_ne f_pow_tensor_scalar f_remainder f_reshape f_squeeze_dim
        f_sub_scalar f_sum f_to_device f_unsqueeze f_view_dtype;
    2: f_amax f_div_scalar_mode f_flatten f_index_select f_masked_fill f_select;
    3: f_gather f_index_copy_ f_index_fill f_nan_to_num f_narrow f_sum_dim_intlist;
    tensor: f_add f_sub f_mul f_div f_fmax f_fmin f_lt_tensor
        f_le_tensor f_logical_and f_logical_or f_bitwise_xor_tensor f_expand_as f_reshape_as;
}
