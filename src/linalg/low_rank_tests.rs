//! Products with thin factors against float64, by every way that they are computed.

use tch::{Device, Kind, Tensor};

use super::*;
use crate::tensor::test_views::view_mut;

fn matrix(x: &Tensor) -> MatrixViewMut<'_> {
    let [rows, cols] = [0, 1].map(|d| usize::try_from(x.size()[d]).unwrap());
    view_mut(x).into_matrix(0, [rows, cols], cols)
}

fn relative(a: &Tensor, b: &Tensor) -> f64 {
    ((a.to_kind(Kind::Double) - b).norm() / b.norm()).double_value(&[])
}

fn all<'t>(b: &'t Tensor, transposed: bool, p: &'t Tensor, r: &'t Tensor) -> [Factored<'t>; 1] {
    [Factored { stored: matrix(b), transposed, p: matrix(p), r: matrix(r) }]
}

#[test]
fn products_of_every_size_are_those_of_float64() {
    // Below what is worth libtorch's call, thin, and of a rank that libtorch takes.
    for (size, rank) in [([70, 50], 7), ([800, 600], 10), ([600, 800], 40), ([300, 420], 100)] {
        for (transposed, kind) in [(false, Kind::Float), (true, Kind::Float), (false, Kind::Double)] {
            let tolerance = if kind == Kind::Double { 1e-14 } else { 1e-6 };
            tch::manual_seed(rank);
            let random = |shape: [i64; 2]| Tensor::randn(shape, (Kind::Double, Device::Cpu)).to_kind(kind);
            let [m, n] = size;
            let stored = random(if transposed { [n, m] } else { size });
            let (p, r) = (random([m, rank]), random([n, rank]));
            let wide = |x: &Tensor| x.to_kind(Kind::Double);
            let oriented = |x: &Tensor| if transposed { wide(x).tr() } else { wide(x) };
            let (left, right) = (random([m, rank]), random([n, rank]));
            project(&mut all(&stored, transposed, &left, &r)).unwrap();
            back_project(&mut all(&stored, transposed, &p, &right)).unwrap();
            let what = format!("{size:?} {rank} {transposed} {kind:?}");
            assert!(relative(&left, &oriented(&stored).mm(&wide(&r))) < tolerance, "project {what}");
            assert!(relative(&right, &oriented(&stored).tr().mm(&wide(&p))) < tolerance, "back {what}");
            for decay in [None, Some(0.0), Some(0.25), Some(1.0)] {
                let out = stored.copy();
                decay_and_add_product(&mut all(&out, transposed, &p, &r), decay).unwrap();
                let expected = oriented(&stored) * (1.0 - decay.unwrap_or(0.0)) + wide(&p).mm(&wide(&r).tr());
                assert!(relative(&oriented(&out), &expected) < tolerance, "decay {decay:?} {what}");
            }
        }
    }
}
