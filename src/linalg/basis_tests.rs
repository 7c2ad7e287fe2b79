use tch::Device;

use super::*;
use crate::linalg::low_rank::sketches;
use crate::linalg::qr::sketch_rows;
use crate::linalg::random::Key;
use crate::threads;

const METHODS: [QrMethod; 4] = [QrMethod::Rcqr, QrMethod::Cqr, QrMethod::Cqr2, QrMethod::Qr];
const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

fn gaussian(shape: &[i64], seed: i64) -> Tensor {
    tch::manual_seed(seed);
    Tensor::randn(shape, DOUBLE)
}

/// The result, and the matrices whose sketch was asked for.
fn run(p: &Tensor, method: QrMethod) -> (Tensor, Vec<usize>) {
    let (_, m, r) = p.size3().unwrap();
    let mut q = p.copy();
    let mut asked = Vec::new();
    orthonormal_basis(&mut q, method, |which| {
        asked.extend_from_slice(which);
        let keys = vec![(Key { seed: 1, stream: 2 }, 0); which.len()];
        let side = |n: i64| usize::try_from(n).unwrap();
        sketches(&keys, side(sketch_rows(r, 1.25, m)), side(m), 1, 0)
    })
    .unwrap();
    (q, asked)
}

fn largest(x: &Tensor) -> f64 {
    x.abs().max().double_value(&[])
}

/// `‖QᵀQ - I‖_F / √r` of one matrix.
fn error(q: &Tensor) -> f64 {
    let q = q.to_kind(Kind::Double);
    let r = q.size()[1];
    (q.tr().matmul(&q) - Tensor::eye(r, DOUBLE)).norm().double_value(&[])
        / f64::from(i32::try_from(r).unwrap()).sqrt()
}

/// `[1, m, r]` with singular values falling from 1 to `1 / condition`.
fn graded(m: i64, r: i64, condition: f64) -> Tensor {
    let (u, _) = Tensor::linalg_qr(&gaussian(&[1, m, r], 1), "reduced");
    let (v, _) = Tensor::linalg_qr(&gaussian(&[1, r, r], 2), "reduced");
    let exponents = Tensor::arange(r, DOUBLE) / f64::from(i32::try_from(r - 1).unwrap());
    (u * (exponents * (-condition.ln())).exp()).matmul(&v)
}

#[test]
fn well_conditioned_bases_need_no_sketch_and_equal_householder() {
    for (kind, tolerance) in [(Kind::Float, 3e-6), (Kind::Double, 3e-14), (Kind::BFloat16, 2e-2)] {
        for (b, m, r) in [(1, 7, 1), (3, 17, 5), (2, 100, 47), (2, 600, 48), (1, 1100, 100), (5, 513, 49)] {
            let p = gaussian(&[b, m, r], 5).to_kind(kind);
            let (exact, upper) = Tensor::linalg_qr(&p.to_kind(Kind::Double), "reduced");
            let signs = upper.diagonal(0, 1, 2).sign().unsqueeze(1);
            for method in [QrMethod::Rcqr, QrMethod::Cqr, QrMethod::Cqr2] {
                let (q, asked) = run(&p, method);
                assert!(asked.is_empty(), "{kind:?} {method:?} {b}x{m}x{r}");
                let off = largest(&(q.to_kind(Kind::Double) - &exact * &signs));
                assert!(off < tolerance, "{kind:?} {method:?} {b}x{m}x{r}: {off:e}");
            }
        }
    }
}

#[test]
fn error_stays_at_rounding_for_any_condition() {
    for (kind, limit) in [(Kind::Float, 5e-6), (Kind::Double, 1e-14)] {
        for power in 0..=28 {
            let p = graded(400, 96, 10_f64.powf(f64::from(power) / 2.0).max(1.1)).to_kind(kind);
            for method in METHODS {
                let (q, _) = run(&p, method);
                let found = error(&q.get(0));
                assert!(found < limit, "{kind:?} {method:?} 1e{}: {found:e}", f64::from(power) / 2.0);
            }
        }
    }
}

#[test]
fn ill_conditioned_matrices_alone_get_sketches() {
    let (m, r) = (200, 40);
    let p = Tensor::cat(
        &[gaussian(&[1, m, r], 3), graded(m, r, 1e7), graded(m, r, 30.0), Tensor::zeros([1, m, r], DOUBLE)],
        0,
    )
    .to_kind(Kind::Float);
    let (q, asked) = run(&p, QrMethod::Rcqr);
    assert_eq!(asked, [1, 3]);
    for i in 0..4 {
        assert!(error(&q.get(i)) < 3e-6, "{i}: {:e}", error(&q.get(i)));
        let alone = run(&p.narrow(0, i, 1), QrMethod::Rcqr).0;
        assert!(largest(&(alone.get(0) - q.get(i))) < 1e-6, "{i}");
    }
}

#[test]
fn non_finite_and_extreme_matrices_do_not_disturb_others() {
    let p = gaussian(&[3, 60, 20], 4).to_kind(Kind::Float);
    for method in METHODS {
        let (clean, _) = run(&p, method);
        for bad in [f64::NAN, f64::INFINITY] {
            let broken = p.copy();
            let _ = broken.get(1).get(2).get(1).fill_(bad);
            let (q, _) = run(&broken, method);
            assert!(q.get(1).isnan().all().int64_value(&[]) == 1, "{method:?} {bad}");
            assert!((largest(&(q.get(0) - clean.get(0))), largest(&(q.get(2) - clean.get(2)))) == (0.0, 0.0));
        }
        for scale in [1e-37, 1e-20, 1e20, 1e36] {
            let (q, _) = run(&(&p * scale), method);
            assert!(largest(&(q.abs() - clean.abs())) < 1e-5, "{method:?} {scale:e}");
        }
        let columns = (Tensor::arange(20, (Kind::Float, Device::Cpu)) * 3.0 - 30.0).exp();
        assert!(largest(&(run(&(&p * columns), method).0.abs() - clean.abs())) < 1e-5, "{method:?} columns");
    }
}

#[test]
fn threads_and_batches_change_no_bit() {
    for kind in [Kind::Float, Kind::Double] {
        for (b, m, r) in [(1, 3000, 200), (5, 700, 100), (3, 2000, 96)] {
            let p = Tensor::cat(&[gaussian(&[b, m, r], 9), graded(m, r, 50.0)], 0).to_kind(kind);
            threads::set(1);
            let (one, _) = run(&p, QrMethod::Rcqr);
            let alone = run(&p.narrow(0, b, 1), QrMethod::Rcqr).0;
            for count in [2, 3, 8] {
                threads::set(count);
                let (more, _) = run(&p, QrMethod::Rcqr);
                assert!(one.equal(&more), "{kind:?} {b}x{m}x{r} {count}");
                assert!(run(&p.narrow(0, b, 1), QrMethod::Rcqr).0.equal(&alone), "{kind:?} {m}x{r} {count}");
            }
            threads::set(1);
            assert!(alone.get(0).equal(&one.get(b)), "{kind:?} {m}x{r}");
        }
    }
}

#[test]
fn nothing_to_do_is_no_error() {
    for method in METHODS {
        for shape in [[0, 5, 3], [2, 5, 0], [2, 0, 0]] {
            let (q, asked) = run(&Tensor::zeros(shape, (Kind::Float, Device::Cpu)), method);
            assert_eq!((q.size(), asked), (shape.to_vec(), vec![]));
        }
    }
}

#[test]
fn column_that_is_rounding_becomes_zero_by_every_method() {
    for stored in [0.0, stored_epsilon(DType::BF16)] {
        let p = gaussian(&[1, 120, 16], 6).to_kind(Kind::Float);
        // Well-conditioned but for the lengths of two columns.
        for (column, length) in [(7, 1e-8), (9, 1e-4)] {
            let mut one = p.get(0).narrow(1, column, 1);
            one.copy_(&(&one * length));
        }
        for method in METHODS {
            let mut q = p.copy();
            let sketch = |which: &[usize]| {
                sketches(&vec![(Key { seed: 1, stream: 2 }, 0); which.len()], 20, 120, 1, 0)
            };
            orthonormal_or_zero(&mut q, method, Rounding { of: Size::All, stored }, sketch).unwrap();
            let dead: Vec<i64> = (0..16).filter(|&j| largest(&q.get(0).narrow(1, j, 1)) == 0.0).collect();
            assert_eq!(dead, if stored == 0.0 { vec![7] } else { vec![7, 9] }, "{method:?} {stored:e}");
        }
    }
}
