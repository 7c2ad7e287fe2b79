//! Products with thin factors against float64, by every way that they are computed.

use tch::{Device, Kind, Tensor};

use super::*;
use crate::tensor::FlatView;

fn area(x: &Tensor) -> MatrixView {
    let [rows, cols] = [0, 1].map(|d| usize::try_from(x.size()[d]).unwrap());
    FlatView::of(x).unwrap().area(0, [rows, cols], cols)
}

fn relative(a: &Tensor, b: &Tensor) -> f64 {
    ((a.to_kind(Kind::Double) - b).norm() / b.norm()).double_value(&[])
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
            let all = |b: &Tensor, p: &Tensor, r: &Tensor| {
                [Factored { stored: area(b), transposed, p: area(p), r: area(r) }]
            };
            let (left, right) = (random([m, rank]), random([n, rank]));
            project(&all(&stored, &left, &r)).unwrap();
            back_project(&all(&stored, &p, &right)).unwrap();
            let what = format!("{size:?} {rank} {transposed} {kind:?}");
            assert!(relative(&left, &oriented(&stored).mm(&wide(&r))) < tolerance, "project {what}");
            assert!(relative(&right, &oriented(&stored).tr().mm(&wide(&p))) < tolerance, "back {what}");
            for decay in [None, Some(0.0), Some(0.25), Some(1.0)] {
                let out = stored.copy();
                decay_and_add_product(&all(&out, &p, &r), decay).unwrap();
                let expected = oriented(&stored) * (1.0 - decay.unwrap_or(0.0)) + wide(&p).mm(&wide(&r).tr());
                assert!(relative(&oriented(&out), &expected) < tolerance, "decay {decay:?} {what}");
            }
        }
    }
}
