//! Views of encoded elements: quantized values (8-bit) with the scales of their blocks, and the two halves of float32 weights.

use super::{Blocks, DType, Encoding, FlatView, FlatViewMut, Rounding};

/// Quantized values with the scales of their blocks, to be read.
#[derive(Clone, Copy, Debug)]
pub struct Quantized<'a> {
    /// The 8-bit values.
    pub q8: &'a [u8],
    blocks: &'a Blocks,
    first: usize,
}

/// Quantized values with the scales of those blocks that they contain as a whole, to be written.
#[derive(Debug)]
pub struct QuantizedMut<'a> {
    q8: &'a mut [u8],
    blocks: &'a Blocks,
    first: usize,
}

/// Random bits for the elements of a part of a tensor.
#[derive(Clone, Copy, Debug)]
pub struct RoundedFrom<'a> {
    /// Of the tensor.
    pub rounding: &'a Rounding,
    /// The first element of the part.
    pub first: usize,
}

impl<'a> FlatView<'a> {
    /// The same elements for a reader: numbers that are rounded at random when they are written are numbers of their type.
    #[must_use]
    pub fn to_read(mut self) -> Self {
        self.encoding = self.encoding.filter(|encoding| !matches!(encoding, Encoding::Rounding(_)));
        self
    }

    /// Returns elements of the host that are block-quantized.
    #[must_use]
    #[inline]
    pub fn quantized(&self) -> Option<Quantized<'a>> {
        let Some((Encoding::Blocks(blocks), first)) = self.encoding() else { return None };
        Some(Quantized { q8: self.q8(), blocks, first })
    }
}

impl FlatViewMut<'_> {
    /// Returns elements of the host that are block-quantized.
    #[must_use]
    #[inline]
    pub fn quantized(&mut self) -> Option<QuantizedMut<'_>> {
        let Some((Encoding::Blocks(blocks), first)) = self.encoding() else { return None };
        Some(QuantizedMut { q8: self.q8(), blocks, first })
    }
}

impl<'a> FlatView<'a> {
    /// Returns the low halves of the float32 weights whose high halves are these elements.
    ///
    /// # Panics
    /// Panics if there are fewer low halves than elements.
    #[must_use]
    #[inline]
    pub fn remainders(&self) -> Option<FlatView<'a>> {
        let Some((Encoding::Master(all), first)) = self.encoding() else { return None };
        // SAFETY: the low halves are there like the elements, and not written (`FlatPtr::view`).
        let own = unsafe { all.view(None) }.part(first, self.len());
        assert!(own.dtype() == DType::I16 && own.len() == self.len(), "weights without their low halves");
        Some(own)
    }
}

impl FlatViewMut<'_> {
    /// The elements, with what [`FlatView::remainders`] has of them, to be written.
    ///
    /// # Panics
    /// As there.
    #[must_use]
    #[inline]
    pub fn halves(&mut self) -> Option<[FlatViewMut<'_>; 2]> {
        let Some((Encoding::Master(all), first)) = self.encoding() else { return None };
        // SAFETY: the view has its elements alone, and with them their low halves (`FlatPtr::view_mut`).
        let own = unsafe { all.view_mut(None) }.into_part(first, self.len());
        assert!(own.dtype() == DType::I16 && own.len() == self.len(), "weights without their low halves");
        Some([self.reborrow(), own])
    }
}

impl<'a> Quantized<'a> {
    /// Returns the quantized values from index `at` to the end of its block, and the block's scale, which is NaN if missing.
    #[must_use]
    #[inline]
    pub fn block(&self, at: usize) -> (&'a [u8], f32) {
        let (number, end) = self.blocks.block_at(self.first + at);
        let q8 = &self.q8[at..(end - self.first).min(self.q8.len())];
        let scale = if q8.is_empty() { None } else { self.blocks.scale(number) };
        // SAFETY: a view with values of a block may read its scale, which is valid and not written (`FlatPtr::view`). A view
        // of a part of a block does not write it (`QuantizedMut::block`).
        (q8, scale.map_or(f32::NAN, |scale| unsafe { *scale }))
    }
}

impl<'a> QuantizedMut<'a> {
    /// Returns the number of quantized values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.q8.len()
    }

    /// Tests whether there are no quantized values.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.q8.is_empty()
    }

    /// Returns random bits for the quantized values from index `at` on, if they have some.
    #[must_use]
    #[inline]
    pub fn rounded_from(&self, at: usize) -> Option<RoundedFrom<'a>> {
        let rounding = self.blocks.rounding.as_ref()?;
        Some(RoundedFrom { rounding, first: self.first + at })
    }

    /// Returns the block that begins with the value at index `at`, and its scale. Returns `None` if the view does not have
    /// all of the block: another view may have the rest and read the scale.
    #[must_use]
    #[inline]
    pub fn block(&mut self, at: usize) -> Option<(&mut [u8], &mut f32)> {
        let (width, place) = (self.blocks.width.max(1), self.first + at);
        let (number, end) = self.blocks.block_at(place);
        let begins = (place % width) & (self.blocks.block - 1) == 0;
        let q8 = self.q8.get_mut(at..end - self.first).filter(|q8| begins && !q8.is_empty())?;
        // SAFETY: the view has all values of the block, and with them exclusive access to its scale (`FlatPtr::view_mut`).
        Some((q8, unsafe { &mut *self.blocks.scale(number)? }))
    }
}
