use tch::{Device, Kind};

use super::super::coefficients::{AOL, NEWTON_SCHULZ, POLAR_EXPRESS, Preconditioner};
use super::super::symmetric::{STRIPS, Symmetric};
use super::*;
use crate::error::Error;

const SHAPES: [(i64, i64, i64); 12] = [
    (1, 1, 1),
    (3, 1, 7),
    (3, 7, 1),
    (3, 17, 5),
    (3, 5, 17),
    (2, 24, 24),
    (1, 48, 160),
    (1, 160, 48),
    (3, 520, 530),
    (1, 640, 513),
    (1, 40, 4500),
    (1, 4500, 33),
];

fn random(shape: &[i64], kind: Kind) -> Tensor {
    tch::manual_seed(11);
    Tensor::randn(shape, (Kind::Double, Device::Cpu)).to_kind(kind)
}

fn simple(rows: &'static [[f64; 3]], norm_factor: f64) -> Polynomial {
    Polynomial { name: "test", rows: rows.into(), norm_factor, preconditioner: Preconditioner::Frobenius }
}

/// Runs the iteration with a scratch full of NaN: nothing may be read before it is written.
fn run(x: &Tensor, polynomial: &Polynomial, epsilon: f64) -> Tensor {
    let (b, m, n) = x.size3().unwrap();
    let mut scratch = Tensor::full(
        [scratch_elements(b, m, n, DType::from_kind(x.kind()).unwrap())],
        f64::NAN,
        (x.kind(), Device::Cpu),
    );
    let mut out = x.copy();
    newton_schulz(&mut out, polynomial, epsilon, &mut scratch).unwrap();
    out
}

/// The polynomial applied to the singular values in float64.
fn expected(x: &Tensor, polynomial: &Polynomial) -> Tensor {
    let x = x.to_kind(Kind::Double);
    let (u, sigma, v) = x.svd(true, true);
    let norm = sigma.square().sum_dim_intlist([-1].as_slice(), true, Kind::Double).sqrt();
    let mut y = sigma / (norm * polynomial.norm_factor);
    for [a, b, c] in polynomial.rows.iter() {
        let square = &y * &y;
        y = &y * (*a + &square * (*b + *c * &square));
    }
    (u * y.unsqueeze(-2)).matmul(&v.transpose(-2, -1))
}

fn relative(a: &Tensor, b: &Tensor) -> f64 {
    let difference = (a.to_kind(Kind::Double) - b).norm();
    (difference / b.norm()).double_value(&[])
}

#[test]
fn every_shape_matches_the_polynomial_of_the_singular_values() {
    // Tolerances: eps of the dtype per step times the slope of the polynomial, which is 161 at 1 / 1.02 for Polar
    // Express: there, where a single row or column lands, three roundings of 6e-8 become 3e-5 in float32, and one of
    // 2e-3 up to 0.3 in bfloat16.
    for (kind, tolerance) in [(Kind::Double, 1e-12), (Kind::Float, 4e-5), (Kind::BFloat16, 2e-1)] {
        for polynomial in [&POLAR_EXPRESS, &NEWTON_SCHULZ] {
            for (b, m, n) in SHAPES {
                let x = random(&[b, m, n], kind);
                let error = relative(&run(&x, polynomial, 0.0), &expected(&x, polynomial));
                let tolerance = if kind == Kind::BFloat16 && m.min(n) == 1 { 3e-1 } else { tolerance };
                assert!(error < tolerance, "{kind:?} {} {b}x{m}x{n}: {error}", polynomial.name);
            }
        }
    }
}

#[test]
fn float16_small_matrix_matches_the_polynomial() {
    let x = random(&[2, 6, 9], Kind::Half);
    let error = relative(&run(&x, &POLAR_EXPRESS, 1e-7), &expected(&x, &POLAR_EXPRESS));
    assert!(error < 3e-2, "{error}");
}

#[test]
fn well_conditioned_input_gives_its_polar_factor() {
    // Singular values of a Gaussian 48 x 160 matrix lie within a factor 4 of each other, so Newton–Schulz is
    // within 5 % of U Vᵀ per singular value.
    let x = random(&[1, 48, 160], Kind::Double);
    let (u, _, v) = x.svd(true, true);
    let error = relative(&run(&x, &NEWTON_SCHULZ, 1e-12), &u.matmul(&v.transpose(-2, -1)));
    assert!(error < 0.05, "{error}");
}

#[test]
fn other_degrees_of_the_polynomial_are_exact() {
    // A cubic step, a negative linear coefficient, an even number of steps and no step at all.
    let rows: [&'static [[f64; 3]]; 4] = [
        &[[1.5, -0.5, 0.0], [1.5, -0.5, 0.0]],
        &[[-1.5, 0.5, 0.25], [3.0, -2.0, 0.5], [2.0, -1.5, 0.0]],
        &[[0.0, 1.0, 0.5]],
        &[],
    ];
    for rows in rows {
        let polynomial = simple(rows, 1.0);
        for (b, m, n) in [(2, 9, 4), (1, 520, 512)] {
            let x = random(&[b, m, n], Kind::Double);
            let error = relative(&run(&x, &polynomial, 0.0), &expected(&x, &polynomial));
            assert!(error < 1e-12, "{rows:?} {m}x{n}: {error}");
        }
    }
}

#[test]
fn epsilon_is_added_to_the_norm() {
    let identity = simple(&[], 2.0);
    let x = Tensor::from_slice(&[3.0, 4.0]).view([1, 1, 2]);
    // 3 / (2 * 5 + 0.5)
    assert!((run(&x, &identity, 0.5).double_value(&[0, 0, 0]) - 3.0 / 10.5).abs() < 1e-15);
}

#[test]
fn zero_matrix_stays_exactly_zero() {
    for kind in [Kind::BFloat16, Kind::Float, Kind::Double] {
        for epsilon in [0.0, 1e-8] {
            for (b, m, n) in [(2, 5, 3), (1, 512, 512)] {
                let out = run(&Tensor::zeros([b, m, n], (kind, Device::Cpu)), &POLAR_EXPRESS, epsilon);
                assert_eq!(out.count_nonzero(None).int64_value(&[]), 0, "{kind:?} {epsilon}");
            }
        }
    }
}

#[test]
fn non_finite_matrix_becomes_nan_and_leaves_the_others_alone() {
    for (m, n) in [(6, 4), (4, 6), (515, 512)] {
        for bad in [f64::NAN, f64::INFINITY] {
            let x = random(&[3, m, n], Kind::Float);
            let clean = run(&x, &POLAR_EXPRESS, 1e-8);
            let _ = x.get(1).get(2).get(1).fill_(bad);
            let out = run(&x, &POLAR_EXPRESS, 1e-8);
            for i in [0, 2] {
                assert!(out.get(i).equal(&clean.get(i)), "{m}x{n} matrix {i}");
            }
            assert!(out.get(1).isnan().all().int64_value(&[]) == 1, "{m}x{n} {bad}");
        }
    }
}

#[test]
fn results_do_not_depend_on_threads_or_the_rest_of_the_batch() {
    // Side by side, one by one, and with products that are spread over threads.
    for (b, m, n) in [(9, 48, 70), (3, 300, 260), (1, 700, 520)] {
        for kind in [Kind::Float, Kind::BFloat16] {
            let x = random(&[b, m, n], kind);
            crate::threads::set(1);
            let first = run(&x, &POLAR_EXPRESS, 1e-8);
            let last = run(&x.narrow(0, b - 1, 1), &POLAR_EXPRESS, 1e-8);
            assert!(last.equal(&first.narrow(0, b - 1, 1)), "{kind:?} {m}x{n}");
            for threads in [2, 3, 7] {
                crate::threads::set(threads);
                assert!(run(&x, &POLAR_EXPRESS, 1e-8).equal(&first), "{kind:?} {m}x{n} {threads}");
            }
            crate::threads::set(1);
        }
    }
}

#[test]
fn batch_of_small_matrices_equals_each_alone() {
    let x = random(&[1100, 13, 11], Kind::Double);
    let together = run(&x, &POLAR_EXPRESS, 1e-8);
    for i in [0, 1, 915, 916, 1099] {
        let alone = run(&x.narrow(0, i, 1), &POLAR_EXPRESS, 1e-8);
        assert!(relative(&together.narrow(0, i, 1), &alone) < 1e-13, "{i}");
    }
}

#[test]
fn strips_give_an_exactly_symmetric_product() {
    let mirror = Symmetric { strips: STRIPS, size: 37 };
    for kind in [Kind::Double, Kind::Float, Kind::BFloat16] {
        let w = random(&[37, 51], kind);
        let out = Tensor::full([37, 37], f64::NAN, (kind, Device::Cpu));
        let free = Tensor::full([37, 37], f64::NAN, (kind, Device::Cpu));
        let mut gram = out.copy();
        mirror.gram(&mut gram, &w, &free).unwrap();
        assert!(gram.equal(&gram.transpose(0, 1)));
        let wide = w.to_kind(Kind::Double);
        assert!(relative(&gram, &wide.matmul(&wide.transpose(0, 1))) < 4e-3);
        let g = gram.to_kind(Kind::Double);
        // Polynomials of one matrix commute: out + G G.
        let mut sum = gram.copy();
        mirror.accumulate(&mut sum, &gram, &gram, &free).unwrap();
        assert!(sum.equal(&sum.transpose(0, 1)));
        assert!(relative(&sum, &(&g + g.matmul(&g))) < 1e-2);
    }
}

#[test]
fn empty_batch_and_wrong_scratch() {
    for shape in [[0, 3, 4], [2, 0, 4], [2, 3, 0]] {
        assert_eq!(
            run(&Tensor::zeros(shape, (Kind::Float, Device::Cpu)), &POLAR_EXPRESS, 1e-8).size(),
            shape
        );
    }
    let mut x = random(&[1, 3, 4], Kind::Float);
    let enough = scratch_elements(1, 3, 4, DType::F32);
    for mut scratch in [
        Tensor::zeros([enough - 1], (Kind::Float, Device::Cpu)),
        Tensor::zeros([enough], (Kind::Double, Device::Cpu)),
    ] {
        assert!(matches!(newton_schulz(&mut x, &POLAR_EXPRESS, 1e-8, &mut scratch), Err(Error::Internal(_))));
    }
}

#[test]
fn aol_is_the_polynomial_of_the_matrix_with_scaled_rows() {
    for (kind, tolerance) in [(Kind::Double, 1e-12), (Kind::Float, 1e-5), (Kind::BFloat16, 5e-2)] {
        for (b, m, n) in [(3, 4, 11), (3, 11, 4), (2, 9, 9), (1, 1, 6), (2, 40, 90), (1, 130, 48)] {
            let x = random(&[b, m, n], kind);
            let wide = x.to_kind(Kind::Double);
            let short = if m > n { wide.transpose(1, 2) } else { wide.shallow_clone() };
            let sums = short.matmul(&short.transpose(1, 2)).abs().sum_dim_intlist(
                [2].as_slice(),
                true,
                Kind::Double,
            );
            let mut y = short / sums.sqrt();
            for [a, b, c] in AOL.rows.iter() {
                let gram = y.matmul(&y.transpose(1, 2));
                y = &y * *a + (&gram * *b + gram.matmul(&gram) * *c).matmul(&y);
            }
            let expected = if m > n { y.transpose(1, 2) } else { y };
            let error = relative(&run(&x, &AOL, 0.0), &expected);
            assert!(error < tolerance, "{kind:?} {b}x{m}x{n}: {error}");
        }
    }
    let mut with_zero_row = random(&[1, 4, 6], Kind::Float);
    let _ = with_zero_row.get(0).get(2).zero_();
    let out = run(&with_zero_row, &AOL, 0.0);
    assert_eq!(out.get(0).get(2).count_nonzero(None).int64_value(&[]), 0);
    assert!(out.isfinite().all().int64_value(&[]) == 1);
    with_zero_row *= 1e-30;
    assert!(relative(&run(&with_zero_row, &AOL, 0.0), &out.to_kind(Kind::Double)) < 1e-5);
}
