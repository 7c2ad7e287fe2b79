//! The steps of a polynomial, applied to one matrix or a group in the standard or the Gram form.

use super::coefficients::Polynomial;
use super::products::Products;
use crate::error::Result;

/// One step in terms of `Y`: `Y <- linear Y + gamma (ratio G + square G G) Y` with `G = Y Yᵀ`.
pub(super) struct Step {
    pub(super) linear: f64,
    pub(super) ratio: f64,
    pub(super) square: bool,
    pub(super) gamma: f64,
}

/// Steps of `polynomial` for the scaled iterate, and the scale `s` of its first argument.
///
/// With `X = s Y` and `X' = s' Y'`, `Y' = (s/s') (a Y + b s² G Y + c s⁴ G² Y)`; `s/s' = 2^e / a` makes the
/// first coefficient a power of two. Going backwards from `s = 1`, `e` is chosen to keep `s` within a factor
/// √2 of 1.
pub(super) fn plan(polynomial: &Polynomial) -> (Vec<Step>, f64) {
    let mut scale = 1.0;
    let mut steps = Vec::with_capacity(polynomial.rows.len());
    for &[a, b, c] in polynomial.rows.iter().rev() {
        let after: f64 = scale;
        // A coefficient without logarithm is rounded like the others are.
        let linear = if a > 0.0 { (a / after).log2().round().exp2() } else { a };
        scale = if a > 0.0 { after * linear / a } else { after };
        let cubic = scale.powi(3) * b / after;
        let quintic = scale.powi(5) * c / after;
        let square = quintic != 0.0;
        let (ratio, gamma) = if square { (cubic / quintic, quintic) } else { (cubic, 1.0) };
        steps.push(Step { linear, ratio, square, gamma });
    }
    steps.reverse();
    (steps, scale)
}

/// Applies the steps to a normalized matrix. `by`: where `S[0]` and `S[1]` are its Gram matrix and the square of that,
/// to be multiplied by the second and fourth power of this number.
pub(super) fn iterate(products: &mut impl Products, steps: &[Step], by: Option<f64>) -> Result<()> {
    for (i, step) in steps.iter().enumerate() {
        if let Some(by) = by.filter(|_| i == 0) {
            quadratic_of_both(products, step, step.gamma, by)?;
            products.apply(1, step.linear, 1.0)?;
        } else {
            products.gram(0)?;
            quadratic_and_apply(products, step, step.gamma, step.linear)?;
        }
    }
    Ok(())
}

/// `S[out] <- gamma (ratio S[0] + square S[0]²)`.
fn quadratic(products: &mut impl Products, out: usize, step: &Step, gamma: f64) -> Result<()> {
    if step.square {
        products.multiply(out, [0, 0], &[(step.ratio, 0)], gamma)
    } else {
        products.combine(out, 0.0, 0, gamma * step.ratio)
    }
}

/// `quadratic`, and `X <- (keep I + S[1]) X`.
fn quadratic_and_apply(products: &mut impl Products, step: &Step, gamma: f64, keep: f64) -> Result<()> {
    if step.square {
        return products.multiply_and_apply(1, [0, 0], &[(step.ratio, 0)], gamma, keep);
    }
    quadratic(products, 1, step, gamma)?;
    products.apply(1, keep, 1.0)
}

/// `quadratic` where `S[1] = S[0]²` is there already, for `by² S[0]`.
fn quadratic_of_both(products: &mut impl Products, step: &Step, gamma: f64, by: f64) -> Result<()> {
    let keep = if step.square { gamma * by.powi(4) } else { 0.0 };
    products.combine(1, keep, 0, gamma * step.ratio * by.powi(2))
}

/// Applies the steps as [`iterate`] does, in the Gram form.
pub(super) fn iterate_gram(
    products: &mut impl Products,
    steps: &[Step],
    restarts: &[usize],
    by: Option<f64>,
) -> Result<()> {
    // The Gram matrix, the factor of a step, the product of factors, and one to write to.
    const G: usize = 0;
    let (mut factor, mut product, mut free) = (1, 2, 3);
    let mut linear = 1.0;
    for (i, step) in steps.iter().enumerate() {
        let fresh = i == 0 || restarts.contains(&i);
        let last = i + 1 == steps.len() || restarts.contains(&(i + 1));
        let gamma = step.gamma / step.linear;
        // What the Gram matrix is still to be multiplied by.
        let mut scale = 1.0;
        linear *= step.linear;
        let keep = if last { std::mem::replace(&mut linear, 1.0) } else { linear };
        if let Some(by) = by.filter(|_| i == 0) {
            quadratic_of_both(products, step, gamma, by)?;
            scale = by * by;
            if last {
                products.apply(factor, keep, keep)?;
                continue;
            }
        } else {
            if fresh {
                products.gram(G)?;
            }
            if fresh && last {
                quadratic_and_apply(products, step, keep * gamma, keep)?;
                continue;
            }
            quadratic(products, factor, step, gamma)?;
        }
        if !last {
            // G <- l² (I + Z) G (I + Z).
            products.multiply(free, [G, factor], &[(1.0, G)], scale)?;
            products.multiply(G, [free, factor], &[(1.0, free)], step.linear * step.linear)?;
        }
        if fresh {
            // The product of one.
            std::mem::swap(&mut product, &mut factor);
            continue;
        }
        let sum = [(1.0, product), (1.0, factor)];
        if last {
            products.multiply_and_apply(free, [product, factor], &sum, keep, keep)?;
        } else {
            products.multiply(free, [product, factor], &sum, 1.0)?;
        }
        std::mem::swap(&mut product, &mut free);
    }
    Ok(())
}
