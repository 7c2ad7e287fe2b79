use super::*;

/// One row at one number.
fn row([a, b, c]: [f64; 3], x: f64) -> f64 {
    let square = x * x;
    x * (a + square * (b + square * c))
}

fn apply(polynomial: &Polynomial, sigma: f64) -> f64 {
    polynomial.rows.iter().fold(sigma, |x, &r| row(r, x))
}

#[test]
fn polynomials_map_singular_values_near_one() {
    // (polynomial, smallest share of the norm, range): published figures for Newton–Schulz (5 %) and Polar Express
    // (15 % above 0.005); Keller Jordan's "0.7 to 1.2" above 0.01; CANS by the error of its last row, 7.1e-4.
    let table = [
        (&POLAR_EXPRESS, 0.02, 0.85, 1.15),
        (&POLAR_EXPRESS_GRAM, 0.005, 0.84, 1.13),
        (&NEWTON_SCHULZ, 0.02, 0.95, 1.05),
        (&KELLER_JORDAN, 0.01, 0.68, 1.16),
        (&CANS, 0.005_06, 0.999_2, 1.000_8),
        (&AOL, 0.02, 0.85, 1.06),
    ];
    assert_eq!(table.len(), NAMED.len());
    for (polynomial, smallest, low, high) in table {
        for i in 0..=4000 {
            let sigma = f64::powf(smallest, f64::from(i) / 4000.0);
            let y = apply(polynomial, sigma / polynomial.norm_factor);
            assert!(y > low && y < high, "{}: p({sigma}) = {y}", polynomial.name);
        }
        assert!(apply(polynomial, 0.0).abs() == 0.0);
    }
}

#[test]
fn cans_rows_equioscillate_on_their_intervals() {
    let [mut low, mut high] = CANS_INTERVAL;
    for &[a, b, c] in CANS.rows.iter() {
        // Turning points from the roots of p' = a + 3 b y + 5 c y² in y = x².
        let root = (9.0 * b * b - 20.0 * a * c).sqrt();
        let turns = [((-3.0 * b - root) / (10.0 * c)).sqrt(), ((-3.0 * b + root) / (10.0 * c)).sqrt()];
        assert!(low < turns[0] && turns[0] < turns[1] && turns[1] < high, "[{low}, {high}]: {turns:?}");
        // Four alternating extrema of one size: by Chebyshev's theorem no odd quintic is better, as they are more
        // than its three coefficients.
        let errors = [low, turns[0], turns[1], high].map(|x| row([a, b, c], x) - 1.0);
        let size = errors[1];
        for (i, error) in errors.into_iter().enumerate() {
            let expected = if i % 2 == 0 { -size } else { size };
            assert!((error - expected).abs() < 2e-14, "[{low}, {high}]: {errors:?}");
        }
        (low, high) = ((1.0 - size) / CANS_WIDENING, (1.0 + size) * CANS_WIDENING);
    }
}

#[test]
fn fast_rows_are_the_best_quintics_of_their_intervals() {
    let (mut low, mut high) = (FAST_FROM, 1.0);
    let last = POLAR_EXPRESS_FAST.rows.len() - 1;
    for (i, own) in POLAR_EXPRESS_FAST.rows.iter().enumerate() {
        let safety = if i < last { FAST_SAFETY } else { 1.0 };
        let [a, b, c] = [(0, 1), (1, 3), (2, 5)].map(|(k, power)| own[k] * f64::powi(safety, power));
        let root = (9.0 * b * b - 20.0 * a * c).sqrt();
        let turns = [((-3.0 * b - root) / (10.0 * c)).sqrt(), ((-3.0 * b + root) / (10.0 * c)).sqrt()];
        // Four alternating extrema of one size, as for CANS.
        let errors = [low, turns[0], turns[1], high].map(|x| row([a, b, c], x) - 1.0);
        for (j, error) in errors.into_iter().enumerate() {
            let expected = if j % 2 == 0 { -errors[1] } else { errors[1] };
            assert!((error - expected).abs() < 1e-11, "[{low}, {high}]: {errors:?}");
        }
        (low, high) = (1.0 - errors[1], 1.0 + errors[1]);
    }
    assert!(high < 1.13, "singular values end below {high}");
}

#[test]
fn gram_rows_are_the_papers_with_their_safety_factor() {
    // Rows of arXiv:2505.16932 without a safety factor.
    let paper = [
        [8.287_212_018_145_63, -23.595_886_519_098_837, 17.300_387_312_530_933],
        [4.107_059_111_542_203, -2.947_849_916_737_910_6, 0.544_843_108_292_660_1],
        [3.948_690_853_482_294_6, -2.908_902_115_962_949, 0.551_819_139_437_013_7],
        [3.318_419_657_370_601_5, -2.488_488_024_314_874, 0.510_048_940_123_72],
        [2.300_652_019_954_817, -1.668_903_984_574_749_3, 0.418_807_311_952_567_3],
    ];
    for (own, theirs) in POLAR_EXPRESS_GRAM.rows.iter().zip(paper) {
        for (k, power) in [(0, 1), (1, 3), (2, 5)] {
            assert!((own[k] - theirs[k] / f64::powi(1.05, power)).abs() < 1e-13);
        }
    }
}

#[test]
fn by_name_finds_every_polynomial() {
    for polynomial in &NAMED {
        assert_eq!(&by_name(polynomial.name).unwrap(), polynomial);
        assert_eq!(format!("{polynomial:?}"), polynomial.name);
    }
    let message = by_name("newton").unwrap_err().to_string();
    assert!(message.contains("ns_coefficients must be one of polar_express") && message.contains("newton"));
}

#[test]
fn steps_take_the_first_rows_and_repeat_the_last() {
    let two = NEWTON_SCHULZ.with_steps(2).unwrap();
    assert_eq!(two.rows[..], NEWTON_SCHULZ.rows[..2]);
    let seven = NEWTON_SCHULZ.with_steps(7).unwrap();
    assert_eq!(seven.rows[..5], NEWTON_SCHULZ.rows[..]);
    assert_eq!(seven.rows[5..], [NEWTON_SCHULZ.rows[4]; 2]);
    assert_eq!(NEWTON_SCHULZ.with_steps(5).unwrap(), NEWTON_SCHULZ);
    assert_ne!(format!("{two:?}"), "newton_schulz");
    for steps in [0, MOST_STEPS + 1] {
        assert!(NEWTON_SCHULZ.with_steps(steps).unwrap_err().to_string().contains("ns_steps must be"));
    }
}

#[test]
fn custom_rows_are_checked() {
    let rows = vec![[1.5, -0.5, 0.0], [1.0, 0.0, 0.0]];
    assert_eq!(Polynomial::custom(rows.clone()).unwrap().rows[..], rows[..]);
    for bad in [vec![], vec![[1.0; 3]; MOST_STEPS + 1], vec![[1.0, f64::NAN, 0.0]]] {
        assert!(
            Polynomial::custom(bad)
                .unwrap_err()
                .to_string()
                .contains("ns_coefficients must be a name or 1 to 32")
        );
    }
}
