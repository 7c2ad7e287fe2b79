//! Elements that are more than numbers of their type: codes of blocks, numbers that are rounded at random, and weights in two
//! halves, all to the same bits as on the host.

use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::kernels::cpu::blocks::book;
use crate::tensor::{Blocks, DType, Encoding, FlatView, Rounding, to_i64};

/// Elements for which random numbers are made at once.
const AT_ONCE: i64 = 1 << 22;
/// Numbers of 16 bits that one block of the generator gives.
const LANES: i64 = 8;
const WORD: i64 = 0xffff_ffff;
const HALF: i64 = 0xffff;

/// The numbers that codes stand for.
pub(super) fn decode(x: &FlatView<'_>, codes: &Tensor, kind: Kind) -> Result<Tensor> {
    let Some((Encoding::Blocks(blocks), first)) = x.encoding() else {
        return Err(Error::Internal("codes without blocks".into()));
    };
    let (values, _) = book(x.dtype());
    let values = Tensor::f_from_slice(&values)?.f_to_device(codes.device())?;
    let scales = scales_of(blocks)?.f_index_select(0, &numbers_of(blocks, first, codes)?)?;
    let numbers = values.f_index_select(0, &codes.f_to_kind(Kind::Int64)?)?.f_mul(&scales)?;
    Ok(numbers.f_to_kind(kind)?)
}

/// Stores numbers as their encoding has it.
pub(super) fn encode(x: &FlatView<'_>, stored: &mut Tensor, numbers: &Tensor) -> Result<()> {
    match x.encoding() {
        Some((Encoding::Blocks(blocks), first)) => encode_blocks(x.dtype(), blocks, first, stored, numbers),
        Some((Encoding::Rounding(rounding), first)) => round(rounding, first, stored, numbers),
        Some((Encoding::Master(_), _)) => split(x, stored, numbers),
        None => Ok(stored.f_copy_(numbers)?),
    }
}

/// The weights of which `high` are the parameters (see `crate::kernels::cpu::master`), if these are weights in two halves.
pub(super) fn join(x: &FlatView<'_>, high: &Tensor, kind: Kind) -> Result<Option<Tensor>> {
    let Some(low) = x.remainders() else { return Ok(None) };
    let low = low.tensor(&[low.len()])?.shallow_clone();
    let count = to_i64(x.len())?;
    let weights = Tensor::f_empty([count], (kind, high.device()))?;
    for start in (0..count).step_by(usize::try_from(AT_ONCE).unwrap_or(1)) {
        let length = AT_ONCE.min(count - start);
        let [high, low] = [high, &low].map(|all| all.f_narrow(0, start, length));
        let (high, low) = (high?, low?.f_to_kind(Kind::Int64)?);
        let whole = high.f_view_dtype(Kind::Int16)?.f_to_kind(Kind::Int64)?;
        let whole = whole.f_sub(&low.f_lt(0)?.f_to_kind(Kind::Int64)?)?.f_mul_scalar(0x1_0000)?;
        let bits = whole.f_add(&low.f_bitwise_and(HALF)?)?;
        let found =
            signed(&bits.f_bitwise_and(WORD)?, 32)?.f_to_kind(Kind::Int)?.f_view_dtype(Kind::Float)?;
        let found = high.f_to_kind(Kind::Float)?.f_where_self(&found.f_isnan()?, &found)?;
        weights.f_narrow(0, start, length)?.f_copy_(&found)?;
    }
    Ok(Some(weights))
}

/// Stores weights in two halves.
fn split(x: &FlatView<'_>, stored: &mut Tensor, numbers: &Tensor) -> Result<()> {
    let none = || Error::Internal("weights without their low halves".into());
    let low = x.remainders().ok_or_else(none)?;
    let low = low.tensor(&[low.len()])?.shallow_clone();
    let count = to_i64(numbers.numel())?;
    for start in (0..count).step_by(usize::try_from(AT_ONCE).unwrap_or(1)) {
        let length = AT_ONCE.min(count - start);
        let x = numbers.f_narrow(0, start, length)?.f_to_kind(Kind::Float)?.f_contiguous()?;
        let bits = x.f_view_dtype(Kind::Int)?.f_to_kind(Kind::Int64)?.f_bitwise_and(WORD)?;
        let high = |x: &Tensor| x.f_bitwise_right_shift_tensor_scalar(16);
        let rounded = high(&bits.f_add_scalar(0x8000)?)?.f_bitwise_and(HALF)?;
        let quiet = high(&bits)?.f_bitwise_or(0x40)?;
        let is_lost = x.f_isnan()?;
        let upper = signed(&quiet.f_where_self(&is_lost, &rounded)?, 16)?.f_to_kind(Kind::Int16)?;
        let lower = bits.f_bitwise_and(HALF)?.f_masked_fill(&is_lost, 0)?;
        stored.f_narrow(0, start, length)?.f_copy_(&upper.f_view_dtype(Kind::BFloat16)?)?;
        low.f_narrow(0, start, length)?.f_copy_(&signed(&lower, 16)?.f_to_kind(Kind::Int16)?)?;
    }
    Ok(())
}

/// The same lowest bits as numbers with a sign.
fn signed(x: &Tensor, bits: u32) -> Result<Tensor> {
    let wraps = x.f_ge(1_i64 << (bits - 1))?.f_to_kind(Kind::Int64)?.f_mul_scalar(1_i64 << bits)?;
    Ok(x.f_sub(&wraps)?)
}

/// The scales of all blocks.
fn scales_of(blocks: &Blocks) -> Result<Tensor> {
    // SAFETY: who has a view of codes has the scales of their blocks with it (`Blocks::scales`).
    let view = unsafe { blocks.scales.view(None) };
    Ok(view.tensor(&[view.len()])?.shallow_clone())
}

/// The number of the block of each element.
fn numbers_of(blocks: &Blocks, first: usize, like: &Tensor) -> Result<Tensor> {
    let (first, width, block) = (to_i64(first)?, to_i64(blocks.width.max(1))?, to_i64(blocks.block)?);
    let count = to_i64(like.numel())?;
    let at = Tensor::f_arange_start(first, first + count, (Kind::Int64, like.device()))?;
    let (row, col) = (whole(&at, width)?, at.f_remainder(width)?);
    let in_row = (width + block - 1) / block;
    Ok(row.f_mul_scalar(in_row)?.f_add(&whole(&col, block)?)?)
}

/// The whole quotients of numbers that are not negative.
fn whole(x: &Tensor, by: i64) -> Result<Tensor> {
    Ok(x.f_div_scalar_mode(by, "floor")?)
}

fn encode_blocks(
    dtype: DType,
    blocks: &Blocks,
    first: usize,
    stored: &mut Tensor,
    numbers: &Tensor,
) -> Result<()> {
    let (values, zero) = book(dtype);
    let numbers = numbers.f_to_kind(Kind::Float)?;
    let count = numbers.numel();
    if count == 0 {
        return Ok(());
    }
    let (start, last) = (blocks.block_at(first).0, blocks.block_at(first + count - 1).0);
    let many = to_i64(last + 1 - start)?;
    let block_of = numbers_of(blocks, first, stored)?.f_sub_scalar(to_i64(start)?)?;
    let largest = largest_of(blocks, first, &block_of, many, &numbers)?;
    scales_of(blocks)?.f_narrow(0, to_i64(start)?, many)?.f_copy_(&largest)?;

    let scale = largest.f_index_select(0, &block_of)?;
    let (up, small) = (18_446_744_073_709_551_616.0_f64, 1.0 / 1_152_921_504_606_846_976.0_f64);
    let one = scale.f_ones_like()?;
    let power = one.f_mul_scalar(up)?.f_where_self(&scale.f_lt(small)?, &one)?;
    let power = one.f_mul_scalar(1.0 / up)?.f_where_self(&scale.f_gt(1.0 / small)?, &power)?;
    let inverse = scale.f_mul(&power)?.f_reciprocal()?;
    let quotients = numbers.f_mul(&power)?.f_mul(&inverse)?;

    // Middles of neighbours from 0 on; of two entries that are equally near the one nearer to 0.
    let start = usize::try_from(zero).unwrap_or(0);
    let middles: Vec<f64> = values[start..]
        .windows(2)
        .map(|pair| f64::midpoint(f64::from(pair[0]), f64::from(pair[1])))
        .collect();
    let middles = Tensor::f_from_slice(&middles)?.f_to_device(numbers.device())?;
    let away = quotients.f_abs()?.f_to_kind(Kind::Double)?.f_bucketize(&middles, false, false)?;
    let is_negative = quotients.f_lt(0.0)?;
    let below = away.f_clamp_max(zero)?.f_neg()?;
    let codes = below.f_where_self(&is_negative, &away)?.f_add_scalar(zero)?;
    // A block of zeros, or whose scale is no number, has the code of zero.
    let says_nothing = scale.f_eq(0.0)?.f_logical_or(&scale.f_isfinite()?.f_logical_not()?)?;
    let none = codes.f_zeros_like()?.f_add_scalar(zero)?;
    Ok(stored.f_copy_(&none.f_where_self(&says_nothing, &codes)?)?)
}

/// The largest absolute value of each of `many` blocks; NaN where there is one.
fn largest_of(
    blocks: &Blocks,
    first: usize,
    block_of: &Tensor,
    many: i64,
    numbers: &Tensor,
) -> Result<Tensor> {
    let (first, width, block) = (to_i64(first)?, to_i64(blocks.width.max(1))?, to_i64(blocks.block)?);
    let at =
        Tensor::f_arange_start(first, first + to_i64(numbers.numel())?, (Kind::Int64, numbers.device()))?;
    let slot = block_of.f_mul_scalar(block)?.f_add(&at.f_remainder(width)?.f_remainder(block)?)?;
    let mut padded = Tensor::f_zeros([many * block], (Kind::Float, numbers.device()))?;
    let _ = padded.f_index_copy_(0, &slot, &numbers.f_abs()?)?;
    // NaN is the largest.
    Ok(padded.f_reshape([many, block])?.f_amax(&[1_i64][..], false)?)
}

/// Rounds to bfloat16 so that the mean is the number.
fn round(rounding: &Rounding, first: usize, stored: &mut Tensor, numbers: &Tensor) -> Result<()> {
    let (count, first) = (to_i64(numbers.numel())?, to_i64(first)?);
    for start in (0..count).step_by(usize::try_from(AT_ONCE).unwrap_or(1)) {
        let length = AT_ONCE.min(count - start);
        let x = numbers.f_narrow(0, start, length)?.f_to_kind(Kind::Float)?;
        let bits = x.f_view_dtype(Kind::Int)?.f_to_kind(Kind::Int64)?.f_bitwise_and(WORD)?;
        let random = random_halves(rounding, first + start, length, &x)?;
        let high = |x: &Tensor| x.f_bitwise_right_shift_tensor_scalar(16);
        let rounded = high(&bits.f_add(&random)?)?.f_bitwise_and(HALF)?;
        let quiet = high(&bits)?.f_bitwise_or(0x40)?;
        let halves = quiet.f_where_self(&x.f_isnan()?, &rounded)?;
        let halves = signed(&halves, 16)?.f_to_kind(Kind::Int16)?;
        stored.f_narrow(0, start, length)?.f_copy_(&halves.f_view_dtype(Kind::BFloat16)?)?;
    }
    Ok(())
}

/// The random numbers of elements, by their position in the whole tensor.
fn random_halves(rounding: &Rounding, first: i64, count: i64, like: &Tensor) -> Result<Tensor> {
    let mut rest = Tensor::f_arange_start(first, first + count, (Kind::Int64, like.device()))?;
    let (mut place, mut step) = (rest.f_zeros_like()?, 1_i64);
    for &(size, start, length) in rounding.places.spans().iter().rev() {
        let length = to_i64(length.max(1))?;
        let here = rest.f_remainder(length)?.f_add_scalar(to_i64(start)?)?.f_mul_scalar(step)?;
        place = place.f_add(&here)?;
        rest = whole(&rest, length)?;
        step = step.saturating_mul(to_i64(size)?);
    }
    let (block, lane) = (whole(&place, LANES)?, place.f_remainder(LANES)?);
    let words = philox(&block, rounding.key)?;
    // Two numbers in each word.
    let number = whole(&lane, 2)?.f_unsqueeze(0)?;
    let word = Tensor::f_stack(&words, 0)?.f_gather(0, &number, false)?.f_squeeze_dim(0)?;
    let upper = word.f_bitwise_right_shift_tensor_scalar(16)?;
    let is_upper = lane.f_remainder(2)?.f_eq(1)?;
    Ok(upper.f_where_self(&is_upper, &word)?.f_bitwise_and(HALF)?)
}

/// Blocks of `Philox4x32-10` by number, as `crate::kernels::cpu::philox` has them, in 64-bit integers.
fn philox(block: &Tensor, [key0, key1, high0, high1]: [u32; 4]) -> Result<Vec<Tensor>> {
    let fill = |x: u32| -> Result<Tensor> { Ok(block.f_zeros_like()?.f_add_scalar(i64::from(x))?) };
    let mut counter = [
        block.f_bitwise_and(WORD)?,
        block.f_bitwise_right_shift_tensor_scalar(32)?.f_bitwise_and(WORD)?,
        fill(high0)?,
        fill(high1)?,
    ];
    let mut key = [key0, key1];
    for _ in 0..10 {
        let ([upper0, lower0], [upper1, lower1]) =
            (product(&counter[0], 0xD251_1F53)?, product(&counter[2], 0xCD9E_8D57)?);
        let mix = |upper: &Tensor, own: &Tensor, key: u32| -> Result<Tensor> {
            Ok(upper.f_bitwise_xor_tensor(own)?.f_bitwise_xor(i64::from(key))?)
        };
        counter = [mix(&upper1, &counter[1], key[0])?, lower1, mix(&upper0, &counter[3], key[1])?, lower0];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    Ok(counter.into())
}

/// Upper and lower word of products of 32-bit numbers; nothing exceeds 63 bits.
fn product(x: &Tensor, by: i64) -> Result<[Tensor; 2]> {
    let [high, low] = [x.f_mul_scalar(by >> 16)?, x.f_mul_scalar(by & HALF)?];
    let middle = high.f_add(&low.f_bitwise_right_shift_tensor_scalar(16)?)?;
    let upper = middle.f_bitwise_right_shift_tensor_scalar(16)?;
    let lower = middle.f_bitwise_and(HALF)?.f_mul_scalar(1 << 16)?.f_add(&low.f_bitwise_and(HALF)?)?;
    Ok([upper, lower])
}
