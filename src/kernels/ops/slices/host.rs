//! Sums of absolute values over rows or columns, in float64: which lines are the largest must not depend on how a matrix
//! is sharded.

use crate::kernels::cpu::lanes::LANES;
use crate::kernels::cpu::{Real, convert, isa};
use crate::spec::Side;
use crate::tensor::{DType, Element, FlatView, FlatViewMut, MatrixView, MatrixViewMut};
use crate::threads;

/// Elements of the rows that one task handles.
const PIECE: usize = 1 << 16;

/// The rows that each task handles: the same whatever the number of threads, so that sums do not depend on it.
pub(in crate::kernels) fn height([_, cols]: [usize; 2]) -> usize {
    (PIECE / cols.max(1)).max(1)
}

/// `sums[i] = Σ |x|` over row i or column i. `sums` is float64.
pub(in crate::kernels) fn absolute_sums(x: &MatrixView<'_>, side: Side, sums: &mut FlatViewMut<'_>) {
    let ([rows, _], height) = (x.shape(), height(x.shape()));
    let parts =
        (0..rows).step_by(height).map(|first| Part { x: Lines::Read(x.rows(first, height)), added: None });
    all_sums(parts.collect(), side, sums);
}

/// `x ← x + factor·g`, and `sums` as in `absolute_sums`, for x of the type in which is computed: float64 if g has it, else
/// float32.
pub(in crate::kernels) fn add_with_absolute_sums(
    g: &MatrixView<'_>,
    factor: f64,
    x: &mut MatrixViewMut<'_>,
    side: Side,
    sums: &mut FlatViewMut<'_>,
) {
    let height = height(x.shape());
    let parts = x.reborrow().into_groups(height).enumerate().map(|(part, x)| {
        let added = Some((g.rows(part * height, height), factor));
        Part { x: Lines::Written(x), added }
    });
    all_sums(parts.collect(), side, sums);
}

/// Rows of a matrix that are summed up.
enum Lines<'a> {
    Read(MatrixView<'a>),
    Written(MatrixViewMut<'a>),
}

/// Rows of a matrix, to which `factor · added` is added first if there is any.
struct Part<'a> {
    x: Lines<'a>,
    added: Option<(MatrixView<'a>, f64)>,
}

/// A part with its sums.
struct Sums<'p, 'a> {
    part: &'p mut Part<'a>,
    side: Side,
    found: Vec<f64>,
}

fn all_sums(mut parts: Vec<Part<'_>>, side: Side, sums: &mut FlatViewMut<'_>) {
    let mut tasks: Vec<_> = parts.iter_mut().map(|part| Sums { part, side, found: Vec::new() }).collect();
    threads::chunks(&mut tasks, 1, |_, tasks| {
        for task in tasks {
            let x = match &task.part.x {
                Lines::Read(x) => *x,
                Lines::Written(x) => x.view(),
            };
            task.found = vec![0.0; x.shape()[side.index()]];
            if x.dtype() == DType::F64 {
                isa::vectorised::<f64, _>(task);
            } else {
                isa::vectorised::<f32, _>(task);
            }
        }
    });
    let sums = sums.slice_mut::<f64>();
    sums.fill(0.0);
    let found = tasks.into_iter().map(|task| task.found);
    match side {
        Side::Rows => sums.iter_mut().zip(found.flatten()).for_each(|(sum, x)| *sum = x),
        Side::Cols => {
            for part in found {
                sums.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
            }
        }
    }
}

impl isa::Work for &mut Sums<'_, '_> {
    type Out = ();

    #[inline(always)]
    #[allow(clippy::inline_always)] // must be compiled inside its caller's instruction set
    fn run<C: Real>(self) {
        let Sums { part: Part { x, added }, side, found } = self;
        let mut add = |number: usize, x: &[C]| match side {
            Side::Rows => found[number] = absolute_sum(x),
            Side::Cols => found.iter_mut().zip(x).for_each(|(sum, x)| *sum += x.wide().abs()),
        };
        match x {
            Lines::Read(x) => {
                let mut xs = vec![C::default(); x.shape()[1]];
                for number in 0..x.shape()[0] {
                    add(number, numbers(&x.row(number), &mut xs));
                }
            }
            Lines::Written(x) => {
                let mut gs = vec![C::default(); x.shape()[1]];
                for (number, mut x) in x.reborrow().into_rows().enumerate() {
                    let x = x.slice_mut::<C>();
                    if let Some((g, factor)) = added {
                        let factor = C::of(*factor);
                        let g = numbers(&g.row(number), &mut gs);
                        x.iter_mut().zip(g).for_each(|(x, g)| *x = *x + factor * *g);
                    }
                    add(number, x);
                }
            }
        }
    }
}

/// The elements of a row in the type of the arithmetic: its own, or converted ones.
#[inline(always)]
#[allow(clippy::inline_always)] // inside its caller's instruction set
fn numbers<'a, C: Real>(row: &FlatView<'a>, buffer: &'a mut [C]) -> &'a [C] {
    if row.dtype() == <C as Element>::DTYPE {
        return row.slice::<C>();
    }
    convert::load(row, buffer);
    buffer
}

/// Σ |x|, in several sums at a time: one alone waits for each of its additions.
#[inline(always)]
#[allow(clippy::inline_always)] // inside its caller's instruction set
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
    use crate::kernels::cpu::Job;
    use crate::kernels::ops::momentum::Momentum;
    use crate::tensor::test_views::{view, view_mut};

    fn shape(t: &Tensor) -> [usize; 2] {
        [0, 1].map(|d| usize::try_from(t.size()[d]).unwrap())
    }

    fn matrix(t: &Tensor) -> MatrixView<'_> {
        view(t).matrix(0, shape(t), shape(t)[1])
    }

    #[test]
    fn one_pass_has_bits_of_an_addition_and_sums_of_its_result() {
        for (kind, grad_kind) in [
            (Kind::Float, Kind::Float),
            (Kind::Float, Kind::BFloat16),
            (Kind::Double, Kind::Double),
            (Kind::Double, Kind::Float),
        ] {
            for (rows, cols) in [(1, 1), (3, 700), (500, 333), (70, 2100)] {
                let random = |kind| Tensor::randn([rows, cols], (Kind::Float, Device::Cpu)).to_kind(kind);
                let (g, start) = (random(grad_kind), random(kind));
                let (separate, add) =
                    (start.copy(), Momentum { mu: 1.0, grad_factor: -0.3, nesterov: false });
                crate::kernels::cpu::run(&add, &mut [Job { read: [view(&g)], write: [view_mut(&separate)] }]);
                for (side, count) in [(Side::Rows, rows), (Side::Cols, cols)] {
                    for threads in [1, 3] {
                        threads::set(threads);
                        let sums = || Tensor::ones([count], (Kind::Double, Device::Cpu));
                        let (together, found, alone) = (start.copy(), sums(), sums());
                        let mut x = view_mut(&together).into_matrix(0, shape(&together), shape(&together)[1]);
                        add_with_absolute_sums(&matrix(&g), -0.3, &mut x, side, &mut view_mut(&found));
                        absolute_sums(&matrix(&together), side, &mut view_mut(&alone));
                        threads::set(1);
                        let what = format!("{kind:?} {grad_kind:?} {rows} {cols} {side:?} {threads}");
                        assert!(together.equal(&separate), "{what}");
                        assert!(found.equal(&alone), "{what}");
                        let dim = i64::from(side == Side::Rows);
                        let wide = separate.to_kind(Kind::Double).abs();
                        let expected = wide.sum_dim_intlist(dim, false, None::<Kind>);
                        assert!(found.allclose(&expected, 1e-13, 0.0, false), "{what}");
                    }
                }
            }
        }
    }
}
