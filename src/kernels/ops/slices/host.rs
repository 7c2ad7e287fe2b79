//! Sums of absolute values over rows or columns, in float64: which lines are the largest must not depend on how a matrix
//! is sharded.

use crate::kernels::cpu::Real;
#[cfg(target_arch = "x86_64")]
use crate::kernels::cpu::isa::{self, Isa};
use crate::kernels::cpu::lanes::LANES;
use crate::spec::Side;
use crate::tensor::{DType, Element, FlatView, MatrixView};
use crate::threads;

/// Elements of the rows that one task handles.
const PIECE: usize = 1 << 16;

/// The rows that each task handles: the same whatever the number of threads, so that sums do not depend on it.
fn pieces([rows, cols]: [usize; 2]) -> Vec<(usize, usize)> {
    let step = (PIECE / cols.max(1)).max(1);
    (0..rows).step_by(step).map(|start| (start, step.min(rows - start))).collect()
}

/// Works on the rows of every piece, in parallel, and returns the results in order.
pub(in crate::kernels) fn in_pieces<T: Send>(
    shape: [usize; 2],
    work: impl Fn(usize, usize) -> T + Sync,
) -> Vec<T> {
    let pieces = pieces(shape);
    threads::map(pieces.len(), |i| work(pieces[i].0, pieces[i].1))
}

/// The elements of a matrix, to which `factor · added` may be added first.
struct Lines<'a> {
    x: &'a MatrixView,
    added: Option<(&'a MatrixView, f64)>,
    side: Side,
}

/// `sums[i] = Σ |x|` over row i or column i. `sums` is float64.
pub(in crate::kernels) fn absolute_sums(x: &MatrixView, side: Side, sums: &FlatView) {
    all_sums(&Lines { x, added: None, side }, sums);
}

/// `x ← x + factor·g`, and `sums` as in `absolute_sums`, for x of the type in which is computed: float64 if g has it, else
/// float32.
pub(in crate::kernels) fn add_with_absolute_sums(
    g: &MatrixView,
    factor: f64,
    x: &MatrixView,
    side: Side,
    sums: &FlatView,
) {
    all_sums(&Lines { x, added: Some((g, factor)), side }, sums);
}

fn all_sums(lines: &Lines<'_>, sums: &FlatView) {
    let parts = in_pieces(lines.x.shape(), |start, rows| {
        let count = [rows, lines.x.shape()[1]][lines.side.index()];
        let mut found = vec![0.0_f64; count];
        if lines.x.dtype() == DType::F64 {
            vectorised::<f64>(lines, start..start + rows, &mut found);
        } else {
            vectorised::<f32>(lines, start..start + rows, &mut found);
        }
        found
    });
    // SAFETY: the caller owns it for this stage.
    let sums = unsafe { sums.slice::<f64>() };
    sums.fill(0.0);
    match lines.side {
        Side::Rows => sums.iter_mut().zip(parts.into_iter().flatten()).for_each(|(sum, x)| *sum = x),
        Side::Cols => {
            for part in parts {
                sums.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
            }
        }
    }
}

/// The best instruction set that may be used.
fn vectorised<C: Real>(lines: &Lines<'_>, rows: std::ops::Range<usize>, found: &mut [f64]) {
    #[cfg(target_arch = "x86_64")]
    {
        let best = isa::best();
        if best >= Isa::Avx512 {
            // SAFETY: the processor has it.
            return unsafe { with_avx512::<C>(lines, rows, found) };
        }
        if best == Isa::Avx2 {
            // SAFETY: the processor has it.
            return unsafe { with_avx2::<C>(lines, rows, found) };
        }
    }
    body::<C>(lines, rows, found);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw")]
fn with_avx512<C: Real>(lines: &Lines<'_>, rows: std::ops::Range<usize>, found: &mut [f64]) {
    body::<C>(lines, rows, found);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn with_avx2<C: Real>(lines: &Lines<'_>, rows: std::ops::Range<usize>, found: &mut [f64]) {
    body::<C>(lines, rows, found);
}

#[inline(always)]
#[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
fn body<C: Real>(lines: &Lines<'_>, rows: std::ops::Range<usize>, found: &mut [f64]) {
    let cols = lines.x.shape()[1];
    let (mut xs, mut gs) = (vec![C::default(); cols], vec![C::default(); cols]);
    let first = rows.start;
    for row in rows {
        let flat = lines.x.row(row);
        let x = if flat.dtype() == <C as Element>::DTYPE {
            // SAFETY: the caller owns the matrices for this stage; this task alone has these rows.
            unsafe { flat.slice::<C>() }
        } else {
            crate::kernels::cpu::convert::load(&flat, &mut xs);
            &mut xs[..]
        };
        if let Some((g, factor)) = lines.added {
            let (flat, factor) = (g.row(row), C::of(factor));
            let g = if flat.dtype() == <C as Element>::DTYPE {
                // SAFETY: as above.
                &*unsafe { flat.slice::<C>() }
            } else {
                crate::kernels::cpu::convert::load(&flat, &mut gs);
                &gs[..]
            };
            x.iter_mut().zip(g).for_each(|(x, g)| *x = *x + factor * *g);
        }
        match lines.side {
            Side::Rows => found[row - first] = absolute_sum(x),
            Side::Cols => found.iter_mut().zip(&*x).for_each(|(sum, x)| *sum += x.wide().abs()),
        }
    }
}

/// Σ |x|, in several sums at a time: one alone waits for each of its additions.
#[inline(always)]
#[allow(clippy::inline_always)] // as above
fn absolute_sum<C: Real>(line: &[C]) -> f64 {
    let (parts, rest) = line.as_chunks::<LANES>();
    let mut sums = [0.0_f64; LANES];
    for part in parts {
        for j in 0..LANES {
            sums[j] += part[j].wide().abs();
        }
    }
    sums.iter().sum::<f64>() + rest.iter().map(|x| x.wide().abs()).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::*;
    use crate::kernels::ops::momentum::Momentum;

    fn area(t: &Tensor) -> MatrixView {
        let [rows, cols] = [0, 1].map(|d| usize::try_from(t.size()[d]).unwrap());
        FlatView::of(t).unwrap().area(0, [rows, cols], cols)
    }

    #[test]
    fn one_pass_has_the_bits_of_an_addition_and_sums_of_what_it_left() {
        for (kind, grad_kind) in [
            (Kind::Float, Kind::Float),
            (Kind::Float, Kind::BFloat16),
            (Kind::Double, Kind::Double),
            (Kind::Double, Kind::Float),
        ] {
            for (rows, cols) in [(1, 1), (3, 700), (500, 333), (70, 2100)] {
                let random = |kind| Tensor::randn([rows, cols], (Kind::Float, Device::Cpu)).to_kind(kind);
                let (g, start) = (random(grad_kind), random(kind));
                let (apart, add) = (start.copy(), Momentum { mu: 1.0, grad_factor: -0.3, nesterov: false });
                crate::kernels::cpu::run(&add, &[[area(&g).all(), area(&apart).all()]]);
                for (side, count) in [(Side::Rows, rows), (Side::Cols, cols)] {
                    for threads in [1, 3] {
                        threads::set(threads);
                        let sums = || Tensor::ones([count], (Kind::Double, Device::Cpu));
                        let (together, found, alone) = (start.copy(), sums(), sums());
                        let flat = |t: &Tensor| FlatView::of(t).unwrap();
                        add_with_absolute_sums(&area(&g), -0.3, &area(&together), side, &flat(&found));
                        absolute_sums(&area(&together), side, &flat(&alone));
                        threads::set(1);
                        let what = format!("{kind:?} {grad_kind:?} {rows} {cols} {side:?} {threads}");
                        assert!(together.equal(&apart), "{what}");
                        assert!(found.equal(&alone), "{what}");
                        let dim = i64::from(side == Side::Rows);
                        let wide = apart.to_kind(Kind::Double).abs();
                        let expected = wide.sum_dim_intlist(dim, false, None::<Kind>);
                        assert!(found.allclose(&expected, 1e-13, 0.0, false), "{what}");
                    }
                }
            }
        }
    }
}
