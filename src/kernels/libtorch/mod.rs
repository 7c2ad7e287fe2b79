//! Operations on memory of a device by libtorch, on torch's current stream, where this package has no kernel or does not use
//! it.
//!
//! Some operations have no kernel on purpose: one would save a few percent of a step at most. These are
//! - eigenvectors of `GaLore`, SOAP and `SOAPMuon`, and the decomposition of `orth_method="svd"`;
//! - sums of squares, norms and scaled columns of Dion, also the columns of P with norm 1;
//! - the neurons of `NorMuon` and `NorDion2`;
//! - factors of channels and the limited step of APOLLO;
//! - the signs of `svd="random"`, which the host makes and copies.
//!
//! A decomposition makes the host wait, which reads whether it converged: once in `update_proj_gap` steps for
//! `GaLore`, in every step for `orth_method="svd"`. Signs of vectors on devices are those with a positive
//! largest entry, with `svd="exact"` too, which has LAPACK's signs on CPUs.
//!
//! By libtorch alone an elementwise step takes several launches for each tensor, and orthonormal columns of
//! Dion make the host wait. Random numbers of Dion and APOLLO are made on the host and copied.

mod encoded;
mod interpret;
pub(in crate::kernels) mod value;

use tch::{Kind, Tensor};

use self::interpret::{Args, Left, as_stored};
use self::value::Value::{self, Computed, Scalar};
use self::value::copied;
use super::cpu::Slot;
use super::cpu::rows::Stack;
use super::op::{Pass, RowPassCall, ScaleMoments};
use super::{Copy, Messages};
use crate::error::{Error, Result};
use crate::tensor::{DType, FlatView, MatrixView, address_of, to_i64};

/// A call of kernels that these sources have, where they are used on the device of this thread; else what libtorch does.
#[cfg(feature = "cuda")]
macro_rules! on_device {
    ($sources:expr; $call:expr, else $other:expr) => {
        if crate::kernels::cuda::uses($sources)? { $call } else { $other }
    };
}

/// As there, in builds without kernels for devices.
#[cfg(not(feature = "cuda"))]
macro_rules! on_device {
    ($sources:expr; $call:expr, else $other:expr) => {{
        let _are_there_none: bool = crate::kernels::cuda::uses($sources)?;
        $other
    }};
}

pub(in crate::kernels) use on_device;

/// The type of arithmetic on operands.
pub(in crate::kernels) fn arithmetic(wide: bool) -> Kind {
    if wide { Kind::Double } else { Kind::Float }
}

/// Tests whether arithmetic is float64.
fn is_wide(operands: &[FlatView]) -> bool {
    operands.iter().any(|x| x.dtype() == DType::F64)
}

/// The numbers of an operand, in the type of the arithmetic.
pub(in crate::kernels) fn load(x: &FlatView, kind: Kind) -> Result<Tensor> {
    let stored = x.tensor(&[x.len()])?;
    match x.encoding() {
        None if x.dtype().is_quantized() => {
            Err(Error::Internal("quantized values without their blocks".into()))
        }
        _ if x.dtype().is_quantized() => encoded::decode(x, &stored, kind),
        _ => match encoded::join(x, &stored, kind)? {
            Some(weights) => Ok(weights),
            None => Ok(stored.f_to_kind(kind)?),
        },
    }
}

/// Writes numbers to an operand as it is stored.
pub(in crate::kernels) fn store(x: &FlatView, numbers: &Tensor) -> Result<()> {
    let mut stored = x.tensor(&[x.len()])?.shallow_clone();
    let numbers = numbers.f_reshape([-1])?;
    if x.is_encoded() { encoded::encode(x, &mut stored, &numbers) } else { Ok(stored.f_copy_(&numbers)?) }
}

/// The numbers of a matrix, in the type of the arithmetic. One that is encoded is decoded before (`ops::decode`).
pub(in crate::kernels) fn load_matrix(x: &MatrixView<'_>, kind: Kind) -> Result<Tensor> {
    if x.is_encoded() {
        return Err(Error::Internal("a matrix that was not decoded".into()));
    }
    Ok(x.tensor()?.f_to_kind(kind)?)
}

/// Writes a matrix. One that is encoded is encoded after (`ops::decode`).
pub(in crate::kernels) fn store_matrix(x: &MatrixView<'_>, numbers: &Tensor) -> Result<()> {
    if x.is_encoded() {
        return Err(Error::Internal("a matrix that would not be encoded".into()));
    }
    Ok(x.tensor()?.shallow_clone().f_copy_(numbers)?)
}

/// Writes the formula's operands that the kernel writes.
fn written(pass: &Pass<'_>, operands: &[FlatView], values: &[Value]) -> Result<()> {
    let stored = operands.iter().map(|flat| flat.tensor(&[flat.len()])).collect::<Result<Vec<_>>>()?;
    let mut numbers = Vec::with_capacity(values.len());
    for (own, (declared, value)) in pass.declared.operands.iter().zip(values).enumerate() {
        if declared.writes {
            let new = value.tensor(&stored[own])?;
            // What an operand takes over from another one must not change with that one.
            let is_others = |at: usize| at != own && address_of(&stored[at]) == address_of(&new);
            let is_shared = (0..stored.len()).any(is_others);
            numbers.push((own, if is_shared { copied(&new)? } else { new }));
        }
    }
    numbers.iter().try_for_each(|(own, new)| store(&operands[*own], new))
}

/// The operands of a formula in this shape; those that are only written are 0.
fn operands_of(pass: &Pass<'_>, operands: &[FlatView], kind: Kind, shape: &[i64]) -> Result<Vec<Value>> {
    let one = |(declared, flat): (&super::DeviceOperand, &FlatView)| -> Result<Value> {
        if !declared.reads {
            return Ok(Scalar(0.0));
        }
        let numbers = load(flat, kind)?;
        Ok(Computed(if shape.is_empty() { numbers } else { numbers.f_reshape(shape)? }))
    };
    pass.declared.operands.iter().zip(operands).map(one).collect()
}

/// The product of two factors in float64.
fn product([a, b]: &[Value; 2]) -> Value {
    a.wide() * b.wide()
}

/// Does the work of one job; returns the formula's sums.
fn work(pass: &Pass<'_>, number: usize, operands: &[FlatView]) -> Result<Vec<Value>> {
    if operands.iter().any(|x| x.len() != operands[0].len()) {
        return Err(Error::Internal("the operands of a pass differ in length".into()));
    }
    let kind = arithmetic(pass.double || is_wide(operands));
    let values = operands_of(pass, operands, kind, &[])?;
    let Left { updated, summed } = Args::new(pass, number, Vec::new())?.run(&values)?;
    let stored = operands.last().filter(|_| pass.declared.sums_stored).map(FlatView::dtype);
    let sums = summed.iter().flatten().map(|pair| match stored {
        Some(dtype) => product(&pair.each_ref().map(|x| as_stored(x, dtype))).sum(),
        None => product(pair).sum(),
    });
    let sums = sums.collect();
    written(pass, operands, &updated)?;
    Ok(sums)
}

pub(super) fn run<const N: usize>(pass: &Pass<'_>, jobs: &[[FlatView; N]]) -> Result<()> {
    for (number, operands) in jobs.iter().enumerate().filter(|(_, operands)| !operands[0].is_empty()) {
        work(pass, number, operands)?;
    }
    Ok(())
}

/// Numbers one after the other, to float64 memory.
pub(in crate::kernels) fn write_numbers(to: &FlatView, numbers: &[Value]) -> Result<()> {
    let mut stored = to.tensor(&[to.len()])?.shallow_clone();
    for (at, number) in (0..).zip(numbers) {
        stored.f_select(0, at)?.f_copy_(&number.tensor(&stored)?)?;
    }
    if numbers.is_empty() {
        let _ = stored.f_zero_()?;
    }
    Ok(())
}

pub(super) fn fold<const N: usize>(
    pass: &Pass<'_>,
    factor: f64,
    jobs: &[[FlatView; N]],
    sums: &[FlatView],
) -> Result<()> {
    for ((number, operands), to) in jobs.iter().enumerate().zip(sums) {
        let found = if operands[0].is_empty() { Vec::new() } else { work(pass, number, operands)? };
        let found: Vec<Value> = found.iter().map(|sum| sum * (factor * factor)).collect();
        write_numbers(to, &found)?;
    }
    Ok(())
}

pub(super) fn fold_units<const N: usize>(
    pass: &Pass<'_>,
    factor: f64,
    units: &[Vec<[FlatView; N]>],
    sums: &[FlatView],
) -> Result<()> {
    let mut number = 0;
    for (jobs, to) in units.iter().zip(sums) {
        let mut total = Scalar(0.0);
        for operands in jobs {
            if !operands[0].is_empty() {
                let found = work(pass, number, operands)?;
                total = found.into_iter().fold(total, |total, sum| total + sum);
            }
            number += 1;
        }
        write_numbers(to, &[total * (factor * factor)])?;
    }
    Ok(())
}

pub(super) fn rows<const N: usize, const R: usize, const W: usize>(
    call: &RowPassCall<'_>,
    jobs: &mut [Stack<'_, R, W>],
    order: [Slot; N],
) -> Result<()> {
    for (number, stack) in jobs.iter_mut().enumerate() {
        let is_wide = stack.operands.dtypes().any(|dtype| dtype == DType::F64);
        let Stack { operands, stack, rows, cols, row_sums, col_sums, all_sums, total } = stack;
        let [stack, rows, cols] = [to_i64(*stack)?, to_i64(*rows)?, to_i64(*cols)?];
        let operands = operands.ordered(order);
        let (kind, shape) = (arithmetic(is_wide), [stack, rows, cols]);
        let scales = call.scales.iter().map(|all| scale_of(all.get(number), kind, shape));
        let scales = scales.collect::<Result<Vec<_>>>()?;
        let values = operands_of(&call.pass, &operands, kind, &shape)?;
        let Left { updated, summed } = Args::new(&call.pass, number, scales)?.run(&values)?;
        let [summed, own] =
            [0, 1].map(|at| summed.get(at).and_then(|pair| pair.as_ref()).map_or(Scalar(0.0), product));
        for (sums, dims) in [(row_sums, &[2_i64][..]), (col_sums, &[1]), (all_sums, &[1, 2])] {
            match &summed {
                _ if sums.is_empty() => {}
                Computed(summed) => {
                    store(&sums.view(), &summed.f_sum_dim_intlist(dims, false, Kind::Double)?)?;
                }
                Scalar(_) => sums.clear()?,
                Value::Failed(_) => write_numbers(&sums.view(), std::slice::from_ref(&summed))?,
            }
        }
        if !total.is_empty() {
            write_numbers(&total.view(), &[own.sum()])?;
        }
        written(&call.pass, &operands, &updated)?;
    }
    Ok(())
}

/// By row and by column the reciprocal roots of second moments: `√S / (√R·√C)`, with a root of √S on either side.
fn scale_of(
    moments: Option<&ScaleMoments<'_>>,
    kind: Kind,
    [stack, rows, cols]: [i64; 3],
) -> Result<[Value; 2]> {
    let Some([row, col, all]) = moments else { return Ok([Scalar(1.0), Scalar(1.0)]) };
    if col.is_empty() || stack * rows * cols == 0 {
        return Ok([Scalar(1.0), Scalar(1.0)]);
    }
    let wide =
        |x: &FlatView, shape: &[i64]| -> Result<Tensor> { Ok(load(x, Kind::Double)?.f_reshape(shape)?) };
    let narrow = |x: Tensor| -> Result<Value> { Ok(Computed(x.f_to_kind(kind)?)) };
    if row.is_empty() {
        let own = wide(col, &[stack, rows, cols])?.f_sqrt()?.f_reciprocal()?;
        return Ok([Scalar(1.0), narrow(own)?]);
    }
    let half = wide(all, &[stack, 1, 1])?.f_sqrt()?.f_sqrt()?;
    let [row, col] = [wide(row, &[stack, rows, 1])?, wide(col, &[stack, 1, cols])?];
    Ok([narrow(half.f_div(&row.f_sqrt()?)?)?, narrow(half.f_div(&col.f_sqrt()?)?)?])
}

pub(super) fn copy(copies: &[Copy<'_>]) -> Result<()> {
    for copy in copies {
        store_matrix(&copy.to.view(), &*copy.from.tensor()?)?;
    }
    Ok(())
}

pub(super) fn move_down(moves: &[(FlatView, FlatView)]) -> Result<()> {
    for (from, to) in moves {
        // A run may overlap itself.
        let aside = copied(&*from.tensor(&[from.len()])?)?;
        to.tensor(&[to.len()])?.shallow_clone().f_copy_(&aside)?;
    }
    Ok(())
}

pub(super) fn sum(messages: &Messages<'_>, factor: f64, to: &FlatView) -> Result<()> {
    let Messages { all, pitch, count } = *messages;
    if to.is_empty() {
        return Ok(());
    }
    let mut total = Scalar(0.0);
    for message in 0..count {
        total = total + Computed(load(&all.part(message * pitch, to.len()), Kind::Double)?);
    }
    let like = to.tensor(&[to.len()])?;
    store(to, &(total * factor).tensor(&like.f_to_kind(Kind::Double)?)?)
}
