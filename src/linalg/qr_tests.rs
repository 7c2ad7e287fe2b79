use tch::Device;

use super::*;

const METHODS: [QrMethod; 4] = [QrMethod::Rcqr, QrMethod::Cqr, QrMethod::Cqr2, QrMethod::Qr];
const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

fn gaussian(shape: &[i64], seed: i64) -> Tensor {
    tch::manual_seed(seed);
    Tensor::randn(shape, DOUBLE)
}

/// A sketch made like a caller makes it.
fn sketch(batch: i64, m: i64, r: i64, kind: Kind) -> Tensor {
    let k = sketch_rows(r, 1.25, m);
    let mut values = vec![0.0; usize::try_from(batch * k * m).unwrap()];
    fill_normal(&mut values, Key { seed: 1, stream: 2 }, 1, 0, 0);
    let scale = 1.0 / f64::sqrt(f64::from(i32::try_from(k.max(1)).unwrap()));
    (Tensor::from_slice(&values).view([batch, k, m]) * scale).to_kind(kind)
}

fn run(p: &Tensor, method: QrMethod) -> (Tensor, Report) {
    let (_, m, r) = p.size3().unwrap();
    let (q, report) = orthonormalize(p, method, Some(sketch(1, m, r, p.kind()))).unwrap();
    assert_eq!((q.size(), q.kind()), (p.size(), p.kind()));
    (q, report)
}

fn largest(x: &Tensor) -> f64 {
    x.abs().max().double_value(&[])
}

/// `max |QᵀQ - I|`.
fn defect(q: &Tensor) -> f64 {
    let q = q.to_kind(Kind::Double);
    let r = q.size()[2];
    largest(&(q.transpose(1, 2).matmul(&q) - Tensor::eye(r, DOUBLE)))
}

/// Largest column of `P` outside the range of `Q`, relative to the norm of that column.
fn outside(p: &Tensor, q: &Tensor) -> f64 {
    let (p, q) = (p.to_kind(Kind::Double), q.to_kind(Kind::Double));
    let norm = |x: &Tensor| x.square().sum_dim_intlist([1].as_slice(), true, Kind::Double).sqrt();
    let length = norm(&p);
    let p = &p / length.clamp_min(f64::MIN_POSITIVE);
    largest(&norm(&(&p - q.matmul(&q.transpose(1, 2).matmul(&p)))))
}

#[test]
fn every_method_and_dtype_is_orthonormal_and_spans_its_input() {
    let shapes = [(1, 1, 1), (3, 7, 1), (3, 17, 5), (3, 24, 24), (2, 100, 60), (1, 300, 128), (2, 33, 32)];
    for (kind, tolerance) in
        [(Kind::Float, 1e-5), (Kind::Double, 1e-13), (Kind::BFloat16, 2e-2), (Kind::Half, 3e-3)]
    {
        for method in METHODS {
            for (b, m, r) in shapes {
                let p = gaussian(&[b, m, r], 5).to_kind(kind);
                let (q, report) = run(&p, method);
                assert!(defect(&q) < tolerance, "{kind:?} {method:?} {b}x{m}x{r}: {}", defect(&q));
                assert!(
                    outside(&p, &q) < 4.0 * tolerance,
                    "{kind:?} {method:?} {b}x{m}x{r}: {}",
                    outside(&p, &q)
                );
                assert_eq!(report, Report::default(), "{kind:?} {method:?} {b}x{m}x{r}");
            }
        }
    }
}

/// `[1, m, r]` with singular values falling from 1 to `1 / condition`.
fn graded(m: i64, r: i64, condition: f64) -> Tensor {
    let (u, _) = Tensor::linalg_qr(&gaussian(&[1, m, r], 1), "reduced");
    let (v, _) = Tensor::linalg_qr(&gaussian(&[1, r, r], 2), "reduced");
    let exponents = Tensor::arange(r, DOUBLE) / f64::from(i32::try_from(r - 1).unwrap());
    let sigma = (exponents * (-condition.ln())).exp();
    (u * sigma).matmul(&v)
}

#[test]
fn ill_conditioned_input_is_orthonormalized_by_every_method() {
    for condition in [1e1, 1e2, 1e3, 1e4, 1e6, 1e8, 1e12] {
        let p = graded(200, 40, condition).to_kind(Kind::Float);
        for method in METHODS {
            let (q, report) = run(&p, method);
            assert!(defect(&q) < 1e-5, "{method:?} {condition:e}: {} {report:?}", defect(&q));
            assert!(outside(&p, &q) < 1e-5, "{method:?} {condition:e}: {} {report:?}", outside(&p, &q));
            if method == QrMethod::Rcqr && condition <= 1e6 {
                assert_eq!(report, Report::default(), "{condition:e}");
            }
        }
    }
    let (_, report) = run(&graded(200, 40, 1e5).to_kind(Kind::Float), QrMethod::Cqr);
    assert_eq!(report, Report { shifted: 1, householder: 0 }, "the shifted factorization is enough at 1e5");
}

#[test]
fn rank_deficient_input_gives_an_orthonormal_completion() {
    for kind in [Kind::Float, Kind::Double] {
        let (m, r) = (50, 12);
        let full = gaussian(&[1, m, r], 3);
        let zero_column = full.copy();
        let _ = zero_column.narrow(2, 4, 1).fill_(0.0);
        let duplicate = full.copy();
        duplicate.narrow(2, 7, 1).copy_(&full.narrow(2, 2, 1));
        let few_rows = full.copy();
        let _ = few_rows.narrow(1, 5, m - 5).fill_(0.0);
        let low_rank = gaussian(&[1, m, 3], 8).matmul(&gaussian(&[1, 3, r], 9));
        let one_live_column = Tensor::zeros([1, m, r], DOUBLE);
        one_live_column.narrow(2, 0, 1).copy_(&full.narrow(2, 0, 1));
        let all = [&full, &zero_column, &duplicate, &few_rows, &low_rank, &one_live_column];
        let p = Tensor::cat(&all, 0).to_kind(kind);
        for method in METHODS {
            let (q, report) = run(&p, method);
            assert!(defect(&q) < 1e-5, "{kind:?} {method:?}: {}", defect(&q));
            assert!(outside(&p, &q) < 1e-5, "{kind:?} {method:?}: {}", outside(&p, &q));
            let full_alone = run(&full.to_kind(kind), method).0;
            assert!(
                largest(&(q.narrow(0, 0, 1) - full_alone)) < 1e-5,
                "the full-rank matrix is not affected"
            );
            if method != QrMethod::Qr {
                assert!((3..=5).contains(&report.householder), "{kind:?} {method:?} {report:?}");
                assert!(report.shifted >= report.householder);
            }
        }
    }
}

#[test]
fn zero_matrix_gives_columns_of_the_identity() {
    for method in METHODS {
        let (q, _) = run(&Tensor::zeros([1, 6, 3], (Kind::Float, Device::Cpu)), method);
        assert!(defect(&q) < 1e-6, "{method:?}");
        assert!(largest(&(q.abs() - Tensor::eye_m(6, 3, (Kind::Float, Device::Cpu)))) < 1e-6, "{method:?}");
    }
}

#[test]
fn non_finite_matrix_gives_nan_and_leaves_the_others_alone() {
    for method in METHODS {
        for (m, r) in [(20, 6), (6, 6)] {
            let p = gaussian(&[3, m, r], 4).to_kind(Kind::Float);
            let (clean, _) = run(&p, method);
            for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                let broken = p.copy();
                let _ = broken.get(1).get(2).get(1).fill_(bad);
                let (q, report) = run(&broken, method);
                assert!(q.get(1).isnan().all().int64_value(&[]) == 1, "{method:?} {bad}");
                for i in [0, 2] {
                    assert!(largest(&(q.get(i) - clean.get(i))) == 0.0, "{method:?} {bad} {i}");
                }
                assert_eq!(report, Report::default());
            }
        }
    }
}

#[test]
fn scale_of_a_matrix_or_column_does_not_matter() {
    let p = gaussian(&[2, 40, 9], 6).to_kind(Kind::Float);
    for method in METHODS {
        let (expected, _) = run(&p, method);
        for scale in [1e-37, 1e-30, 1e30, 1e37] {
            let (q, report) = run(&(&p * scale), method);
            assert!(largest(&(q - &expected)) < 1e-5, "{method:?} {scale:e}");
            assert_eq!(report, Report::default());
        }
        let columns = (Tensor::arange(9, (Kind::Float, Device::Cpu)) * 16.0 - 64.0).exp();
        let (q, report) = run(&(&p * columns), method);
        assert!(largest(&(q - &expected)) < 1e-5, "{method:?} scaled columns");
        assert_eq!(report, Report::default());
    }
}

#[test]
fn sketch_may_differ_per_matrix_and_changes_signs_only() {
    let p = gaussian(&[3, 60, 10], 7);
    let (one, _) = orthonormalize(&p, QrMethod::Rcqr, Some(sketch(1, 60, 10, Kind::Float))).unwrap();
    let (each, _) = orthonormalize(&p, QrMethod::Rcqr, Some(sketch(3, 60, 10, Kind::Double))).unwrap();
    assert!(largest(&(one.abs() - each.abs())) < 1e-12);
    // The first matrix has the same sketch up to its precision, so the same signs.
    assert!(largest(&(one.get(0) - each.get(0))) < 1e-12);
}

#[test]
fn empty_batch_and_unfit_arguments() {
    for method in METHODS {
        for shape in [[0, 5, 3], [2, 5, 0], [2, 0, 0]] {
            let p = Tensor::zeros(shape, (Kind::Float, Device::Cpu));
            let (q, report) = orthonormalize(&p, method, None).unwrap();
            assert_eq!((q.size(), report), (shape.to_vec(), Report::default()));
        }
        let wide = orthonormalize(&gaussian(&[1, 3, 5], 1), method, None);
        assert!(matches!(wide, Err(Error::Value(_))));
    }
    let p = gaussian(&[2, 9, 4], 1);
    for unfit in
        [None, Some(gaussian(&[1, 3, 9], 1)), Some(gaussian(&[1, 5, 8], 1)), Some(gaussian(&[3, 5, 9], 1))]
    {
        assert!(matches!(orthonormalize(&p, QrMethod::Rcqr, unfit), Err(Error::Value(_))));
    }
    assert_eq!(QrMethod::parse("cqr").unwrap(), QrMethod::Cqr);
    assert_eq!(QrMethod::parse("cqr2").unwrap(), QrMethod::Cqr2);
    assert!(QrMethod::parse("lq").unwrap_err().to_string().contains("qr_method must be"));
}

#[test]
fn sketch_rows_are_oversampled_and_clipped() {
    // ceil(1.25 * 7) = 9; never below r or above m.
    assert_eq!(sketch_rows(7, 1.25, 100), 9);
    assert_eq!(sketch_rows(8, 1.25, 9), 9);
    assert_eq!(sketch_rows(8, 0.5, 100), 8);
    assert_eq!(sketch_rows(8, f64::NAN, 100), 8);
}

#[test]
fn second_pass_of_cqr2_is_done_without_being_asked_for() {
    // One pass of float32 leaves up to condition² u, which cqr lets be where it is within its tolerance: up to which
    // condition that is depends on how the processor's library sums.
    let mut let_be = false;
    for condition in [5.0, 8.0, 12.0, 20.0, 30.0] {
        let p = graded(400, 60, condition).to_kind(Kind::Float);
        let (once, twice) = (run(&p, QrMethod::Cqr), run(&p, QrMethod::Cqr2));
        assert_eq!((once.1, twice.1), (Report::default(), Report::default()));
        assert!(defect(&twice.0) < 1e-6, "{condition}: {}", defect(&twice.0));
        let_be |= defect(&once.0) > 2.0 * defect(&twice.0);
    }
    assert!(let_be);
}
