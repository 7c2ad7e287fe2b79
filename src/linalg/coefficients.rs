//! Coefficient tables of the odd quintic iterations `X <- a X + b (X Xᵀ) X + c (X Xᵀ)² X`.

/// A sequence of quintic steps and the scale of its first argument.
#[derive(Clone, Copy, PartialEq)]
pub struct Polynomial {
    /// Name under which [`by_name`] finds it.
    pub name: &'static str,
    /// One `[a, b, c]` per step, applied in order.
    pub rows: &'static [[f64; 3]],
    /// The input is divided by `norm_factor * ||X||_F + epsilon`, so a factor above 1 leaves room for
    /// rounding.
    pub norm_factor: f64,
}

impl std::fmt::Debug for Polynomial {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// Polar Express: five quintics, each the minimax choice for the range of singular values that the one before
/// leaves.
///
/// Amsel, Persson, Musco and Gower, arXiv:2505.16932, algorithm 1. Every row but the last has the paper's
/// safety factor of 1.02 in it: `a / 1.02`, `b / 1.02³`, `c / 1.02⁵`.
pub const POLAR_EXPRESS: Polynomial = Polynomial {
    name: "polar_express",
    rows: &[
        [8.156_554_524_902_461, -22.483_292_925_577_95, 15.878_769_915_207_462],
        [4.042_929_935_166_739, -2.808_917_465_908_714, 0.500_017_845_105_131_6],
        [3.891_667_802_292_660_7, -2.772_484_153_217_685, 0.506_064_817_850_339_3],
        [3.285_753_657_755_655, -2.368_129_493_342_537_6, 0.464_490_242_330_031_06],
        [2.346_541_325_859_637_7, -1.709_782_838_268_708_1, 0.423_235_511_693_053_23],
    ],
    norm_factor: 1.02,
};

/// Newton–Schulz: the quintic iteration of Muon (Jordan et al. 2024,
/// <https://kellerjordan.github.io/posts/muon/>) with coefficients tuned for each of five steps, close to the
/// polar factor for singular values above about 0.01.
pub const NEWTON_SCHULZ: Polynomial = Polynomial {
    name: "newton_schulz",
    rows: &[
        [4.0848, -6.8946, 2.9270],
        [3.9505, -6.3029, 2.6377],
        [3.7418, -5.5913, 2.3037],
        [2.8769, -3.1427, 1.2046],
        [2.8366, -3.0525, 1.2012],
    ],
    norm_factor: 1.0,
};

/// The polynomial called `name`, if there is one.
#[must_use]
pub fn by_name(name: &str) -> Option<&'static Polynomial> {
    [&POLAR_EXPRESS, &NEWTON_SCHULZ].into_iter().find(|polynomial| polynomial.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn apply(polynomial: &Polynomial, sigma: f64) -> f64 {
        polynomial.rows.iter().fold(sigma, |x, [a, b, c]| {
            let square = x * x;
            x * (a + square * (b + square * c))
        })
    }

    #[test]
    fn polynomials_map_singular_values_near_one() {
        // Ranges of the published figures: Newton–Schulz within 5 %, Polar Express within 15 % above sigma =
        // 0.005.
        for (polynomial, low, high) in [(&POLAR_EXPRESS, 0.85, 1.15), (&NEWTON_SCHULZ, 0.95, 1.05)] {
            for i in 0..=1000 {
                let sigma = 0.02_f64.powf(f64::from(i) / 1000.0);
                let y = apply(polynomial, sigma / polynomial.norm_factor);
                assert!(y > low && y < high, "{}: p({sigma}) = {y}", polynomial.name);
            }
            assert!(apply(polynomial, 0.0).abs() == 0.0);
        }
    }

    #[test]
    fn by_name_finds_every_polynomial() {
        assert_eq!(by_name("polar_express"), Some(&POLAR_EXPRESS));
        assert_eq!(by_name("newton_schulz"), Some(&NEWTON_SCHULZ));
        assert_eq!(by_name("newton"), None);
    }
}
