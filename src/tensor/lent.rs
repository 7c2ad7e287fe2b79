//! Tensors over memory that is borrowed. libtorch counts references and knows no borrows: that a tensor made from one of
//! these (`shallow_clone`, a view) goes before the memory does, who makes it answers for.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use tch::Tensor;

/// A tensor over memory that is borrowed to be read.
#[derive(Debug)]
pub struct Lent<'a> {
    tensor: Tensor,
    of: PhantomData<&'a [u8]>,
}

/// A tensor over memory that is borrowed to be written.
#[derive(Debug)]
pub struct LentMut<'a> {
    tensor: Tensor,
    of: PhantomData<&'a mut [u8]>,
}

impl Lent<'_> {
    /// Borrows memory that is valid for as long as the result.
    ///
    /// # Safety
    /// The memory is valid for that time, and no code writes it meanwhile.
    pub(super) unsafe fn new(tensor: Tensor) -> Self {
        Self { tensor, of: PhantomData }
    }
}

impl LentMut<'_> {
    /// As [`Lent::new`].
    ///
    /// # Safety
    /// As [`Lent::new`], and no other code reads the memory.
    pub(super) unsafe fn new(tensor: Tensor) -> Self {
        Self { tensor, of: PhantomData }
    }
}

impl Deref for Lent<'_> {
    type Target = Tensor;
    fn deref(&self) -> &Tensor {
        &self.tensor
    }
}

impl Deref for LentMut<'_> {
    type Target = Tensor;
    fn deref(&self) -> &Tensor {
        &self.tensor
    }
}

impl DerefMut for LentMut<'_> {
    fn deref_mut(&mut self) -> &mut Tensor {
        &mut self.tensor
    }
}
