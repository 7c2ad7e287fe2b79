//! Updates whose rows or columns ("channels") have factors of their own.

use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::kernels::libtorch::value::Value::{self, Computed, Scalar};
use crate::kernels::libtorch::value::copied;
use crate::kernels::libtorch::{arithmetic, load, load_matrix, store, store_matrix, write_numbers};
use crate::kernels::ops::channels::{ChannelStep, Channels, GROWTH, Limited, NEGLIGIBLE, Projected, TINY};
use crate::kernels::ops::slices::fallback::line_sums;
use crate::spec::Side;
use crate::tensor::{DType, FlatViewMut, MatrixView};

/// See [`crate::kernels::clear_without_basis`].
pub(in crate::kernels) fn clear_without_basis(all: &[(MatrixView<'_>, FlatViewMut<'_>)]) -> Result<()> {
    for (basis, out) in all.iter().filter(|(_, out)| !out.is_empty()) {
        // NaN counts as nonzero.
        let is_there = basis.tensor()?.f_ne(0.0)?.f_any()?;
        let out = out.view();
        let own = load(&out, arithmetic(out.dtype() == DType::F64))?;
        store(&out, &own.f_where_self(&is_there, &own.f_zeros_like()?)?)?;
    }
    Ok(())
}

/// Returns the factors of the channels, with a shape that broadcasts over their matrix.
fn factors_of(channels: &Channels<'_>) -> Result<Value> {
    if channels.norms.is_empty() {
        let all = load(&channels.factors.view(), Kind::Double)?;
        return Ok(all.f_unsqueeze(i64::from(channels.side == Side::Rows)).into());
    }
    let norms = load(&channels.norms.view(), Kind::Double)?;
    let [n, r] = [0, 1].map(|at| Value::from(norms.f_select(0, at)).sqrt());
    Ok(n / (r + TINY))
}

/// See [`crate::kernels::channel_ratios`]. `size` is that of the gradient's factor.
pub(in crate::kernels) fn ratios(size: &Value, all: &[Projected<'_>]) -> Result<()> {
    for one in all {
        let factors = one.channels.factors.view();
        let before = Computed(copied(&load(&factors, Kind::Double)?)?).sqrt() * size;
        line_sums(one.channels.side, false, &[(one.low.view(), factors)])?;
        let after = Computed(copied(&load(&factors, Kind::Double)?)?);
        if one.channels.norms.is_empty() {
            let ratios = after.sqrt() / (before + TINY);
            store(&factors, &ratios.tensor(&*factors.tensor(&[factors.len()])?)?)?;
        } else {
            write_numbers(&one.channels.norms.view(), &[after.sum(), before.square().sum()])?;
        }
    }
    Ok(())
}

/// See [`crate::kernels::channel_totals`].
pub(in crate::kernels) fn totals(all: &[(Channels<'_>, MatrixView<'_>, FlatViewMut<'_>)]) -> Result<()> {
    for (channels, grad, total) in all {
        let scaled = factors_of(channels)? * Computed(load_matrix(grad, Kind::Double)?);
        write_numbers(&total.view(), &[scaled.square().sum()])?;
    }
    Ok(())
}

/// See [`crate::kernels::channel_steps`]. The numbers are size and value of the gradient's factor, the decay, and the rate of
/// each matrix; those of `step` and of the matrices are not read.
pub(in crate::kernels) fn steps(step: &ChannelStep, numbers: &[Value], all: &[Limited<'_>]) -> Result<()> {
    let [size, factor, decay, rates @ ..] = numbers else {
        return Err(Error::Internal("a step along channels without its numbers".into()));
    };
    for (one, rate) in all.iter().zip(rates) {
        let total = load(&one.total, Kind::Double)?;
        let norm = Computed(total.f_select(0, 0)?).sqrt() * size;
        let last = one.last.view();
        let before = Computed(copied(&load(&last, Kind::Double)?.f_select(0, 0)?)?);
        let growth = &norm / (&before + TINY);
        let starts = before.at_most(&(&norm * NEGLIGIBLE));
        let slowed = growth.below(&Scalar(GROWTH)).choose(&Scalar(1.0), &(&growth / GROWTH));
        let limiter = starts.choose(&Scalar(1.0), &slowed);
        let is_zero = norm.at_most(&Scalar(0.0));
        write_last(&one.last, &is_zero.choose(&before, &(&norm / &limiter)))?;
        let rate = rate / limiter * factor;

        let x = one.param.view();
        let kind = arithmetic([x.dtype(), one.grad.dtype()].contains(&DType::F64));
        let narrow =
            |x: &Value, like: &Tensor| -> Result<Value> { Ok(x.tensor(like)?.f_to_kind(kind).into()) };
        let (old, grad) = (load_matrix(&x, kind)?, load_matrix(&one.grad, kind)?);
        let update = narrow(&(rate * factors_of(&one.channels)?), &old)? * Computed(grad);
        let (old, keep) = (Computed(old.shallow_clone()), 1.0 - decay);
        let start = if step.late { &old - &update } else { old.clone() };
        let kept = &start * keep;
        let kept =
            if step.cautious { (&start * &update).below(&Scalar(0.0)).choose(&start, &kept) } else { kept };
        let new = if step.late { kept } else { kept - update };
        store_matrix(&x, &new.tensor(&*x.tensor()?)?)?;
    }
    Ok(())
}

/// Writes the norm of the last update.
fn write_last(last: &FlatViewMut<'_>, norm: &Value) -> Result<()> {
    let last = last.view();
    let stored = last.tensor(&[last.len()])?;
    Ok(stored.f_select(0, 0)?.f_copy_(&norm.tensor(&stored)?)?)
}
