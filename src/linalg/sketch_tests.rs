#![allow(clippy::many_single_char_names)] // as the equations have them

use super::*;
use crate::linalg::project::{Source, basis};

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

fn omega(d: usize, s: usize) -> Omega {
    Omega { key: Key { seed: 3, stream: 5 }, tag: 2, step: 7, index: 1, shape: [d, s] }
}

fn size(n: usize) -> i64 {
    i64::try_from(n).unwrap()
}

/// `[d, e]` with these singular values, and its left vectors.
fn matrix(d: usize, e: usize, values: &Tensor) -> (Tensor, Tensor) {
    tch::manual_seed(0);
    let k = values.size()[0];
    let u = Tensor::linalg_qr(&Tensor::randn([size(d), k], DOUBLE), "reduced").0;
    let v = Tensor::linalg_qr(&Tensor::randn([size(e), k], DOUBLE), "reduced").0;
    ((&u * values).mm(&v.tr()), u)
}

fn norm(x: &Tensor) -> f64 {
    f64::try_from(x.norm()).unwrap()
}

#[test]
fn sketches_are_those_by_the_dense_matrix() {
    tch::manual_seed(0);
    for [d, e, s] in [[600, 1700, 40], [40, 9001, 18], [50, 1, 20], [33, 64, 5]] {
        let (omega, a) = (omega(d, s), Tensor::randn([size(d), size(e)], (Kind::Float, Device::Cpu)));
        let dense = omega.dense(Device::Cpu, crate::tensor::Device::Cpu).unwrap();
        let wide = a.to_kind(Kind::Double);
        let expected = wide.mm(&wide.tr().mm(&dense));
        for a in [&a, &a.tr().contiguous().tr()] {
            let found = omega.sketch(a, crate::tensor::Device::Cpu).unwrap();
            assert!(norm(&(found - &expected)) < 1e-13 * norm(&expected), "{d} {e} {s}");
        }
    }
}

#[test]
fn sketched_eigenvectors_are_those_of_the_nystrom_approximation() {
    // Here with the inverse square root of the middle matrix, and the vectors of the whole product.
    let (d, s, r) = (60, 24, 8);
    let values = (Tensor::arange(40, DOUBLE) * -0.1).exp();
    let (a, _) = matrix(d, 50, &values);
    let dense = omega(d, s).dense(Device::Cpu, crate::tensor::Device::Cpu).unwrap();
    let y = a.mm(&a.tr().mm(&dense));
    let whole = y.mm(&dense.tr().mm(&y).inverse()).mm(&y.tr());
    let (all, vectors) = ((&whole + whole.tr()) * 0.5).linalg_eigh("L");
    let (found, basis) = nystrom(&y, &dense, r).unwrap().unwrap();
    let r = size(r);
    let expected = all.flip([0]).narrow(0, 0, r);
    assert!(norm(&(found - &expected)) < 1e-9 * norm(&expected));
    let expected = vectors.flip([1]).narrow(1, 0, r);
    assert!(norm(&(basis.mm(&basis.tr()) - expected.mm(&expected.tr()))) < 1e-8);
    assert!(norm(&(basis.tr().mm(&basis) - Tensor::eye(r, DOUBLE))) < 1e-10);
}

#[test]
fn sketched_vectors_hold_nearly_all_that_as_many_can() {
    for (name, values) in [
        ("decays", (Tensor::arange(200, DOUBLE) + 1.0).pow_tensor_scalar(-1.0)),
        ("is flat", Tensor::ones([200], DOUBLE)),
        ("has a floor", Tensor::cat(&[Tensor::ones([32], DOUBLE) * 10.0, Tensor::ones([168], DOUBLE)], 0)),
    ] {
        let (d, r) = (256, 32);
        let (a, _) = matrix(d, 300, &values);
        let omega = omega(d, sketch_columns(r, d).unwrap());
        let y = omega.sketch(&a, crate::tensor::Device::Cpu).unwrap();
        let (_, basis) =
            nystrom(&y, &omega.dense(Device::Cpu, crate::tensor::Device::Cpu).unwrap(), r).unwrap().unwrap();
        let most = norm(&values.narrow(0, 0, 32));
        let share = norm(&basis.tr().mm(&a)) / most;
        assert!(share > 0.98 && share < 1.0 + 1e-9, "{name}: {share}");
    }
}

#[test]
fn matrices_of_lower_rank_give_what_they_have() {
    for rank in [1, 5, 20] {
        let values = Tensor::ones([rank], DOUBLE) * 3.0;
        let (a, u) = matrix(80, 90, &values);
        let omega = omega(80, 36);
        let y = omega.sketch(&a, crate::tensor::Device::Cpu).unwrap();
        let (found, basis) =
            nystrom(&y, &omega.dense(Device::Cpu, crate::tensor::Device::Cpu).unwrap(), 20).unwrap().unwrap();
        let kept = found.narrow(0, 0, rank);
        assert!(norm(&(kept - 9.0)) < 1e-9, "{rank}");
        assert!(norm(&found.narrow(0, rank, 20 - rank)) < 1e-8, "{rank}: {found}");
        let basis = basis.narrow(1, 0, rank);
        assert!(norm(&(basis.mm(&basis.tr()) - u.mm(&u.tr()))) < 1e-6, "{rank}");
    }
    let omega = omega(80, 36);
    let zero = Tensor::zeros([80, 36], DOUBLE);
    let (found, _) =
        nystrom(&zero, &omega.dense(Device::Cpu, crate::tensor::Device::Cpu).unwrap(), 20).unwrap().unwrap();
    assert!(norm(&found) < 1e-200);
}

#[test]
fn a_sketch_is_taken_where_it_is_less_than_half_of_the_matrix() {
    assert_eq!(sketch_columns(128, 768), Some(144));
    assert_eq!(sketch_columns(128, 288), None);
    assert_eq!(sketch_columns(128, 289), Some(144));
    assert_eq!(sketch_columns(2, 12), None);
}

#[test]
fn bases_in_float64_are_orthonormal_to_rounding() {
    let (d, s, r) = (60, 24, 6);
    let values = (Tensor::arange(10, DOUBLE) * -2.0).exp();
    let (a, u) = matrix(d, 50, &values);
    let dense = omega(d, s).dense(Device::Cpu, crate::tensor::Device::Cpu).unwrap();
    let y = a.mm(&a.tr().mm(&dense));
    let found = basis(&Source::Sketch(&y, &dense), r, d, true).unwrap().unwrap();
    let r = size(r);
    assert!(norm(&(found.tr().mm(&found) - Tensor::eye(r, DOUBLE))) < 1e-13);
    // The directions as far as the squares of the values resolve them.
    let wanted = u.narrow(1, 0, r - 2);
    assert!(norm(&(&wanted - found.mm(&found.tr().mm(&wanted)))) < 1e-6);
}

#[test]
fn a_matrix_of_zeros_has_no_directions() {
    for seed in 0..20 {
        let omega = Omega { key: Key { seed, stream: 5 }, ..omega(60, 20) };
        let dense = omega.dense(Device::Cpu, crate::tensor::Device::Cpu).unwrap();
        let found = basis(&Source::Sketch(&Tensor::zeros([60, 20], DOUBLE), &dense), 4, 70, false);
        assert!(!bool::try_from(found.unwrap().unwrap().any()).unwrap(), "{seed}");
    }
}
