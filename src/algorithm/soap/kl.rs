//! Factors of which each is whitened by the other (Lin et al. 2025, arXiv:2509.03378).
//!
//! With the bases P and Q of m rows and n columns, and the eigenvalues p and q: A = G·Q·diag(q)^(-1/2) and
//! B = diag(p)^(-1/2)·Pᵀ·G. Instead of the squares of G the factors take A·Aᵀ/n and Bᵀ·B/m. Of Y = Pᵀ·G·Q the eigenvalues
//! take means: p those of Y²/q over columns, q those of Y²/p over rows. Before there are bases A = B = G, and p and q stay.

use tch::Tensor;

use super::basis::Bases;
use super::layout::{BASES, FACTOR, MEANS, SINCE, length, other};
use crate::algorithm::stage::{Buffers, UnitIo};
use crate::error::Result;
use crate::kernels::Finite;
use crate::spec::{Side, UnitShape};
use crate::tensor::Lent;

/// The start of eigenvalues: a state of 0 stands for it.
const FIRST: f64 = 0.1;
/// The least eigenvalue: nothing is whitened by more than 4000.
const LEAST: f64 = 1.0 / (4000.0 * 4000.0);

/// The state with the eigenvalues of a side.
fn values_of(at: usize) -> usize {
    FACTOR + 4 + at
}

/// Eigenvalues as they are used.
fn begun(values: &Tensor) -> Result<Tensor> {
    Ok(values.f_masked_fill(&values.f_eq(0.0)?, FIRST)?)
}

/// The length of the other side of the whole block.
fn across(unit: &UnitIo<'_>, side: Side) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
    let across = length(unit, other(side)) as f64;
    across
}

/// A truth value: something in a tensor is not zero.
pub(super) fn is_there(x: &Tensor) -> Result<Tensor> {
    Ok(x.f_abs()?.f_amax([0, 1].as_slice(), false)?.f_ne(0.0)?)
}

impl Bases {
    /// Tests whether each of the sides with a basis is whitened by the other: one side alone has nothing to be whitened by.
    pub(super) fn whitens(&self, sides: &[Side]) -> bool {
        self.mutual && sides.len() == 2
    }

    /// Basis and eigenvalues of a side.
    fn known<'s>(unit: &'s UnitIo<'_>, side: Side) -> Result<(Lent<'s>, Tensor)> {
        let values = unit.state[values_of(side.index())].view();
        Ok((Self::basis(unit, side.index(), side)?, begun(&*values.tensor()?)?))
    }

    /// The gradient whose square the factor of a side takes: A of rows, B of columns.
    pub(super) fn whitened(gradient: &Tensor, unit: &UnitIo<'_>, side: Side) -> Result<Tensor> {
        let (basis, values) = Self::known(unit, other(side))?;
        // A checkpoint may have brought another type.
        let (basis, factors) =
            (basis.f_to_kind(gradient.kind())?, values.f_to_kind(gradient.kind())?.f_rsqrt()?);
        let scaled = match side {
            Side::Rows => gradient.f_mm(&basis)?.f_mul(&factors.f_tr()?)?,
            Side::Cols => basis.f_tr()?.f_mm(gradient)?.f_mul(&factors)?,
        };
        Ok(scaled.f_where_self(&is_there(&basis)?, gradient)?)
    }

    /// The means that the eigenvalues take of a gradient in the bases, to buffers.
    pub(super) fn means(
        &self,
        class: &UnitShape,
        y: &Tensor,
        unit: &UnitIo<'_>,
        buffers: &mut Buffers<'_>,
    ) -> Result<()> {
        if !self.whitens(self.sides_in(class)) {
            return Ok(());
        }
        let squares = y.f_square()?;
        for side in [Side::Rows, Side::Cols] {
            let (_, values) = Self::known(unit, other(side))?;
            let factors = values.f_to_kind(y.kind())?.f_reciprocal()?;
            let along = if side == Side::Rows { squares.f_alias()? } else { squares.f_tr()? };
            let mean = along.f_mm(&factors)?.f_mul_scalar(1.0 / across(unit, side))?;
            buffers.get_mut(BASES + MEANS + side.index())?.tensor(unit)?.f_copy_(&mean)?;
        }
        Ok(())
    }

    /// `p ← max(LEAST, β·p + (1-β)·mean)`, and q alike, of a unit whose gradient was finite and that has bases.
    pub(super) fn keep_values(
        unit: &mut UnitIo<'_>,
        buffers: &Buffers<'_>,
        beta: f64,
        is_finite: &Finite,
    ) -> Result<()> {
        if unit.steps <= 0.0 {
            return Ok(());
        }
        let has_bases = is_there(&*unit.state[SINCE].view().tensor()?)?;
        for at in 0..2 {
            let mean = buffers.get(BASES + MEANS + at)?.read_tensor(unit)?;
            let mut values = unit.state[values_of(at)].tensor()?;
            let new = begun(&values)?.f_mul_scalar(beta)?.f_add(&mean.f_mul_scalar(1.0 - beta)?)?;
            let new = new.f_clamp_min(LEAST)?.f_where_self(&has_bases, &values)?;
            if let Some(new) = is_finite.choose(&new, &values)? {
                values.f_copy_(&new)?;
            }
        }
        Ok(())
    }

    /// The share of the square of a gradient that the factor of a side takes, where it is another than `1-β`: 1/n or 1/m of the
    /// first one, and `1-β` of that of each that follows.
    pub(super) fn share(&self, unit: &UnitIo<'_>, side: Side, beta: f64) -> Result<Option<Tensor>> {
        if !self.mutual {
            return Ok(None);
        }
        let since = unit.state[SINCE].view().tensor()?;
        let is_first = since.f_eq(0.0)?.f_to_kind(since.kind())?;
        let share = is_first.f_mul_scalar(beta)?.f_add_scalar(1.0 - beta)?;
        Ok(Some(share.f_mul_scalar(1.0 / across(unit, side))?))
    }
}
