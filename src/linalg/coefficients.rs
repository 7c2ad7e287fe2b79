//! Coefficient tables of the odd quintic iterations `X <- a X + b (X Xᵀ) X + c (X Xᵀ)² X`.

use std::borrow::Cow;

use crate::error::{Error, Result};

/// Most rows of an iteration: far more than any needs, few enough to bound the time of a step.
pub const MOST_STEPS: usize = 32;

/// Scaling that brings the singular values of the first argument below 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preconditioner {
    /// Division by the Frobenius norm.
    Frobenius,
    /// Division by the Frobenius norm, then of row `i` of the short side by `sqrt(sum_j |A_ij|)` with `A = X Xᵀ`
    /// (columns and `Xᵀ X` for more rows than columns): almost-orthogonal layers, Prach and Lampert,
    /// arXiv:2208.03160. The spectral norm is then at most 1 and mostly close to it. The polar factor that is
    /// approximated is that of the scaled matrix.
    Aol,
    /// Division by the Frobenius norm, then by `norm_factor ||(X Xᵀ)²||_F^(1/4)`, the Schatten-8 norm: an upper bound of
    /// the spectral norm, 1.01 to 1.06 times it on matrices of momentum where the Frobenius norm is 2 to 3 times it. Both
    /// products are those of the first step.
    Schatten,
}

/// A sequence of quintic steps and the scale of its first argument.
#[derive(Clone, PartialEq)]
pub struct Polynomial {
    /// Name under which [`by_name`] finds it; "custom" for a user's rows.
    pub name: &'static str,
    /// One `[a, b, c]` per step, applied in order.
    pub rows: Cow<'static, [[f64; 3]]>,
    /// The input is divided by `norm_factor * ||X||_F + epsilon`, so a factor above 1 leaves room for
    /// rounding.
    pub norm_factor: f64,
    /// Scaling after that division.
    pub preconditioner: Preconditioner,
}

impl std::fmt::Debug for Polynomial {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match table(self.name) {
            Some(named) if named.rows == self.rows => f.write_str(self.name),
            _ => write!(f, "{}{:?}", self.name, self.rows),
        }
    }
}

impl Polynomial {
    /// A user's rows, for an input divided by its Frobenius norm.
    ///
    /// # Errors
    /// [`Error::Value`] for no row, more than [`MOST_STEPS`] or a coefficient that is not finite.
    pub fn custom(rows: Vec<[f64; 3]>) -> Result<Self> {
        let finite = rows.iter().flatten().all(|x| x.is_finite());
        if rows.is_empty() || rows.len() > MOST_STEPS || !finite {
            return Err(Error::Value(format!(
                "ns_coefficients must be a name or 1 to {MOST_STEPS} triples (a, b, c) of finite numbers, got {rows:?}"
            )));
        }
        let rows = Cow::Owned(rows);
        Ok(Self { name: "custom", rows, norm_factor: 1.0, preconditioner: Preconditioner::Frobenius })
    }

    /// Polynomial with `steps` rows: the first ones, the last of them repeated where there are fewer.
    ///
    /// # Errors
    /// [`Error::Value`] unless `1 <= steps <= MOST_STEPS`.
    pub fn with_steps(mut self, steps: usize) -> Result<Self> {
        if steps == 0 || steps > MOST_STEPS {
            return Err(Error::Value(format!(
                "ns_steps must be an integer >= 1 and <= {MOST_STEPS}, got {steps}"
            )));
        }
        if let Some(&last) = self.rows.last()
            && steps != self.rows.len()
        {
            self.rows.to_mut().resize(steps, last);
        }
        Ok(self)
    }
}

/// Polar Express: five quintics, each the minimax choice for the range of singular values that the one before
/// leaves.
///
/// Amsel, Persson, Musco and Gower, arXiv:2505.16932, algorithm 1. Every row but the last has the paper's
/// safety factor of 1.02 in it: `a / 1.02`, `b / 1.02³`, `c / 1.02⁵`.
pub const POLAR_EXPRESS: Polynomial = Polynomial {
    name: "polar_express",
    rows: Cow::Borrowed(&[
        [8.156_554_524_902_461, -22.483_292_925_577_95, 15.878_769_915_207_462],
        [4.042_929_935_166_739, -2.808_917_465_908_714, 0.500_017_845_105_131_6],
        [3.891_667_802_292_660_7, -2.772_484_153_217_685, 0.506_064_817_850_339_3],
        [3.285_753_657_755_655, -2.368_129_493_342_537_6, 0.464_490_242_330_031_06],
        [2.346_541_325_859_637_7, -1.709_782_838_268_708_1, 0.423_235_511_693_053_23],
    ]),
    norm_factor: 1.02,
    preconditioner: Preconditioner::Frobenius,
};

/// Polar Express as the Gram form uses it: the rows of arXiv:2505.16932 with the safety factor 1.05 in every one,
/// `a / 1.05`, `b / 1.05³`, `c / 1.05⁵`, as in the package gram-newton-schulz 0.1.5.
pub const POLAR_EXPRESS_GRAM: Polynomial = Polynomial {
    name: "polar_express_gram",
    rows: Cow::Borrowed(&[
        [7.892_582_874_424_408, -20.383_013_945_879_57, 13.555_306_149_406_924],
        [3.911_484_868_135_431, -2.546_463_592_906_088_4, 0.426_898_831_967_307_4],
        [3.760_657_955_697_423, -2.512_819_018_216_563, 0.432_364_734_907_007_3],
        [3.160_399_673_686_287, -2.149_649_518_898_498, 0.399_636_690_766_438_9],
        [2.191_097_161_861_730_3, -1.441_662_010_214_663, 0.328_146_487_623_155],
    ]),
    norm_factor: 1.0,
    preconditioner: Preconditioner::Frobenius,
};

/// The smallest singular value, as a share of the largest, that the first row of [`POLAR_EXPRESS_FAST`] is made for.
pub const FAST_FROM: f64 = 0.004;
/// The safety factor of all its rows but the last.
pub const FAST_SAFETY: f64 = 1.02;

/// Four steps of Polar Express for matrices that were divided by their Schatten-8 norm: algorithm 1 of
/// arXiv:2505.16932 from the interval [`FAST_FROM`], 1. A smaller beginning leaves singular values up to 1.2 (0.003) and
/// more, a larger one lifts the small ones less: of 0.002 to 0.03 this one has the largest cosine to the polar factor,
/// 0.974 on power laws, logarithmic spectra and spectra with eight large values. Five steps of [`POLAR_EXPRESS`] on the
/// Frobenius norm have 0.987 there, those of torch.optim.Muon 0.967.
pub const POLAR_EXPRESS_FAST: Polynomial = Polynomial {
    name: "polar_express_fast",
    rows: Cow::Borrowed(&[
        [8.177_432_027_476_442, -23.178_649_114_408_902, 16.505_155_057_584_513],
        [3.899_994_532_782_065, -2.794_394_885_958_018_5, 0.511_078_536_455_154_7],
        [3.262_233_864_007_705, -2.351_317_363_641_778, 0.462_659_405_254_401_3],
        [2.308_564_577_776_151, -1.675_994_456_278_578, 0.419_573_928_780_729_74],
    ]),
    norm_factor: 1.02,
    preconditioner: Preconditioner::Schatten,
};

/// Newton–Schulz: the quintic iteration of Muon (Jordan et al. 2024,
/// <https://kellerjordan.github.io/posts/muon/>) with coefficients tuned for each of five steps, close to the
/// polar factor for singular values above about 0.01.
pub const NEWTON_SCHULZ: Polynomial = Polynomial {
    name: "newton_schulz",
    rows: Cow::Borrowed(&[
        [4.0848, -6.8946, 2.9270],
        [3.9505, -6.3029, 2.6377],
        [3.7418, -5.5913, 2.3037],
        [2.8769, -3.1427, 1.2046],
        [2.8366, -3.0525, 1.2012],
    ]),
    norm_factor: 1.0,
    preconditioner: Preconditioner::Frobenius,
};

/// The constant quintic of Keller Jordan (<https://kellerjordan.github.io/posts/muon/>), five times. It is made to
/// raise small singular values fast: they end between 0.68 and 1.16, not at 1.
pub const KELLER_JORDAN: Polynomial = Polynomial {
    name: "keller_jordan",
    rows: Cow::Borrowed(&[[3.4445, -4.7750, 2.0315]; 5]),
    norm_factor: 1.0,
    preconditioner: Preconditioner::Frobenius,
};

/// The interval on which the first row of [`CANS`] is optimal.
pub const CANS_INTERVAL: [f64; 2] = [0.005, 1.0];
/// Each further row of [`CANS`] is optimal on the image of the interval before, widened by this factor on both
/// sides for rounding.
pub const CANS_WIDENING: f64 = 1.01;

/// Chebyshev-type Newton–Schulz (CANS; Grishina, Smirnov and Rakhuba, arXiv:2506.10935): every row is the odd
/// quintic with the smallest `max |p - 1| = E` on its interval, found by Remez exchange. The intervals start at
/// [`CANS_INTERVAL`] and go on as `[(1 - E) / w, (1 + E) w]` with `w` = [`CANS_WIDENING`]. Singular values above
/// 0.0051 of the Frobenius norm end within 0.001 of 1.
pub const CANS: Polynomial = Polynomial {
    name: "cans",
    rows: Cow::Borrowed(&[
        [8.298_703_491_437_525, -24.430_498_148_217_67, 18.090_304_193_078_694],
        [3.884_083_330_414_698_7, -2.842_891_814_576_831_6, 0.533_639_162_383_198_9],
        [3.176_397_780_305_391, -2.342_376_706_692_147_7, 0.479_737_896_354_741_9],
        [2.210_013_096_775_283_3, -1.572_541_381_420_154_8, 0.400_711_503_773_585_55],
        [1.884_658_052_893_370_7, -1.259_008_104_403_175_4, 0.374_425_135_453_794_13],
    ]),
    norm_factor: CANS_WIDENING,
    preconditioner: Preconditioner::Frobenius,
};

/// Four quintics for a spectral norm close to 1, as [`Preconditioner::Aol`] makes it (Turbo-Muon,
/// arXiv:2512.04632, and `newton_schulz_triton_fast` of microsoft/dion).
pub const AOL: Polynomial = Polynomial {
    name: "aol",
    rows: Cow::Borrowed(&[
        [4.6051, -9.6552, 5.6769],
        [4.7505, -6.0861, 2.1790],
        [2.7763, -2.3190, 0.5523],
        [2.4231, -2.2861, 0.8193],
    ]),
    norm_factor: 1.0,
    preconditioner: Preconditioner::Aol,
};

static NAMED: [Polynomial; 6] = [POLAR_EXPRESS, NEWTON_SCHULZ, KELLER_JORDAN, CANS, AOL, POLAR_EXPRESS_GRAM];

fn table(name: &str) -> Option<&'static Polynomial> {
    NAMED.iter().find(|polynomial| polynomial.name == name)
}

/// The polynomial called `name`.
///
/// # Errors
/// [`Error::Value`] for an unknown name.
pub fn by_name(name: &str) -> Result<Polynomial> {
    table(name).cloned().ok_or_else(|| {
        let names: Vec<_> = NAMED.iter().map(|p| p.name).collect();
        Error::Value(format!(
            "ns_coefficients must be one of {} or triples (a, b, c), got {name:?}",
            names.join(", ")
        ))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
#[path = "coefficients_tests.rs"]
mod tests;
