//! Running means: linear interpolation, and two weights.

#![allow(clippy::inline_always)] // must be compiled inside its caller's instruction set

use crate::kernels::formula::Num;

/// `β·old + (1-β)·new`. Exactly `new` for β = 0, `old` for β = 1, and both where they are equal. The difference of the
/// two would lose the small one, or overflow: it is taken of products with the lighter weight.
#[derive(Clone, Copy, Debug)]
pub struct Lerp<V: Num> {
    /// The weight of what weighs less, at most a half.
    weight: V,
    /// True if what is old weighs less.
    towards_new: V::Flag,
}

impl<V: Num> Lerp<V> {
    /// With the decay rate of what is old.
    #[inline(always)]
    pub(in crate::kernels) fn keeping(beta: V::Wide) -> Self {
        let (half, one) = (V::Wide::of(0.5), V::Wide::of(1.0));
        let towards_new = half.ge(beta);
        Self { weight: V::narrow(V::Wide::select(towards_new, beta, one - beta)), towards_new }
    }

    /// With the share of what is new.
    #[inline(always)]
    pub(in crate::kernels) fn adding(share: V::Wide) -> Self {
        let (half, one) = (V::Wide::of(0.5), V::Wide::of(1.0));
        let towards_new = share.ge(half);
        Self { weight: V::narrow(V::Wide::select(towards_new, one - share, share)), towards_new }
    }

    /// The mean.
    #[inline(always)]
    pub(in crate::kernels) fn of(self, old: V, new: V) -> V {
        let (near, far) = (V::select(self.towards_new, new, old), V::select(self.towards_new, old, new));
        near + (self.weight * far - self.weight * near)
    }
}

/// The weights of a running mean with this decay rate, of what is old and of what is new: rounded each by itself.
#[inline(always)]
pub(in crate::kernels) fn weights<V: Num>(beta: V::Wide) -> [V; 2] {
    [beta, V::Wide::of(1.0) - beta].map(V::narrow)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::cpu::Real;

    fn check<C: Real>(unit: f64, most: f64) {
        let numbers = [0.3, -0.7, 1.0, 1e-9, -3e3, 1e7, -1e7, 1e19, most, -most];
        for (old, new) in numbers.iter().flat_map(|old| numbers.map(|new| (C::of(*old), C::of(new)))) {
            assert_eq!(Lerp::<C>::keeping(0.0).of(old, new), new);
            assert_eq!(Lerp::<C>::adding(1.0).of(old, new), new);
            assert_eq!(Lerp::<C>::keeping(1.0).of(old, new), old);
            assert_eq!(Lerp::<C>::adding(0.0).of(old, new), old);
            for beta in [1e-8, 0.1, 0.5, 0.6, 0.9, 0.999, 0.9999] {
                let share = 1.0 - beta;
                // With a share that was rounded, what is kept is not quite β.
                for (lerp, beta) in [(Lerp::<C>::keeping(beta), beta), (Lerp::adding(share), 1.0 - share)] {
                    let size = (beta * old.wide()).abs() + share * new.wide().abs();
                    let exact = beta * old.wide() + share * new.wide();
                    assert_eq!(lerp.of(old, old), old);
                    let off = (lerp.of(old, new).wide() - exact).abs();
                    assert!(off <= 3.0 * unit * size, "{beta} {old:?} {new:?}: {off} {size}");
                }
            }
        }
    }

    #[test]
    fn means_are_exact_at_both_ends_and_within_three_units_between() {
        check::<f32>(f64::from(f32::EPSILON), 3.4e38);
        check::<f64>(f64::EPSILON, 1e300);
    }
}
