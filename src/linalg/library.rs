//! The products of an iteration by libtorch, on a group of matrices.

use tch::{Kind, Tensor};

use super::products::Products;
use super::symmetric::{Symmetric, accumulate, number, product};
use super::views;
use crate::error::{Error, Result};
use crate::kernels::{LEAST_DIVISOR, divide_parts, on_device, squares_of_parts, symmetric_product};
use crate::tensor::FlatView;

/// Products of fewer multiplications are not spread over threads: 8 million take 0.1 ms, a fork and join 10 µs.
pub(super) const SPREAD_FROM: usize = 1 << 23;

/// Guard that keeps libtorch to the calling thread while it lives.
#[derive(Debug)]
pub struct OneThread(i32);

impl OneThread {
    /// The guard, until it is dropped.
    #[must_use]
    pub fn begin() -> Self {
        let before = tch::get_num_threads();
        if before > 1 {
            tch::set_num_threads(1);
        }
        Self(before)
    }
}

impl OneThread {
    /// The guard for products of so few multiplications that another thread costs more than it saves.
    #[must_use]
    pub fn for_small(multiplications: usize) -> Option<Self> {
        (multiplications < SPREAD_FROM).then(Self::begin)
    }
}

impl Drop for OneThread {
    fn drop(&mut self) {
        if self.0 > 1 {
            tch::set_num_threads(self.0);
        }
    }
}

/// Matrices and their workspace.
pub(super) struct Library {
    shape: [i64; 3],
    current: Tensor,
    next: Tensor,
    squares: Vec<Tensor>,
    symmetric: Symmetric,
    tall: bool,
    /// True if `next` is the memory of the caller's matrices.
    swapped: bool,
}

impl Library {
    /// Returns the elements of memory that `g` matrices need with `squares` symmetric ones each.
    pub(super) fn elements(g: i64, [m, n]: [i64; 2], squares: i64) -> i64 {
        let k = m.min(n);
        g * (m * n + squares * k * k)
    }

    /// Workspace of the matrices `[g, m, n]`. `alone`: they are matrices, not batches, for libtorch.
    pub(super) fn new(x_gmn: &Tensor, squares: i64, memory: &Tensor, alone: bool) -> Result<Self> {
        let (g, m, n) = x_gmn.size3()?;
        let k = m.min(n);
        // A large matrix is a matrix, not a batch: libtorch's products of two matrices are the faster ones. Whether it is
        // goes by its shape only: the two differ in rounding, and a result must not depend on what else is in the batch.
        let (shape, square) = if alone { (vec![m, n], vec![k, k]) } else { (vec![g, m, n], vec![g, k, k]) };
        let (size, square_size) = (g * m * n, g * k * k);
        let squares = (0..squares).map(|i| -> Result<Tensor> {
            Ok(memory.f_narrow(0, size + i * square_size, square_size)?.f_view(square.as_slice())?)
        });
        Ok(Self {
            shape: [g, m, n],
            current: x_gmn.f_view(shape.as_slice())?,
            next: memory.f_narrow(0, 0, size)?.f_view(shape.as_slice())?,
            squares: squares.collect::<Result<_>>()?,
            symmetric: Symmetric::new(g, k),
            tall: m > n,
            swapped: false,
        })
    }

    /// Writes the result to `home`, which is the memory of the matrices, in its type; `turned`: as transposes.
    pub(super) fn finish(mut self, home: &mut Tensor, turned: bool) -> Result<()> {
        if turned && !self.swapped {
            // It is where it has to be turned to.
            self.next.f_copy_(&self.current)?;
            std::mem::swap(&mut self.current, &mut self.next);
            self.swapped = true;
        }
        let result = self.current.f_view(self.shape)?;
        if turned {
            home.f_copy_(&result.f_transpose(1, 2)?)?;
        } else if self.swapped || home.f_kind()? != result.f_kind()? {
            home.f_copy_(&result)?;
        }
        Ok(())
    }

    /// `X <- S[p] X`.
    fn replace(&mut self, p: &Tensor) -> Result<()> {
        if self.tall {
            product(&mut self.next, &self.current, p)?;
        } else {
            product(&mut self.next, p, &self.current)?;
        }
        self.swap();
        Ok(())
    }

    /// `S[out] <- factor (Σ S[add] + S[a] S[b]) + identity I`, where a kernel computes it; else nothing, and false.
    fn by_kernel(
        &self,
        out: usize,
        [a, b]: [usize; 2],
        add: &[(f64, usize)],
        scalars: [f64; 2],
    ) -> Result<bool> {
        let addends = add.iter().map(|(weight, other)| Ok((*weight, self.square(*other)?)));
        let addends = addends.collect::<Result<Vec<_>>>()?;
        let add: Vec<_> = addends.iter().map(|(weight, other)| (*weight, other)).collect();
        symmetric_product(&self.square(out)?, [&self.square(a)?, &self.square(b)?], &add, scalars)
    }

    /// Takes what is in scratch for the matrices.
    pub(super) fn swap(&mut self) {
        std::mem::swap(&mut self.current, &mut self.next);
        self.swapped = !self.swapped;
    }

    /// Tests whether `keep I + P` is as good as P in this type. In bfloat16 `keep` is rounded together with the diagonal of P:
    /// results are then up to 1.28 times as far from the polynomial's. Of a 768 x 768 matrix with eight large singular
    /// values the smallest one becomes 1.082 there, where it is 1.106 otherwise and 1.110 exactly. Without the identity X is
    /// copied and read once more. Of `2 k² n` operations at 690 TFLOP/s and `6 k n` bytes at 3 TB/s that is 0.15 of the time of
    /// the product for k = 4096, and 0.9 of it for k = 768.
    fn adds_identity(&self) -> Result<bool> {
        Ok(self.current.f_kind()? != Kind::BFloat16)
    }

    fn square(&self, i: usize) -> Result<Tensor> {
        let found = self.squares.get(i).ok_or_else(|| Error::Internal(format!("no square {i}")))?;
        Ok(found.f_alias()?)
    }

    fn short(&self) -> Result<Tensor> {
        Ok(if self.tall { self.current.f_transpose(-2, -1)? } else { self.current.f_alias()? })
    }
}

impl Products for Library {
    fn gram(&mut self, out: usize) -> Result<()> {
        self.symmetric.gram(&mut self.square(out)?, &self.short()?, &self.next)
    }

    fn multiply(&mut self, out: usize, [a, b]: [usize; 2], add: &[(f64, usize)], factor: f64) -> Result<()> {
        if self.by_kernel(out, [a, b], add, [factor, 0.0])? {
            return Ok(());
        }
        let mut to = self.square(out)?;
        let (a, b) = (self.square(a)?, self.square(b)?);
        match add {
            [] => {
                let _ = to.f_zero_()?;
            }
            [(weight, first), rest @ ..] => {
                let _ = self.square(*first)?.f_mul_out(&to, &number(*weight)?)?;
                for (weight, other) in rest {
                    let other = self.square(*other)?;
                    let other = if is_one(*weight) { other } else { other.f_mul_scalar(*weight)? };
                    let _ = to.f_add_(&other)?;
                }
            }
        }
        self.symmetric.accumulate(&mut to, &a, &b, &self.next)?;
        if !is_one(factor) {
            let _ = to.f_mul_scalar_(factor)?;
        }
        Ok(())
    }

    fn combine(&mut self, out: usize, keep: f64, a: usize, factor: f64) -> Result<()> {
        let (mut to, a) = (self.square(out)?, self.square(a)?);
        if keep == 0.0 {
            let _ = a.f_mul_out(&to, &number(factor)?)?;
        } else {
            let _ = to.f_mul_scalar_(keep)?.f_add_(&a.f_mul_scalar(factor)?)?;
        }
        Ok(())
    }

    fn apply(&mut self, p: usize, keep: f64, factor: f64) -> Result<()> {
        let mut p = self.square(p)?;
        if !is_one(factor) {
            let _ = p.f_mul_scalar_(factor)?;
        }
        if self.adds_identity()? {
            let _ = p.f_diagonal(0, -2, -1)?.f_add_scalar_(keep)?;
            return self.replace(&p);
        }
        let _ = self.current.f_mul_out(&self.next, &number(keep)?)?;
        if self.tall {
            accumulate(&mut self.next, &self.current, &p)?;
        } else {
            accumulate(&mut self.next, &p, &self.current)?;
        }
        self.swap();
        Ok(())
    }

    fn multiply_and_apply(
        &mut self,
        out: usize,
        operands: [usize; 2],
        add: &[(f64, usize)],
        factor: f64,
        keep: f64,
    ) -> Result<()> {
        if self.adds_identity()? && self.by_kernel(out, operands, add, [factor, keep])? {
            return self.replace(&self.square(out)?);
        }
        self.multiply(out, operands, add, factor)?;
        self.apply(out, keep, 1.0)
    }

    fn divide(&mut self, gram: usize, square: usize, factor: f64) -> Result<f64> {
        let (mut gram, mut square) = (self.square(gram)?, self.square(square)?);
        let norm = norms(&square)?;
        // Zero divided by zero stays zero.
        let by = norm.f_pow_tensor_scalar(0.25)?.f_mul_scalar(factor)?.f_reciprocal()?;
        let by = by.f_masked_fill(&norm.f_eq(0.0)?, 0.0)?;
        let power =
            |n: i64| -> Result<Tensor> { Ok(by.f_pow_tensor_scalar(n)?.f_to_kind(gram_kind(&square)?)?) };
        let (one, two, four) = (power(1)?, power(2)?, power(4)?);
        let _ = self.current.f_mul_(&one)?;
        let _ = gram.f_mul_(&two)?;
        let _ = square.f_mul_(&four)?;
        Ok(1.0)
    }

    fn divide_rows(&mut self, gram: usize, factor: f64) -> Result<()> {
        self.gram(gram)?;
        let kind = if self.current.f_kind()? == Kind::Double { Kind::Double } else { Kind::Float };
        let sums = self.square(gram)?.f_abs_()?.f_sum_dim_intlist([-1].as_slice(), true, kind)?;
        let scale = sums.f_rsqrt()?.f_masked_fill(&sums.f_eq(0.0)?, 0.0)?.f_mul_scalar(factor.recip())?;
        let _ = self.current.f_mul_(&if self.tall { scale.f_transpose(-2, -1)? } else { scale })?;
        Ok(())
    }
}

/// The type in which factors of matrices of 16 bits are kept: not rounded to theirs.
fn gram_kind(x: &Tensor) -> Result<Kind> {
    Ok(if x.f_kind()? == Kind::Double { Kind::Double } else { Kind::Float })
}

/// The norm of each matrix `[.., m, n]`, contiguous, as `[.., 1, 1]`: in float64, so that no finite matrix overflows.
fn norms(x: &Tensor) -> Result<Tensor> {
    if !on_device() {
        return Ok(x.f_norm_scalaropt_dim_dtype(2.0, [-2, -1], true, Kind::Double)?);
    }
    // libtorch would make a copy in float64 there.
    let mut size = x.size();
    let last = size.len().saturating_sub(2);
    size[last..].fill(1);
    let count = usize::try_from(size.iter().product::<i64>()).unwrap_or(0);
    Ok(squares_of_parts(&views::read(x)?, count)?.f_view(size.as_slice())?.f_sqrt()?)
}

/// Divisor of matrices before the first step: `(factor ||X||_F + epsilon) start`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Divisor<'a> {
    pub(super) factor: f64,
    pub(super) epsilon: f64,
    pub(super) start: f64,
    /// The squares of the norms, a float64 number of each matrix, where they are known.
    pub(super) squares: Option<&'a [FlatView<'a>]>,
}

impl Divisor<'_> {
    /// Divides matrices of a device in one launch; false, with nothing done, where no kernel is in use.
    fn divide_there(&self, x_gmn: &Tensor, to_gmn: &Tensor) -> Result<bool> {
        let count = usize::try_from(x_gmn.size3()?.0).unwrap_or(0);
        let scalars = [self.factor, self.epsilon].map(|scalar| scalar * self.start);
        divide_parts([&views::read(x_gmn)?, &views::read(to_gmn)?], count, self.squares, scalars)
    }

    fn inverse(&self, x_gmn: &Tensor) -> Result<Tensor> {
        let norm_g11 = if let Some(squares) = self.squares {
            let each = squares.iter().map(|one| one.tensor(&[1, 1, 1])).collect::<Result<Vec<_>>>()?;
            let each: Vec<&Tensor> = each.iter().map(|one| &**one).collect();
            Tensor::f_cat(&each, 0)?.f_sqrt()?
        } else {
            norms(x_gmn)?
        };
        // The smallest divisor keeps a zero matrix zero when epsilon is zero. NaN stays NaN.
        let divisor_g11 = norm_g11.f_mul_scalar(self.factor * self.start)?;
        let divisor_g11 = divisor_g11.f_add_scalar(self.epsilon * self.start)?.f_clamp_min(LEAST_DIVISOR)?;
        Ok(divisor_g11.f_reciprocal()?.f_to_kind(gram_kind(x_gmn)?)?)
    }
}

/// `to <- X / divisor`, with one rounding to the dtype of `to`, which may be the memory of `X`. `scratch` is of the dtype of
/// `to`.
pub(super) fn normalize(
    x_gmn: &Tensor,
    to_gmn: &mut Tensor,
    divisor: Divisor<'_>,
    scratch: &Tensor,
) -> Result<()> {
    if on_device() && divisor.divide_there(x_gmn, to_gmn)? {
        return Ok(());
    }
    let inverse_g11 = divisor.inverse(x_gmn)?;
    if on_device() || !matches!(x_gmn.f_kind()?, Kind::Half | Kind::BFloat16) {
        let _ = x_gmn.f_mul_out(to_gmn, &inverse_g11)?;
    } else {
        // Both types in one product would take copies that libtorch makes.
        let elements = i64::try_from(x_gmn.numel()).unwrap_or(0);
        let wide = scratch.f_narrow(0, 0, 2 * elements)?.f_view_dtype(Kind::Float)?;
        let mut wide_gmn = wide.f_view(x_gmn.size().as_slice())?;
        wide_gmn.f_copy_(x_gmn)?;
        let _ = wide_gmn.f_mul_(&inverse_g11)?;
        to_gmn.f_copy_(&wide_gmn)?;
    }
    Ok(())
}

/// Tests whether a product with the number would change nothing.
#[allow(clippy::float_cmp)] // exactly one
fn is_one(factor: f64) -> bool {
    factor == 1.0
}
