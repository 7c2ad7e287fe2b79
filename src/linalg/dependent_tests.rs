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
        let found = independent(&x, &basis(&x), [f64::from(f32::EPSILON), 0.0], EACH).unwrap();
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
        independent(&mixed, &basis(&mixed), [f64::from(f32::EPSILON), 0.0], EACH).unwrap().unwrap();
    assert_eq!(columns, [0, 3, 5]);
    let difference = basis_mk.mm(&basis_mk.tr()) - basis(&x).mm(&basis(&x).tr());
    assert!(f64::try_from(difference.abs().max()).unwrap() < 1e-5);
}

#[test]
fn scales_do_not_matter_and_what_is_not_finite_is_left_alone() {
    let x = of_rank(24, 6, 4);
    let scales = Tensor::from_slice(&[1e-30_f32, 1e30, 1.0, 1e-20, 1e20, 1e-10]);
    let found =
        independent(&(&x * &scales), &basis(&x), [f64::from(f32::EPSILON), 0.0], EACH).unwrap().unwrap();
    assert_eq!(found.columns, [0, 1, 2, 3]);
    let nan = &x + f64::NAN;
    assert!(independent(&nan, &nan, [f64::from(f32::EPSILON), 0.0], EACH).unwrap().is_none());
    assert!(
        independent(&x.zeros_like(), &x, [f64::from(f32::EPSILON), 0.0], EACH)
            .unwrap()
            .unwrap()
            .columns
            .is_empty()
    );
}

#[test]
fn columns_are_kept_if_their_own_part_exceeds_rounding() {
    let epsilon = f64::from(f32::EPSILON);
    // Of a column of length 1 that leans on the first, a part of its own of this many roundings is kept.
    for (own, stored, length, is_kept) in [
        (4.0, 0.0, 1.0, false),
        (32.0, 0.0, 1.0, true),
        (64.0, 32.0 * epsilon, 1.0, false),
        (256.0, 32.0 * epsilon, 1.0, true),
        // Roundings of what is stored are those of all columns on average, others those of the longest.
        (64.0, 32.0 * epsilon, 1e-3, true),
        (4.0, 32.0 * epsilon, 1e-3, false),
    ] {
        let x = Tensor::zeros([40, 8], DOUBLE);
        let _ = x.get(0).narrow(0, 0, 2).fill_(1.0);
        let _ = x.get(1).narrow(0, 1, 1).fill_(own * epsilon);
        for j in 2..8 {
            let _ = x.get(j).narrow(0, j, 1).fill_(length);
        }
        let rounding = Rounding { of: Size::All, stored };
        let found = independent(&x, &basis(&x), [epsilon, 0.0], rounding).unwrap();
        let kept = found.map_or_else(|| (0..8).collect(), |found| found.columns);
        assert_eq!(kept.contains(&1), is_kept, "{own} {stored:e} {length:e}");
        assert_eq!(kept.len(), if is_kept { 8 } else { 7 });
    }
}

#[test]
fn columns_between_dependent_ones_keep_an_orthonormal_basis() {
    for kind in [Kind::Float, Kind::Double] {
        tch::manual_seed(5);
        let own = Tensor::randn([300, 90], DOUBLE);
        // Every third column is a sum of two before it.
        let parts: Vec<_> = (0..90)
            .flat_map(|j| {
                let column = own.narrow(1, j, 1);
                let sum = (j % 2 == 1).then(|| &column + own.narrow(1, j / 2, 1));
                std::iter::once(column).chain(sum)
            })
            .collect();
        let x = Tensor::cat(&parts, 1).to_kind(kind);
        let epsilon = if kind == Kind::Double { f64::EPSILON } else { f64::from(f32::EPSILON) };
        let Independent { columns, basis_mk } =
            independent(&x, &basis(&x), [epsilon, 0.0], EACH).unwrap().unwrap();
        let expected: Vec<i64> = (0..135).filter(|j| j % 3 != 2).collect();
        assert_eq!(columns, expected);
        let q = basis_mk.to_kind(Kind::Double);
        let largest = |x: &Tensor| f64::try_from(x.abs().max()).unwrap();
        let tolerance = if kind == Kind::Double { 1e-13 } else { 1e-5 };
        assert!(largest(&(q.tr().mm(&q) - Tensor::eye(90, DOUBLE))) < tolerance);
        let wide = x.to_kind(Kind::Double);
        assert!(largest(&(q.mm(&q.tr().mm(&wide)) - &wide)) < 100.0 * tolerance);
    }
}

#[test]
fn short_columns_are_rounded_by_their_own_length_in_16_bits() {
    let (epsilons, stored) = ([f64::from(f32::EPSILON), 2.0_f64.powi(-9)], 2.0_f64.powf(-8.5));
    let rounding = Rounding { of: Size::All, stored };
    let lengths =
        Tensor::from_slice(&(0..32).map(|j| 0.003_f64.powf(f64::from(j) / 31.0)).collect::<Vec<_>>());
    let columns = basis(&of_rank(200, 32, 32)).to_kind(Kind::Double) * lengths;
    let rounded = |x: &Tensor| x.to_kind(Kind::BFloat16).to_kind(Kind::Float);
    let kept = |x: &Tensor| {
        let found = independent(x, &basis(x), epsilons, rounding).unwrap();
        found.map_or_else(|| (0..x.size()[1]).collect(), |found| found.columns)
    };
    assert_eq!(kept(&rounded(&columns)), (0..32).collect::<Vec<_>>());
    // What the rounding of long columns leaves of their sum is no direction.
    let sum = columns.narrow(1, 0, 1) - columns.narrow(1, 1, 1);
    assert_eq!(kept(&rounded(&Tensor::cat(&[&columns, &sum], 1))), (0..32).collect::<Vec<_>>());
}
