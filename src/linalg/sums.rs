//! Products that are summed up over parts of their inner dimension, by tiles of our own.
//!
//! W = matrix `[m, w]`, V = matrix `[n, w]`: parts of the columns of larger ones.

use tch::{Device, Kind, Tensor};

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

/// Passes parts `[d, w]` of the columns of `A` to `work` in float64, one after the other, of about `bytes` bytes, so that the
/// whole matrix is never copied. The flag is true if a part is stored as its transpose. On a device there is one part.
pub(super) fn in_float64(
    a_de: &Tensor,
    bytes: i64,
    mut work: impl FnMut(&Tensor, bool) -> Result<()>,
) -> Result<()> {
    let (d, e) = a_de.size2()?;
    if on_device() || a_de.device() != Device::Cpu {
        return work(&a_de.f_to_kind(Kind::Double)?, false);
    }
    let most = (bytes / (8 * d.max(1))).max(1);
    // Parts of about one size.
    let parts = ((e + most - 1) / most).max(1);
    let width = (e + parts - 1) / parts;
    // The elements of a part have the order of those of A.
    let turned = a_de.stride()[0] == 1;
    let room = Tensor::f_empty([d * width], (Kind::Double, Device::Cpu))?;
    for first in (0..e).step_by(usize::try_from(width).unwrap_or(1).max(1)) {
        let w = width.min(e - first);
        let flat = room.f_narrow(0, 0, d * w)?;
        let mut part_dw = if turned { flat.f_view([w, d])?.f_tr()? } else { flat.f_view([d, w])? };
        part_dw.f_copy_(&a_de.f_narrow(1, first, w)?)?;
        work(&part_dw, turned)?;
    }
    Ok(())
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
