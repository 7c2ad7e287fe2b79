//! Orthonormalization methods: the one module in which a group's settings choose how batches of matrices are replaced.

use tch::Tensor;

use super::coefficients::{
    NEWTON_SCHULZ, POLAR_EXPRESS, POLAR_EXPRESS_FAST, Polynomial, Preconditioner, by_name,
};
use super::gram::{self, require_positive, restarts, unit_roundoff};
use super::iteration::{Iteration, dtype_of, elements_of_each};
use super::newton_schulz;
use super::polar::{self, polar_factor};
use crate::error::{Error, Result};
use crate::kernels::frozen;
use crate::spec::{Callback, Options};
use crate::tensor::{DType, FlatView};

/// The settings that [`Orthonormalizer::from_options`] reads.
pub const OPTIONS: [&str; 7] = [
    "newton_schulz_func",
    "ns_coefficients",
    "ns_steps",
    "orth_dtype",
    "orth_method",
    "orth_preset",
    "use_polar_express",
];

/// A user's function of a batch `[B, m, n]` and epsilon, which returns the orthonormalized batch. A [`Callback`] holds
/// it for [`OPTIONS`]' `newton_schulz_func`.
pub type Function = Box<dyn Fn(&Tensor, f64) -> Result<Tensor> + Send + Sync>;

/// Steps of a polynomial given as one triple: torch's default.
const STEPS_OF_ONE_TRIPLE: usize = 5;
/// Stands for "however many matrices there are": the iterations bound how many they take together.
const ANY_COUNT: i64 = 1 << 20;
/// Matrices with a shorter short side are computed in the standard form: there the calls of libtorch cost as much as the
/// products, and 16-bit types gain nothing.
const GRAM_FROM: usize = 128;
/// Short side, in float32, below which the standard form is used: 64 x 1024 takes 0.57 of the time in the Gram form, 64
/// x 256 takes 0.81.
const GRAM_FROM_FLOAT32: usize = 64;
/// The Gram form is chosen where it takes at most this share of the work of the standard form. The time is at most 0.05
/// above the share of work, and the same at a share of 0.95: measured on 1024 rows in float32 and bfloat16, one thread.
const GRAM_SHARE: f64 = 0.9;
/// The share on a device: from 1.5 times as many columns as rows. There the Gram form takes as many operations as the standard
/// form where no symmetric product is halved, five steps with one restart each: `20 k² n + 10 k³` and `8 k² n + 28 k³`.
const GRAM_SHARE_ON_DEVICE: f64 = 0.84;

/// Way in which a polynomial is evaluated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Form {
    /// The Gram form where it takes clearly fewer operations, else the standard form. Depends on shape and dtype only.
    #[default]
    Auto,
    /// Products of the matrix itself.
    Standard,
    /// Products of the Gram matrix of the short side, with the restarts that the dtype needs.
    Gram,
}

#[derive(Clone, Debug)]
enum Kind {
    Iteration { polynomial: Polynomial, form: Form },
    Polar,
    Function(Callback),
}

/// A way to replace matrices by (an approximation of) their polar factors.
#[derive(Clone, Debug)]
pub struct Orthonormalizer {
    kind: Kind,
    /// True if matrices in bfloat16 are multiplied in float16. All numbers of an iteration are below 100, and three bits more
    /// leave fewer spurious eigenvalues: the Gram form restarts once and needs no guard. In bfloat16 they arrive since a
    /// momentum may be out of float16's range.
    float16: bool,
    on_device: bool,
}

impl Orthonormalizer {
    /// Orthonormalizer by a polynomial, evaluated in this form.
    ///
    /// # Errors
    /// [`Error::Value`] for a polynomial that the Gram form does not take.
    pub fn iteration(polynomial: Polynomial, form: Form) -> Result<Self> {
        if form == Form::Gram {
            require_positive(&polynomial.rows)?;
        }
        Ok(Self { kind: Kind::Iteration { polynomial, form }, float16: false, on_device: false })
    }

    /// Tests whether matrices are decomposed, for which the host waits for a device.
    #[must_use]
    pub fn decomposes(&self) -> bool {
        matches!(self.kind, Kind::Polar)
    }

    /// Reads the method that a group asks for: `newton_schulz_func` before `orth_method` ("auto", "standard", "gram" or
    /// "svd"); the polynomial is `ns_coefficients` (a name, one triple for every step, or triples) or, without, Polar
    /// Express or Newton–Schulz by `use_polar_express`, with `ns_steps` rows. `orth_preset` "fast" is
    /// [`POLAR_EXPRESS_FAST`]. Where `orth_dtype` is "float16", and on a device with matrix units where it is
    /// "auto", matrices in bfloat16 are multiplied in float16.
    ///
    /// # Errors
    /// [`Error::Value`] for values of the wrong kind.
    pub fn from_options(options: &Options) -> Result<Self> {
        let fast = options.either("orth_preset", "exact", "fast")?;
        let express = options.flag("use_polar_express")?;
        let name = options.name("ns_coefficients")?;
        let rows = match (name, options.triple("ns_coefficients")?) {
            (Some(_), _) => None,
            (None, Some(row)) => Some(vec![row; STEPS_OF_ONE_TRIPLE]),
            (None, None) => options.triples("ns_coefficients")?,
        };
        if fast && (name.is_some() || rows.is_some() || !express) {
            return Err(Error::Value(
                "orth_preset 'fast' has coefficients of its own: leave ns_coefficients and use_polar_express out".into(),
            ));
        }
        let polynomial = match (name, rows) {
            (Some(name), _) => by_name(name)?,
            (None, Some(rows)) => Polynomial::custom(rows)?,
            (None, None) if fast => POLAR_EXPRESS_FAST,
            (None, None) if express => POLAR_EXPRESS,
            (None, None) => NEWTON_SCHULZ,
        };
        let polynomial = match options.optional_count("ns_steps")? {
            None => polynomial,
            Some(steps) => polynomial.with_steps(steps)?,
        };
        let form = match options.word("orth_method")? {
            "auto" => Some(Form::Auto),
            "standard" => Some(Form::Standard),
            "gram" => Some(Form::Gram),
            "svd" if fast => {
                return Err(Error::Value(
                    "orth_preset 'fast' is a polynomial and orth_method 'svd' is none: leave one of them out"
                        .into(),
                ));
            }
            "svd" => None,
            other => {
                return Err(Error::Value(format!(
                    "orth_method must be one of auto, standard, gram, svd, got {other:?}"
                )));
            }
        };
        let on_device = options.on_device;
        // Squares of small rows are below the range of float16, and what they are divided by would be wrong.
        let divides_rows = polynomial.preconditioner == Preconditioner::Aol;
        let float16 = match options.dtype("orth_dtype")? {
            Some(DType::F16) if divides_rows => {
                return Err(Error::Value(
                    "ns_coefficients 'aol' divides rows by sums that float16 cannot hold: use orth_dtype 'bfloat16'"
                        .into(),
                ));
            }
            None => options.matrix_units && !divides_rows,
            Some(dtype) => dtype == DType::F16,
        };
        let kind = match (options.callback("newton_schulz_func")?, form) {
            (Some(function), _) => Kind::Function(function.clone()),
            (None, Some(form)) => Self::iteration(polynomial, form)?.kind,
            (None, None) => Kind::Polar,
        };
        Ok(Self { kind, float16, on_device })
    }

    /// The type in which matrices are given that the user wants to be orthonormalized in `dtype`: bfloat16 for float16,
    /// which a momentum may overflow, but for a function of the user.
    #[must_use]
    pub fn given(&self, dtype: DType) -> DType {
        let is_function = matches!(self.kind, Kind::Function(_));
        if dtype == DType::F16 && !is_function { DType::BF16 } else { dtype }
    }

    /// The type in which matrices of this type are multiplied.
    fn product(&self, dtype: DType) -> DType {
        if dtype == DType::BF16 && self.float16 { DType::F16 } else { dtype }
    }

    /// Restarts of the Gram form, if matrices of this shape are multiplied in it in this dtype.
    fn gram_restarts(&self, rows: usize, cols: usize, dtype: DType) -> Option<Vec<usize>> {
        let Kind::Iteration { polynomial, form } = &self.kind else { return None };
        let positive = polynomial.rows.iter().all(|row| row[0] > 0.0);
        let least = if dtype == DType::F32 { GRAM_FROM_FLOAT32 } else { GRAM_FROM };
        match form {
            Form::Standard => None,
            Form::Auto if !positive || rows.min(cols) < least => None,
            // In bfloat16 it needs the guard, for which the host would wait for a norm.
            Form::Auto if self.on_device && dtype == DType::BF16 => None,
            _ => {
                let found = restarts(&polynomial.rows, unit_roundoff(dtype));
                let [gram, standard] = [Some(&*found), None].map(|form| work(polynomial, form, rows, cols));
                let share = gram / standard.max(1.0);
                let most = if self.on_device { GRAM_SHARE_ON_DEVICE } else { GRAM_SHARE };
                (*form == Form::Gram || share <= most).then_some(found)
            }
        }
    }

    /// Elements of scratch, in the dtype of the batch, that [`run`](Self::run) needs for any number of matrices
    /// `rows x cols`; `batched`: for each of them, where libtorch multiplies
    /// them together.
    ///
    /// # Errors
    /// [`Error::Value`] for a side beyond what can be addressed.
    pub fn scratch_elements(&self, rows: usize, cols: usize, dtype: DType, batched: bool) -> Result<usize> {
        let size =
            |n: usize| i64::try_from(n).map_err(|_| Error::Value(format!("a side of {n} is too large")));
        let (m, n) = (size(rows)?, size(cols)?);
        let dtype = self.product(dtype);
        let elements = match (&self.kind, self.gram_restarts(rows, cols, dtype)) {
            (Kind::Iteration { .. }, found) if batched => elements_of_each(m, n, dtype, found.is_some()),
            (Kind::Iteration { .. }, None) => newton_schulz::scratch_elements(ANY_COUNT, m, n, dtype),
            (Kind::Iteration { .. }, Some(_)) => gram::scratch_elements(ANY_COUNT, m, n, dtype),
            (Kind::Polar | Kind::Function(_), _) => 0,
        };
        usize::try_from(elements).map_err(|_| Error::Internal("negative scratch".into()))
    }

    /// Orthonormalizes every matrix of the contiguous batch `[B, m, n]` in place, in the dtype of the batch.
    ///
    /// `epsilon` is added to the norm that a polynomial divides by; the exact polar factor does not use it. `scratch` is
    /// a flat tensor of the dtype of the batch with at least [`scratch_elements`](Self::scratch_elements) elements. A
    /// zero matrix stays exactly zero and a non-finite one becomes NaN, except in a user's function, which gets a copy
    /// of the batch.
    ///
    /// # Errors
    /// Whatever the method says; for a user's function [`Error::Value`] when it returns another shape, and what it
    /// raises as [`Error::Foreign`].
    pub fn run(&self, x_bmn: &mut Tensor, epsilon: f64, scratch: &mut Tensor) -> Result<()> {
        self.run_with(x_bmn, epsilon, None, scratch)
    }

    /// Orthonormalizes as [`run`](Self::run) does, where the sum of the squares of each matrix is known: one float64.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_with(
        &self,
        x_bmn: &mut Tensor,
        epsilon: f64,
        squares: Option<&[FlatView<'_>]>,
        scratch: &mut Tensor,
    ) -> Result<()> {
        frozen(|| self.run_now(x_bmn, epsilon, squares, scratch))
    }

    fn run_now(
        &self,
        x_bmn: &mut Tensor,
        epsilon: f64,
        squares: Option<&[FlatView<'_>]>,
        scratch: &mut Tensor,
    ) -> Result<()> {
        match &self.kind {
            Kind::Polar => polar_factor(x_bmn),
            Kind::Function(callback) => call(callback, x_bmn, epsilon),
            Kind::Iteration { polynomial, .. } => {
                let (_, m, n) = x_bmn.size3()?;
                let side = |n: i64| usize::try_from(n).unwrap_or(0);
                let product = self.product(dtype_of(x_bmn)?);
                let restarts = self.gram_restarts(side(m), side(n), product);
                Iteration { polynomial, restarts: restarts.as_deref(), epsilon, squares, product }
                    .run(x_bmn, scratch)
            }
        }
    }

    /// Floating-point operations for one matrix that is given in this type, full products; 0 for a user's function.
    #[must_use]
    pub fn flops(&self, rows: usize, cols: usize, dtype: DType) -> u128 {
        match (&self.kind, self.gram_restarts(rows, cols, self.product(dtype))) {
            (Kind::Iteration { polynomial, .. }, None) => standard_flops(polynomial, rows, cols),
            (Kind::Iteration { polynomial, .. }, Some(found)) => gram_flops(polynomial, &found, rows, cols),
            (Kind::Polar, _) => polar::flops(rows, cols),
            (Kind::Function(_), _) => 0,
        }
    }
}

/// Multiplications, with one triangle of symmetric products: the measure by which a form is chosen.
#[expect(clippy::cast_precision_loss, reason = "a count of operations to compare")]
fn work(polynomial: &Polynomial, restarts: Option<&[usize]>, rows: usize, cols: usize) -> f64 {
    let (k, n) = (rows.min(cols) as f64, rows.max(cols) as f64);
    let steps = polynomial.rows.len() as f64;
    // Of the matrix: half a product for its Gram matrix and a whole one for the result. Of Gram matrices: half a product.
    let (whole, square) = (1.5 * k * k * n, 0.5 * k * k * k);
    match restarts {
        None => steps * (whole + square),
        Some(restarts) => {
            let starts = restarts.len() as f64 + 1.0;
            starts * whole + (steps + 3.0 * (steps - starts).max(0.0)) * square
        }
    }
}

/// Operations before the first step.
fn preconditioner_flops(polynomial: &Polynomial, short: u128, long: u128) -> u128 {
    // What the Schatten norm needs are products of the first step.
    if polynomial.preconditioner == Preconditioner::Aol { 2 * short * short * long } else { 0 }
}

/// A step is two products with the matrix and one of Gram matrices.
fn standard_flops(polynomial: &Polynomial, rows: usize, cols: usize) -> u128 {
    let (k, n) = (rows.min(cols) as u128, rows.max(cols) as u128);
    preconditioner_flops(polynomial, k, n) + polynomial.rows.len() as u128 * k * k * (4 * n + 2 * k)
}

/// Every start is two products with the matrix; a step is one of Gram matrices, two more where another step follows
/// without a restart, and one more where one went before.
fn gram_flops(polynomial: &Polynomial, restarts: &[usize], rows: usize, cols: usize) -> u128 {
    let (k, n) = (rows.min(cols) as u128, rows.max(cols) as u128);
    let (steps, starts) = (polynomial.rows.len() as u128, restarts.len() as u128 + 1);
    let inner = steps.saturating_sub(starts);
    preconditioner_flops(polynomial, k, n) + k * k * (4 * n * starts + 2 * k * (steps + 3 * inner))
}

fn call(callback: &Callback, x_bmn: &mut Tensor, epsilon: f64) -> Result<()> {
    let function = callback
        .get::<Function>()
        .ok_or_else(|| Error::Internal(format!("{callback:?} is no orthonormalization")))?;
    let result = function(&x_bmn.f_detach_copy()?, epsilon)?;
    if result.size() != x_bmn.size() {
        return Err(Error::Value(format!(
            "newton_schulz_func must return a tensor of the shape of its argument, {:?}, got {:?}",
            x_bmn.size(),
            result.size()
        )));
    }
    if DType::from_kind(result.f_kind()?).is_none() {
        return Err(Error::Type(format!(
            "newton_schulz_func must return a real floating-point tensor, got {:?}",
            result.f_kind()?
        )));
    }
    x_bmn.f_copy_(&result)?;
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test may panic")]
#[path = "orthonormalizer_tests.rs"]
mod tests;
