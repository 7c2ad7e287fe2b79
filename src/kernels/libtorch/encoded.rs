//! Elements that are more than numbers of their type: block-quantized values, stochastically rounded numbers, and weights in
//! two halves. All have the same bits as on the host.

use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::kernels::cpu::blocks::book;
use crate::kernels::cpu::minifloat::{Octaves, POSITIVE, SIGNED, SMALLEST, TO_HALVES, ZERO};
use crate::tensor::{Blocks, DType, Encoding, FlatView, Rounding, Span, to_i64};

/// Elements for which random numbers are made at once.
const AT_ONCE: i64 = 1 << 22;
const WORD: i64 = 0xffff_ffff;
const HALF: i64 = 0xffff;

/// Dequantizes 8-bit values.
pub(super) fn decode(x: &FlatView<'_>, q8: &Tensor, kind: Kind) -> Result<Tensor> {
    let Some((Encoding::Blocks(blocks), first)) = x.encoding() else {
        return Err(Error::Internal("quantized values without blocks".into()));
    };
    let (values, _) = book(x.dtype());
    let values = Tensor::f_from_slice(values)?.f_to_device(q8.device())?;
    let scales = scales_of(blocks)?.f_index_select(0, &numbers_of(blocks, first, q8)?)?;
    let numbers = values.f_index_select(0, &q8.f_to_kind(Kind::Int64)?)?.f_mul(&scales)?;
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

/// Returns the weights whose parameters are `high` (see `crate::kernels::cpu::master`), if these are weights in two halves.
pub(super) fn join(x: &FlatView<'_>, high: &Tensor, kind: Kind) -> Result<Option<Tensor>> {
    let Some(low) = x.remainders() else { return Ok(None) };
    let low = low.tensor(&[low.len()])?.shallow_clone();
    let count = to_i64(x.len())?;
    let weights = Tensor::f_empty([count], (kind, high.device()))?;
    for (start, length) in pieces(count) {
        let [high, low] = [high, &low].map(|all| all.f_narrow(0, start, length));
        let (high, low) = (high?, low?.f_to_kind(Kind::Int64)?);
        let whole = high.f_view_dtype(Kind::Int16)?.f_to_kind(Kind::Int64)?;
        let whole = whole.f_sub(&low.f_lt(0)?.f_to_kind(Kind::Int64)?)?.f_mul_scalar(0x1_0000)?;
        let bits = whole.f_add(&low.f_bitwise_and(HALF)?)?;
        let found =
            with_sign(&bits.f_bitwise_and(WORD)?, 32)?.f_to_kind(Kind::Int)?.f_view_dtype(Kind::Float)?;
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
    for (start, length) in pieces(count) {
        let x = numbers.f_narrow(0, start, length)?.f_to_kind(Kind::Float)?.f_contiguous()?;
        let bits = x.f_view_dtype(Kind::Int)?.f_to_kind(Kind::Int64)?.f_bitwise_and(WORD)?;
        let high = |x: &Tensor| x.f_bitwise_right_shift_tensor_scalar(16);
        let rounded = high(&bits.f_add_scalar(0x8000)?)?.f_bitwise_and(HALF)?;
        let quiet = high(&bits)?.f_bitwise_or(0x40)?;
        let is_lost = x.f_isnan()?;
        let upper = with_sign(&quiet.f_where_self(&is_lost, &rounded)?, 16)?.f_to_kind(Kind::Int16)?;
        let lower = bits.f_bitwise_and(HALF)?.f_masked_fill(&is_lost, 0)?;
        stored.f_narrow(0, start, length)?.f_copy_(&upper.f_view_dtype(Kind::BFloat16)?)?;
        low.f_narrow(0, start, length)?.f_copy_(&with_sign(&lower, 16)?.f_to_kind(Kind::Int16)?)?;
    }
    Ok(())
}

/// The same lowest bits as numbers with a sign.
fn with_sign(x: &Tensor, bits: u32) -> Result<Tensor> {
    let wraps = x.f_ge(1_i64 << (bits - 1))?.f_to_kind(Kind::Int64)?.f_mul_scalar(1_i64 << bits)?;
    Ok(x.f_sub(&wraps)?)
}

/// Starts and lengths of parts that are worked on at once.
fn pieces(count: i64) -> impl Iterator<Item = (i64, i64)> {
    let parts = (0..).map(|part| part * AT_ONCE).take_while(move |start| *start < count);
    parts.map(move |start| (start, AT_ONCE.min(count - start)))
}

/// The scales of all blocks.
fn scales_of(blocks: &Blocks) -> Result<Tensor> {
    // SAFETY: a view of quantized values borrows the scales of their blocks too (`Blocks::scales`).
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

    let zero = i64::from(book(dtype).1);
    let random = match &blocks.rounding {
        Some(rounding) => random_halves(rounding, to_i64(first)?, to_i64(count)?, &quotients)?,
        None => block_of.f_zeros_like()?.f_add_scalar(1_i64 << 15)?,
    };
    let find = if dtype == DType::Q8 { signed } else { unsigned };
    let q8 = find(&quotients, &random)?;
    // A block of zeros, or with a scale that is not finite, is quantized to 0.
    let says_nothing = scale.f_eq(0.0)?.f_logical_or(&scale.f_isfinite()?.f_logical_not()?)?;
    let none = q8.f_zeros_like()?.f_add_scalar(zero)?;
    Ok(stored.f_copy_(&none.f_where_self(&says_nothing, &q8)?)?)
}

/// The numbers of entries for numbers with these bits, as `crate::kernels::cpu::minifloat` has them.
fn numbers_by_bits(parts: &[Octaves], bits: &Tensor, random: &Tensor) -> Result<Tensor> {
    let mut found: Option<Tensor> = None;
    for part in parts.iter().rev() {
        let (cut, base) = (i64::from(part.cut), i64::from(part.base));
        let add = random.f_mul_scalar(1_i64 << (cut - 16))?.f_add_scalar(1_i64 << (cut - 17))?;
        let own = bits.f_add(&add)?.f_bitwise_right_shift_tensor_scalar(cut)?.f_sub_scalar(base)?;
        found = Some(match found {
            Some(below) => own.f_where_self(&bits.f_ge(i64::from(part.from))?, &below)?,
            None => own,
        });
    }
    found.ok_or_else(|| Error::Internal("a code book without entries".into()))
}

/// Quantizes numbers of either sign.
fn signed(quotients: &Tensor, random: &Tensor) -> Result<Tensor> {
    let (size, zero) = (quotients.f_abs()?, i64::from(ZERO));
    let bits = size.f_view_dtype(Kind::Int)?.f_to_kind(Kind::Int64)?;
    let above = numbers_by_bits(&SIGNED, &bits, random)?.f_clamp_max(zero)?;
    let chance = size.f_mul_scalar(f64::from(TO_HALVES))?.f_add(&random.f_to_kind(Kind::Float)?)?;
    let below = chance.f_ge(65536.0)?.f_to_kind(Kind::Int64)?;
    let found = above.f_where_self(&size.f_ge(f64::from(SMALLEST))?, &below)?;
    Ok(found.f_neg()?.f_where_self(&quotients.f_lt(0.0)?, &found)?.f_add_scalar(zero)?)
}

/// Quantizes numbers that are not negative.
fn unsigned(quotients: &Tensor, random: &Tensor) -> Result<Tensor> {
    let is_positive = quotients.f_gt(0.0)?;
    let bits = quotients.f_view_dtype(Kind::Int)?.f_to_kind(Kind::Int64)?.f_mul(&is_positive)?;
    let found = numbers_by_bits(&POSITIVE, &bits, random)?;
    Ok(found.f_clamp_min(1_i64)?.f_clamp_max(255_i64)?.f_mul(&is_positive)?)
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

/// Rounds to 16 bits so that the mean is the number.
fn round(rounding: &Rounding, first: usize, stored: &mut Tensor, numbers: &Tensor) -> Result<()> {
    for (start, length) in pieces(to_i64(numbers.numel())?) {
        let x = numbers.f_narrow(0, start, length)?.f_to_kind(Kind::Float)?;
        let random = random_halves(rounding, to_i64(first)? + start, length, &x)?;
        let halves = match stored.kind() {
            Kind::Half => half_bits(&x, &random, rounding.stays_positive)?,
            _ => bfloat_bits(&x, &random)?,
        };
        // The same 16 bits as a number with a sign.
        let halves = with_sign(&halves, 16)?.f_to_kind(Kind::Int16)?;
        stored.f_narrow(0, start, length)?.f_copy_(&halves.f_view_dtype(stored.kind())?)?;
    }
    Ok(())
}

/// The bits of float32 numbers, in 64-bit integers that are not negative.
fn bits_of(x: &Tensor) -> Result<Tensor> {
    Ok(x.f_view_dtype(Kind::Int)?.f_to_kind(Kind::Int64)?.f_bitwise_and(WORD)?)
}

/// The bits of bfloat16 numbers, as `crate::kernels::cpu::rounding` has them.
fn bfloat_bits(x: &Tensor, random: &Tensor) -> Result<Tensor> {
    let bits = bits_of(x)?;
    let high = |x: &Tensor| x.f_bitwise_right_shift_tensor_scalar(16);
    let rounded = high(&bits.f_add(random)?)?.f_bitwise_and(HALF)?;
    let quiet = high(&bits)?.f_bitwise_or(0x40)?;
    Ok(quiet.f_where_self(&x.f_isnan()?, &rounded)?)
}

/// The bits of float16 numbers, as `crate::kernels::cpu::rounding` has them.
fn half_bits(x: &Tensor, random: &Tensor, stays_positive: bool) -> Result<Tensor> {
    const BIAS: i64 = (127 - 15) << 10;
    let (size, least_normal) = (x.f_abs()?, 1.0 / 16384.0);
    let is_small = size.f_lt(least_normal)?;
    let moved = size.f_add_scalar(least_normal)?.f_where_self(&is_small, &size)?;
    let cut = bits_of(&moved)?.f_add(&random.f_bitwise_right_shift_tensor_scalar(3)?)?;
    let cut = cut.f_bitwise_right_shift_tensor_scalar(13)?.f_sub_scalar(BIAS)?;
    let cut = cut.f_sub(&is_small.f_to_kind(Kind::Int64)?.f_mul_scalar(1 << 10)?)?;
    let finite = cut.f_clamp_min(i64::from(stays_positive))?.f_clamp_max(0x7c00_i64)?;
    let finite = finite.f_mul(&size.f_gt(0.0)?)?;
    let sign = bits_of(x)?.f_bitwise_right_shift_tensor_scalar(16)?.f_bitwise_and(0x8000)?;
    let nan = sign.f_bitwise_or(0x7e00)?;
    Ok(nan.f_where_self(&x.f_isnan()?, &sign.f_add(&finite)?)?)
}

/// The random numbers of elements, by their position in the whole tensor.
fn random_halves(rounding: &Rounding, first: i64, count: i64, like: &Tensor) -> Result<Tensor> {
    let (mut parts, mut at) = (Vec::new(), first);
    while at < first + count || parts.is_empty() {
        let (start, spans, end) = rounding.places.piece(usize::try_from(at).unwrap_or(0));
        let end = end.map_or(Ok(i64::MAX), to_i64)?.min(first + count);
        parts.push(random_of_piece(rounding.key, spans, at - to_i64(start)?, end - at, like)?);
        at = end;
    }
    Ok(Tensor::f_cat(&parts, 0)?)
}

/// The same within a piece.
fn random_of_piece(key: [u32; 2], spans: &[Span], first: i64, count: i64, like: &Tensor) -> Result<Tensor> {
    let mut rest = Tensor::f_arange_start(first, first + count, (Kind::Int64, like.device()))?;
    let (mut place, mut step) = (rest.f_zeros_like()?, 1_i64);
    for &(size, start, length) in spans.iter().rev() {
        let length = to_i64(length.max(1))?;
        let here = rest.f_remainder(length)?.f_add_scalar(to_i64(start)?)?.f_mul_scalar(step)?;
        place = place.f_add(&here)?;
        rest = whole(&rest, length)?;
        step = step.saturating_mul(to_i64(size)?);
    }
    // Two numbers in each word.
    let word = word(&whole(&place, 2)?, key)?;
    let upper = word.f_bitwise_right_shift_tensor_scalar(16)?;
    let is_upper = place.f_remainder(2)?.f_eq(1)?;
    Ok(upper.f_where_self(&is_upper, &word)?.f_bitwise_and(HALF)?)
}

/// Words by number, as `crate::kernels::cpu::rounding` has them, in 64-bit integers.
fn word(at: &Tensor, [key, tag]: [u32; 2]) -> Result<Tensor> {
    let sum = |x: &Tensor, y: i64| -> Result<Tensor> { Ok(x.f_add_scalar(y)?.f_bitwise_and(WORD)?) };
    let shifted = |x: &Tensor, by: i64| x.f_bitwise_xor_tensor(&x.f_bitwise_right_shift_tensor_scalar(by)?);
    let high = at.f_bitwise_right_shift_tensor_scalar(32)?.f_bitwise_and(WORD)?;
    let x = sum(&at.f_bitwise_and(WORD)?, i64::from(key))?;
    let x = product(&shifted(&x, 17)?, 0xED5A_D4BB)?;
    let x = sum(&x.f_add(&product(&high, 0x9E37_79B9)?)?, i64::from(tag))?;
    let x = product(&shifted(&x, 11)?, 0xAC4C_1B51)?;
    let x = product(&shifted(&x, 15)?, 0x3184_8BAB)?;
    Ok(shifted(&x, 14)?)
}

/// Lower word of products of 32-bit numbers; nothing exceeds 63 bits.
fn product(x: &Tensor, by: i64) -> Result<Tensor> {
    let upper = x.f_mul_scalar(by >> 16)?.f_bitwise_and(HALF)?.f_mul_scalar(1 << 16)?;
    Ok(upper.f_add(&x.f_mul_scalar(by & HALF)?)?.f_bitwise_and(WORD)?)
}
