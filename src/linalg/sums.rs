//! Products that are summed up over parts of their inner dimension, by tiles of our own.
//!
//! W = matrix `[m, w]`, V = matrix `[n, w]`: parts of the columns of larger ones.

use tch::{Device, Tensor};

use super::views;
use crate::error::Result;
use crate::kernels::{Kernel, Operand, Outcome, Product, Side, on_device};
use crate::tensor::DType;

/// `Σ W Vᵀ` over parts, with memory for the panels of both.
pub(super) struct Sums {
    kernel: Kernel,
    panels: [Tensor; 2],
}

impl Sums {
    /// Sums in float64 for matrices on the CPU, where tiles are faster than libtorch's products.
    pub(super) fn in_float64(device: Device) -> Result<Option<Self>> {
        let here = device == Device::Cpu && !on_device();
        let kernel = Kernel::of(DType::F64).filter(|kernel| here && kernel.outruns_library());
        kernel.map(Self::by).transpose()
    }

    fn by(kernel: Kernel) -> Result<Self> {
        let none = || Tensor::f_empty([0], (kernel.dtype().kind(), Device::Cpu));
        Ok(Self { kernel, panels: [none()?, none()?] })
    }

    /// `out <- keep out + W Wᵀ` for a symmetric `out` `[m, m]`.
    pub(super) fn square(&mut self, out: &mut Tensor, w: &Tensor, keep: f64) -> Result<()> {
        self.run(out, [w, w], keep, Outcome::Symmetric)
    }

    /// `out <- keep out + W Vᵀ` for `out` `[m, n]`.
    pub(super) fn product(&mut self, out: &mut Tensor, w: &Tensor, v: &Tensor, keep: f64) -> Result<()> {
        self.run(out, [w, v], keep, Outcome::General)
    }

    fn run(&mut self, out: &mut Tensor, factors: [&Tensor; 2], keep: f64, outcome: Outcome) -> Result<()> {
        let kernel = self.kernel;
        let [left, right] = [operand(factors[0])?, operand(factors[1])?];
        for (panels, (side, operand)) in
            self.panels.iter_mut().zip([(Side::Left, &left), (Side::Right, &right)])
        {
            let elements = kernel.elements(side, operand.count, operand.inner);
            if panels.numel() < elements {
                let size = i64::try_from(elements).unwrap_or(i64::MAX);
                *panels = Tensor::f_empty([size], (kernel.dtype().kind(), Device::Cpu))?;
            }
        }
        let [mut left_panels, mut right_panels] = views::write_all(self.panels.each_mut())?;
        let size = [left.count, right.count, left.inner];
        let plain = Product::plain(views::write(out)?, size, right.count, outcome);
        let panels = [&mut left_panels, &mut right_panels];
        kernel.pack_and_multiply([&left, &right], panels, &mut Product { keep, ..plain })
    }
}

/// Operand for a matrix that is stored row by row or column by column.
fn operand(matrix: &Tensor) -> Result<Operand<'_>> {
    let [count, inner] = <[i64; 2]>::from(matrix.size2()?).map(|n| usize::try_from(n).unwrap_or(0));
    let (x, steps) = if matrix.is_contiguous() {
        (views::read(matrix)?, [inner, 1])
    } else {
        (views::read_turned(matrix)?, [1, count])
    };
    Ok(Operand { x: x.into(), count, inner, steps })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test may panic")]
mod tests {
    use tch::Kind;

    use super::*;

    #[test]
    fn sums_over_parts_are_the_products_of_whole_matrices() {
        let Some(kernel) = Kernel::of(DType::F64) else { return };
        tch::manual_seed(0);
        let random = |rows, cols| Tensor::randn([rows, cols], (Kind::Double, Device::Cpu));
        for [m, n, inner] in [[70, 33, 200], [1, 5, 4], [40, 2, 3]] {
            let (a, b) = (random(m, inner), random(n, inner));
            let half = inner / 2;
            for turned in [false, true] {
                let (mut sums, mut square, mut product) =
                    (Sums::by(kernel).unwrap(), random(m, m), random(m, n));
                for (first, keep) in [(0, 0.0), (half, 1.0)] {
                    let width = if first == 0 { half } else { inner - half };
                    let part = |x: &Tensor| {
                        let part = x.narrow(1, first, width);
                        if turned { part.tr().contiguous().tr() } else { part.contiguous() }
                    };
                    sums.square(&mut square, &part(&a), keep).unwrap();
                    sums.product(&mut product, &part(&a), &part(&b), keep).unwrap();
                }
                for (found, expected) in [(square, a.mm(&a.tr())), (product, a.mm(&b.tr()))] {
                    let error = f64::try_from((found - &expected).abs().max()).unwrap();
                    assert!(error < 1e-11, "{m} {n} {inner}: {error}");
                }
            }
        }
    }
}
