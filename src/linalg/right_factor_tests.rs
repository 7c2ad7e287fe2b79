use tch::Device;

use super::super::basis::Size;
use super::*;

const ROUNDING: Rounding = Rounding { of: Size::Each, stored: 0.0 };

/// A matrix `[n, r]` of independent numbers.
fn numbers(n: i64, r: i64, seed: i64) -> Tensor {
    tch::manual_seed(seed);
    Tensor::randn([n, r], (Kind::Double, Device::Cpu))
}

/// The factor of columns by Gram-Schmidt, twice each.
fn gram_schmidt(x_nr: &Tensor) -> Tensor {
    let basis = x_nr.copy();
    for j in 0..x_nr.size()[1] {
        let (before, mut one) = (basis.narrow(1, 0, j), basis.narrow(1, j, 1));
        for _ in 0..2 {
            one.copy_(&(&one - before.mm(&before.tr().mm(&one))));
        }
        one.copy_(&(&one / one.norm()));
    }
    basis
}

fn assert_close(a: &Tensor, b: &Tensor, bound: f64) {
    let off = f64::try_from((a - b).abs().max()).unwrap();
    assert!(off < bound, "{off}");
}

#[test]
fn live_columns_are_factored_in_order_with_positive_diagonal() {
    for (n, r) in [(9, 4), (6, 6), (5, 1)] {
        let each = [numbers(n, r, 1), numbers(n, r, 2)];
        let mut all = Tensor::stack(&each, 0);
        right_factor(&mut all, &Tensor::ones([2, r], (Kind::Float, Device::Cpu)), ROUNDING).unwrap();
        for (i, x) in (0..).zip(&each) {
            assert_close(&all.select(0, i), &gram_schmidt(x), 1e-13);
        }
    }
}

#[test]
fn dead_columns_stay_out_and_lose_what_they_have_of_the_others() {
    for (n, r) in [(9, 4), (4, 4)] {
        let x = numbers(n, r, 3);
        let mut all = x.unsqueeze(0).copy();
        let live = Tensor::from_slice(&[0.0_f32, 2.0, 0.0, 0.5]).view([1, 4]);
        right_factor(&mut all, &live, ROUNDING).unwrap();
        let new = all.select(0, 0);
        let basis = gram_schmidt(&x.index_select(1, &Tensor::from_slice(&[1_i64, 3])));
        assert_close(&new.index_select(1, &Tensor::from_slice(&[1_i64, 3])), &basis, 1e-13);
        for j in [0, 2] {
            let old = x.narrow(1, j, 1);
            let rest = &old - basis.mm(&basis.tr().mm(&old));
            assert_close(&new.narrow(1, j, 1), &(&rest / rest.norm()), 1e-12);
        }
    }
}

#[test]
fn columns_without_a_direction_of_their_own_do_not_vanish() {
    let x = numbers(8, 3, 4);
    let live = |flags: [f32; 3]| Tensor::from_slice(&flags).view([1, 3]);
    // No column is live.
    let mut all = x.unsqueeze(0).copy();
    right_factor(&mut all, &live([0.0; 3]), ROUNDING).unwrap();
    assert_eq!(all.select(0, 0), x);
    // A live one depends on the first; a dead one lies in the span of the live ones.
    x.narrow(1, 1, 1).copy_(&(x.narrow(1, 0, 1) * 3.0));
    let mut all = x.unsqueeze(0).copy();
    right_factor(&mut all, &live([1.0, 1.0, 1.0]), ROUNDING).unwrap();
    let first = all.narrow(2, 0, 1);
    assert_close(&all.narrow(2, 1, 1), &first, 1e-14);
    let mut all = x.unsqueeze(0).copy();
    right_factor(&mut all, &live([1.0, 0.0, 1.0]), ROUNDING).unwrap();
    assert_eq!(all.select(0, 0).narrow(1, 1, 1), x.narrow(1, 1, 1));
}

#[test]
fn a_matrix_that_is_not_finite_disturbs_no_other() {
    let mut all = Tensor::stack(&[numbers(7, 2, 5), numbers(7, 2, 6)], 0);
    let _ = all.select(0, 0).narrow(0, 0, 1).fill_(f64::NAN);
    right_factor(&mut all, &Tensor::ones([2, 2], (Kind::Float, Device::Cpu)), ROUNDING).unwrap();
    assert!(bool::try_from(all.select(0, 0).isnan().all()).unwrap());
    assert_close(&all.select(0, 1), &gram_schmidt(&numbers(7, 2, 6)), 1e-13);
}
