use tch::Device;

use super::*;

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

const EACH: Rounding = Rounding { of: Size::Each, stored: 0.0 };

fn basis(x: &Tensor) -> Tensor {
    Tensor::linalg_qr(x, "reduced").0
}

/// Columns of a matrix `[m, r]` of this rank, rounded to float32.
fn of_rank(m: i64, r: i64, rank: i64) -> Tensor {
    tch::manual_seed(m + 7 * r + 31 * rank);
    let left = Tensor::randn([m, rank], DOUBLE);
    left.mm(&Tensor::randn([rank, r], DOUBLE)).to_kind(Kind::Float)
}

#[test]
fn the_columns_behind_the_rank_depend_on_those_before_them() {
    for (m, r, rank) in [(32, 8, 2), (64, 10, 9), (128, 32, 31), (40, 40, 1), (300, 20, 20)] {
        let x = of_rank(m, r, rank);
        let found = independent(&x, &basis(&x), f64::from(f32::EPSILON), EACH).unwrap();
        match found {
            None => assert_eq!(r, rank),
            Some(Independent { columns, basis_mk }) => {
                assert_eq!(columns, (0..rank).collect::<Vec<_>>());
                assert_eq!(basis_mk.size(), [m, rank]);
            }
        }
    }
}

#[test]
fn a_column_behind_dependent_ones_keeps_its_own_direction() {
    let x = of_rank(30, 3, 3);
    let (a, b, c) = (x.narrow(1, 0, 1), x.narrow(1, 1, 1), x.narrow(1, 2, 1));
    let zero = a.zeros_like();
    let mixed = Tensor::cat(&[&a, &zero, &(&a * 3.0), &b, &(&a - &b), &c], 1);
    let Independent { columns, basis_mk } =
        independent(&mixed, &basis(&mixed), f64::from(f32::EPSILON), EACH).unwrap().unwrap();
    assert_eq!(columns, [0, 3, 5]);
    let difference = basis_mk.mm(&basis_mk.tr()) - basis(&x).mm(&basis(&x).tr());
    assert!(f64::try_from(difference.abs().max()).unwrap() < 1e-5);
}

#[test]
fn scales_do_not_matter_and_what_is_not_finite_is_left_alone() {
    let x = of_rank(24, 6, 4);
    let scales = Tensor::from_slice(&[1e-30_f32, 1e30, 1.0, 1e-20, 1e20, 1e-10]);
    let found =
        independent(&(&x * &scales), &basis(&x), f64::from(f32::EPSILON), EACH).unwrap().unwrap();
    assert_eq!(found.columns, [0, 1, 2, 3]);
    let nan = &x + f64::NAN;
    assert!(independent(&nan, &nan, f64::from(f32::EPSILON), EACH).unwrap().is_none());
    assert!(
        independent(&x.zeros_like(), &x, f64::from(f32::EPSILON), EACH)
            .unwrap()
            .unwrap()
            .columns
            .is_empty()
    );
}
