//! Products of a matrix with thin factors, and random factors. The matrix is used as it is stored; `transposed` says
//! that the factors belong to its transpose.

use tch::Tensor;

use super::random::{Key, fill_normal};
use crate::error::{Error, Result};
use crate::kernels::{
    self, Decay, Job, Kernel, Normals, ThinProduct, fill_normals, frozen, multiply, on_device, rounded,
    stream,
};
use crate::tensor::{MatrixViewMut, Stack, stacked, stacked_mut};

/// A matrix with factors: B, the oriented matrix `[m, n]`, `p` `[m, r]` and `r` `[n, r]`, all of one type.
#[derive(Debug)]
pub struct Factored<'a> {
    /// B or its transpose.
    pub stored: MatrixViewMut<'a>,
    /// True if `stored` is the transpose.
    pub transposed: bool,
    /// The factor with B's rows.
    pub p: MatrixViewMut<'a>,
    /// The factor with B's columns.
    pub r: MatrixViewMut<'a>,
}

impl Factored<'_> {
    /// `p = B·r`.
    fn project(&mut self) -> ThinProduct<'_> {
        let (left, right) = ((self.stored.view(), self.transposed), (self.r.view(), false));
        ThinProduct { out: self.p.reborrow(), left, right, keep: 0.0 }
    }

    /// `r = Bᵀ·p`.
    fn back_project(&mut self) -> ThinProduct<'_> {
        let (left, right) = ((self.stored.view(), !self.transposed), (self.p.view(), false));
        ThinProduct { out: self.r.reborrow(), left, right, keep: 0.0 }
    }

    /// `B = keep·B + p·rᵀ`.
    fn product(&mut self, keep: f64) -> ThinProduct<'_> {
        let (p, r) = (self.p.view(), self.r.view());
        let (left, right) = if self.transposed { (r, p) } else { (p, r) };
        ThinProduct { out: self.stored.reborrow(), left: (left, false), right: (right, true), keep }
    }
}

/// `p = B·r` for every matrix.
///
/// # Errors
/// Whatever libtorch says.
pub fn project(all: &mut [Factored<'_>]) -> Result<()> {
    run(all.iter_mut().map(Factored::project))
}

/// `r = Bᵀ·p` for every matrix.
///
/// # Errors
/// Whatever libtorch says.
pub fn back_project(all: &mut [Factored<'_>]) -> Result<()> {
    run(all.iter_mut().map(Factored::back_project))
}

/// `B = p·rᵀ` for every matrix; what is in B is not read.
///
/// # Errors
/// Whatever libtorch says.
pub fn set_product(all: &mut [Factored<'_>]) -> Result<()> {
    run(all.iter_mut().map(|f| f.product(0.0)))
}

/// `B = B + p·rᵀ` for every matrix.
///
/// # Errors
/// Whatever libtorch says.
pub fn add_product(all: &mut [Factored<'_>]) -> Result<()> {
    run(all.iter_mut().map(|f| f.product(1.0)))
}

/// `B = (1 - decay)·B + p·rᵀ` for every matrix, with a decay that is proportional to the learning rate; `None` where there
/// is none at any rate.
///
/// # Errors
/// Whatever libtorch says.
pub fn decay_and_add_product(all: &mut [Factored<'_>], decay: Option<f64>) -> Result<()> {
    if on_device()
        && let Some(decay) = decay
    {
        // One launch for all, which a replay can tell another factor.
        let runs = all.iter_mut().flat_map(|f| f.stored.reborrow().into_runs());
        let mut jobs: Vec<_> = runs.map(|run| Job { read: [], write: [run] }).collect();
        kernels::run(&Decay { decay, per_rate: true }, &mut jobs)?;
        return add_product(all);
    }
    run(all.iter_mut().map(|f| f.product(1.0 - decay.unwrap_or(0.0))))
}

/// Multiplications up to which faer takes a product: libtorch spends 2 to 5 us on the call.
const SMALL: usize = 1 << 22;
/// Rank up to which libtorch does not take products: at two threads those of rank 48 take a step of GPT-160M shapes 36 ms
/// by libtorch and 26 ms here, at one thread 45 and 40; at rank 192 one thread does a step in 98 ms with libtorch's and
/// 120 ms with these.
const THIN: usize = 96;

fn run<'a>(products: impl Iterator<Item = ThinProduct<'a>>) -> Result<()> {
    if on_device() {
        return frozen(|| in_stacks(&mut products.collect::<Vec<_>>()));
    }
    let (mut tiled, products): (Vec<_>, Vec<_>) = products.partition(is_tiled);
    if let Some(kernel) = tiled.first().and_then(|p| Kernel::of(p.out.dtype())) {
        kernel.thin_products(&mut tiled)?;
    }
    let (mut kept, products): (Vec<_>, Vec<_>) = products.into_iter().partition(is_scaled);
    if let Some(kernel) = kept.first().and_then(|p| Kernel::of(p.out.dtype())) {
        kernel.thin_products(&mut kept)?;
    }
    let (own, mut others): (Vec<_>, Vec<_>) = products.into_iter().partition(own);
    // faer is slow where it has to turn a large factor: 50 to 90 GFLOP/s, the kernel does 60 to 130.
    let (mut turned, mut straight): (Vec<_>, Vec<_>) =
        own.into_iter().partition(|p| p.left.1 && p.work() > SMALL);
    multiply(&mut straight);
    match turned.first().and_then(|p| Kernel::of(p.out.dtype())) {
        Some(kernel) => kernel.thin_products(&mut turned)?,
        None => turned.iter_mut().try_for_each(by_library)?,
    }
    others.iter_mut().try_for_each(by_library)
}

/// Tests whether a product scales the matrix that it is added to, which libtorch and faer do in a pass of its own: with
/// decay that is a quarter of the time of an update of rank 64, and less than libtorch gains where the rank is larger.
#[allow(clippy::float_cmp)] // a factor is exactly 1 or it is applied
fn is_scaled(product: &ThinProduct<'_>) -> bool {
    let dtype = product.out.dtype();
    let scaled = product.keep != 0.0 && product.keep != 1.0;
    let thin = product.inner() <= THIN && product.work() > SMALL && !product.left.1;
    scaled && thin && !dtype.is_narrow() && Kernel::of(dtype).is_some()
}

/// Tests whether the tiles of a kernel take a product whatever its rank: where libtorch gets none of this type or is
/// slower than they are, or in bfloat16 would take longer to compile code for these sizes, as it does for every new
/// one, than many such products take.
fn is_tiled(product: &ThinProduct<'_>) -> bool {
    let tiles = match Kernel::of(product.out.dtype()) {
        Some(kernel) if kernel.is_alone() => true,
        Some(Kernel::Bf16Avx512) => product.work() <= SMALL,
        Some(kernel) => kernel.outruns_library() && product.work() > SMALL && !is_thin(product),
        None => false,
    };
    tiles && product.work() > 0 && (!product.left.1 || product.is_turned())
}

fn is_thin(product: &ThinProduct<'_>) -> bool {
    product.out.shape()[1].min(product.inner()) <= THIN
}

/// Tests whether a product is not libtorch's: a function of its sizes alone, so that equal matrices get equal bits.
fn own(product: &ThinProduct<'_>) -> bool {
    !product.out.dtype().is_narrow() && (is_thin(product) || product.work() <= SMALL)
}

/// Products by libtorch, those of matrices at equal distances in one call; what is added to stays as it is.
fn in_stacks(products: &mut [ThinProduct<'_>]) -> Result<()> {
    let mut rest = products;
    while !rest.is_empty() {
        let (same, others) = rest.split_at_mut(alike(rest));
        if let [one] = same {
            by_library(one)?;
        } else {
            let turned = [same[0].left.1, same[0].right.1];
            let keep = same[0].keep;
            let left = stacked(same.iter().map(|p| p.left.0))?;
            let right = stacked(same.iter().map(|p| p.right.0))?;
            let left = if turned[0] { left.f_transpose(1, 2)? } else { left.f_alias()? };
            let right = if turned[1] { right.f_transpose(1, 2)? } else { right.f_alias()? };
            let (left, right) = (rounded(&left)?.unwrap_or(left), rounded(&right)?.unwrap_or(right));
            let mut out = stacked_mut(same.iter_mut().map(|p| &mut p.out).collect())?;
            let _ = if keep == 0.0 { left.f_bmm_out(&out, &right)? } else { out.f_baddbmm_(&left, &right)? };
        }
        rest = others;
    }
    Ok(())
}

/// Counts the first products whose matrices are at equal distances.
fn alike(products: &[ThinProduct<'_>]) -> usize {
    let operands =
        |p: &ThinProduct<'_>| [Stack::new(&p.out.view()), Stack::new(&p.left.0), Stack::new(&p.right.0)];
    let mut stacks = operands(&products[0]);
    let longer = products[1..].iter().take_while(|next| {
        let [out, left, right] = stacks;
        let longer = [out.with(&next.out.view()), left.with(&next.left.0), right.with(&next.right.0)];
        let [Some(out), Some(left), Some(right)] = longer else { return false };
        stacks = [out, left, right];
        true
    });
    1 + longer.count()
}

#[allow(clippy::float_cmp)] // a factor is exactly 1 or it is applied
fn by_library(product: &mut ThinProduct<'_>) -> Result<()> {
    let (left, right, mut out) = (product.left.0.tensor()?, product.right.0.tensor()?, product.out.tensor()?);
    let turned = |x: &Tensor, transposed| if transposed { x.f_tr().map(Some) } else { Ok(None) };
    let (left_turned, right_turned) = (turned(&left, product.left.1)?, turned(&right, product.right.1)?);
    let left = left_turned.as_ref().unwrap_or(&left);
    let right = right_turned.as_ref().unwrap_or(&right);
    let (left_rounded, right_rounded) = (rounded(left)?, rounded(right)?);
    let (left, right) = (left_rounded.as_ref().unwrap_or(left), right_rounded.as_ref().unwrap_or(right));
    if product.keep == 0.0 {
        let _ = left.f_mm_out(&out, right)?;
        return Ok(());
    }
    if product.keep != 1.0 {
        let _ = out.f_mul_scalar_(product.keep)?;
    }
    let _ = out.f_addmm_(left, right)?;
    Ok(())
}

/// Rows of a Gaussian matrix: a function of the key, of `tag` and of `step` only.
#[derive(Debug)]
pub struct GaussianRows<'a> {
    /// Key of the numbers.
    pub key: Key,
    /// Tag that separates uses of the key.
    pub tag: u32,
    /// Step that separates times.
    pub step: u64,
    /// The first row.
    pub first: usize,
    /// Matrix to fill, whose rows are contiguous.
    pub out: MatrixViewMut<'a>,
}

/// Fills matrices of one width with entries N(0, 1/columns), rounded to float32.
///
/// # Errors
/// Whatever libtorch or a kernel says.
pub fn gaussian_rows(all: &mut [GaussianRows<'_>]) -> Result<()> {
    let cols = all.first().map_or(0, |one| one.out.shape()[1]);
    #[allow(clippy::cast_precision_loss)] // a number of columns
    let factor = 1.0 / (cols.max(1) as f64).sqrt();
    let normals = all.iter_mut().map(|one| Normals {
        stream: stream([one.key.seed, one.key.stream, one.step], one.tag),
        first: (one.first * cols) as u64,
        out: one.out.all(),
    });
    if fill_normals(factor, &mut normals.collect::<Vec<_>>())? {
        return Ok(());
    }
    for one in all {
        let mut out = one.out.all();
        let mut numbers = vec![0.0_f32; out.len()];
        fill_normal(&mut numbers, one.key, one.tag, one.step, (one.first * cols) as u64);
        let mut out = out.tensor(&[numbers.len()])?;
        out.f_copy_(&Tensor::f_from_slice(&numbers)?.f_mul_scalar_(factor)?)?;
    }
    Ok(())
}

/// One Gaussian sketch `[rows, cols]` with entries N(0, 1/rows) for each (key, number of the block): a function of
/// these, of `tag` and of `step` only. float32.
///
/// # Errors
/// `Error::Value` for sizes beyond what can be addressed.
pub fn sketches(keys: &[(Key, usize)], rows: usize, cols: usize, tag: u32, step: u64) -> Result<Tensor> {
    let each = rows * cols;
    let mut numbers = vec![0.0_f32; keys.len() * each];
    for ((key, block), out) in keys.iter().zip(numbers.chunks_exact_mut(each.max(1))) {
        fill_normal(out, *key, tag, step, (block * each) as u64);
    }
    let size = [keys.len(), rows, cols]
        .map(|n| i64::try_from(n).map_err(|_| Error::Value(format!("size {n} is too large"))));
    let [count, rows_size, cols_size] = size;
    let mut sketch = Tensor::f_from_slice(&numbers)?.f_view([count?, rows_size?, cols_size?])?;
    #[allow(clippy::cast_precision_loss)] // a number of rows
    let _ = sketch.f_mul_scalar_(1.0 / (rows.max(1) as f64).sqrt())?;
    Ok(sketch)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test may panic")]
#[path = "low_rank_tests.rs"]
mod tests;
