//! Operations on rows, columns and neurons of matrices, against loops in float64.

use oxidion_miri::kernels::{
    Apply, ChannelStep, Channels, Chosen, Columns, Kept, Limited, Neurons, Projected, Signs, Sliced,
    ThinProduct, absolute_sums, add_with_absolute_sums, apply_slices, channel_ratios, channel_squares,
    channel_steps, channel_totals, cholesky_qr, choose, clear_without_basis, divide_rows, multiply,
    neuron_squares, neuron_variance, normalize_columns, normalize_neurons, put_back, squares_and_scaled,
    stream, take,
};
use oxidion_miri::numbers::{Memory, assert_near, assert_within, random, with_threads};
use oxidion_miri::spec::Side;
use oxidion_miri::tensor::{DType, FlatViewMut, MatrixView, MatrixViewMut};

const ROWS: usize = 5;
const COLS: usize = 7;
/// Distance of the rows of a matrix with gaps.
const STRIDE: usize = 9;
const OFFSET: usize = 2;
const LEN: usize = OFFSET + (ROWS - 1) * STRIDE + COLS + 3;

fn matrix(memory: &Memory) -> MatrixView<'_> {
    memory.view().matrix(OFFSET, [ROWS, COLS], STRIDE)
}

fn matrix_mut(memory: &mut Memory) -> MatrixViewMut<'_> {
    memory.view_mut().into_matrix(OFFSET, [ROWS, COLS], STRIDE)
}

/// Place of an element of a matrix in its memory.
fn place(row: usize, col: usize) -> usize {
    OFFSET + row * STRIDE + col
}

/// Line and place within it of an element.
fn of_line(side: Side, row: usize, col: usize) -> (usize, usize) {
    if side == Side::Rows { (row, col) } else { (col, row) }
}

fn elements() -> impl Iterator<Item = (usize, usize)> {
    (0..ROWS).flat_map(|row| (0..COLS).map(move |col| (row, col)))
}

const SIDES: [(Side, usize); 2] = [(Side::Rows, ROWS), (Side::Cols, COLS)];
const MIXES: [[DType; 2]; 4] = [
    [DType::F32, DType::F32],
    [DType::F64, DType::BF16],
    [DType::BF16, DType::F32],
    [DType::F16, DType::F16],
];

#[test]
fn absolute_sums_of_lines_with_and_without_an_addition() {
    for [dtype, grad] in MIXES {
        for (side, count) in SIDES {
            let (mut x, g) = (Memory::random(dtype, LEN, 1), Memory::random(grad, LEN, 2));
            let sums = |numbers: &[f64]| {
                let mut sums = vec![0.0; count];
                elements().for_each(|(i, j)| sums[of_line(side, i, j).0] += numbers[place(i, j)].abs());
                sums
            };
            let mut found = Memory::new(DType::F64, count);
            absolute_sums(side, &mut [(matrix(&x), found.view_mut())]).unwrap();
            assert_within(&found.numbers(), &sums(&x.numbers()), 1e-12, "sums");

            let (mut expected, gradient) = (x.numbers(), g.numbers());
            let mut all = [(matrix(&g), matrix_mut(&mut x), found.view_mut())];
            let done = add_with_absolute_sums(side, -0.5, &mut all);
            assert_eq!(done, [DType::F32, DType::F64].contains(&dtype));
            if done {
                elements().for_each(|(i, j)| expected[place(i, j)] -= 0.5 * gradient[place(i, j)]);
                assert_within(&found.numbers(), &sums(&x.numbers()), 1e-12, "sums with an addition");
            }
            assert_near(&x, &expected, "added");
        }
    }
}

#[test]
fn the_largest_scores_are_chosen() {
    let scores =
        [Memory::of(DType::F64, &[0.5, 3.0, f64::NAN, 3.0, 7.0, -1.0]), Memory::random(DType::F64, 3, 1)];
    let mut chosen = [4, 5].map(|len| Memory::new(DType::F64, len));
    let mut all: Vec<_> = scores.iter().zip(&mut chosen).map(|(s, c)| (s.view(), c.view_mut())).collect();
    choose(3, &mut all).unwrap();
    assert_eq!(chosen[0].numbers(), [2.0, 3.0, 5.0, 0.0]);
    assert_eq!(chosen[1].numbers(), [1.0, 2.0, 3.0, 0.0, 0.0]);
}

#[test]
fn slices_are_taken_put_back_and_applied() {
    let numbers = Memory::of(DType::F64, &[2.0, 3.0, 5.0, 0.0]);
    let own = [1, 2, 4];
    with_threads(&[1, 3], |_| {
        for [dtype, other] in MIXES {
            for (side, _) in SIDES {
                let shape = if side == Side::Rows { [3, COLS] } else { [ROWS, 3] };
                let at = |row: usize, col: usize| {
                    let (line, within) = of_line(side, row, col);
                    let slice = own.iter().position(|own| *own == line)?;
                    Some(if side == Side::Rows { slice * COLS + within } else { within * 3 + slice })
                };
                let (mut x, mut u) = (Memory::random(dtype, LEN, 1), Memory::new(other, shape[0] * shape[1]));
                let all = |x: &mut Memory, u: &mut Memory, work: &dyn Fn(&mut [Sliced<'_>])| {
                    let (chosen, u) = (Chosen::packed(numbers.view()), u.view_mut());
                    work(&mut [Sliced { x: matrix_mut(x), chosen, u: u.into_matrix(0, shape, shape[1]) }]);
                };
                let (old, mut left) = (x.numbers(), x.numbers());
                let mut taken = vec![0.0; shape[0] * shape[1]];
                for (row, col) in elements() {
                    if let Some(to) = at(row, col) {
                        taken[to] = old[place(row, col)];
                        left[place(row, col)] *= 0.25;
                    }
                }
                all(&mut x, &mut u, &|all| take(side, 0.25, all).unwrap());
                assert_near(&x, &left, "what is left");
                assert_near(&u, &taken, "what is taken");

                let stored = u.numbers();
                for (row, col) in elements() {
                    left[place(row, col)] = at(row, col).map_or(left[place(row, col)], |from| stored[from]);
                }
                all(&mut x, &mut u, &|all| put_back(side, all).unwrap());
                assert_near(&x, &left, "what is back");

                let mut expected = x.numbers();
                for (row, col) in elements() {
                    expected[place(row, col)] *= 0.75;
                    if let Some(from) = at(row, col) {
                        expected[place(row, col)] -= 0.5 * stored[from];
                    }
                }
                let apply = Apply { rate: 0.5, decay: 0.25, cautious: false, late: false };
                all(&mut x, &mut u, &|all| apply_slices(side, &apply, all).unwrap());
                assert_near(&x, &expected, "applied");
            }
        }
    });
}

/// Columns of rows so long that each is a task.
#[test]
#[ignore = "takes Miri a minute"]
fn columns_of_long_rows_are_taken_by_several_threads() {
    let (cols, start) = (33_000, 0.5);
    let numbers = Memory::of(DType::F64, &[3.0, 32_999.0]);
    with_threads(&[3], |_| {
        let mut x = Memory::filled(DType::F32, 2 * cols, start);
        let mut u = Memory::new(DType::F32, 4);
        let (chosen, to) = (Chosen::packed(numbers.view()), u.view_mut().into_matrix(0, [2, 2], 2));
        let one = Sliced { x: x.view_mut().into_matrix(0, [2, cols], cols), chosen, u: to };
        take(Side::Cols, 3.0, &mut [one]).unwrap();
        assert_eq!(u.numbers(), [start; 4]);
        let mut expected = Memory::filled(DType::F32, 2 * cols, start);
        let mut view = expected.view_mut();
        for at in [2, 32_998, cols + 2, cols + 32_998] {
            view.slice_mut::<f32>()[at] = 1.5;
        }
        assert!(x == expected);
    });
}

#[test]
fn columns_are_normalized_and_dead_ones_keep_what_they_had() {
    let (rows, cols, own) = (6, 5, 1..4);
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        let mut numbers = random(rows * cols, 1);
        (0..rows).for_each(|row| numbers[row * cols + 2] = 0.0);
        let x = Memory::of(dtype, &numbers);
        let numbers = x.numbers();
        let (mut sums, mut scaled) = (Memory::new(DType::F64, cols), Memory::new(dtype, rows * cols));
        let columns = Columns { x: x.view(), sums: sums.view_mut(), scaled: scaled.view_mut() };
        squares_and_scaled(&mut [columns], -2.0).unwrap();
        let mut expected = vec![0.0; cols];
        numbers.iter().enumerate().for_each(|(at, x)| expected[at % cols] += x * x);
        assert_within(&sums.numbers(), &expected, 1e-12, "sums");
        assert_near(&scaled, &numbers.iter().map(|x| -2.0 * x).collect::<Vec<_>>(), "scaled");

        let mut q = Memory::random(DType::F32, rows * 4, 2);
        let (before, norms) = (q.numbers(), expected.iter().map(|s| s.sqrt() + 1e-3).collect::<Vec<_>>());
        let kept = q.view_mut().into_matrix(1, [rows, 3], 4);
        let columns = Columns { x: x.view(), sums: sums.view_mut(), scaled: scaled.view_mut() };
        normalize_columns(&mut [Kept { columns, q: kept, own: own.clone() }], 1e-3, 0.5, true).unwrap();
        let (mut of_q, mut of_scaled) = (before, vec![0.0; rows * cols]);
        for (at, x) in numbers.iter().enumerate() {
            let (row, col) = (at / cols, at % cols);
            if col != 2 {
                of_scaled[at] = 0.5 * x / norms[col];
                if own.contains(&col) {
                    of_q[1 + row * 4 + col - 1] = x / norms[col];
                }
            }
        }
        assert_near(&q, &of_q, "normalized");
        assert_near(&scaled, &of_scaled, "scaled by its norm");
    }
}

#[test]
fn neurons_are_normalized_by_their_running_squares() {
    // Two neurons of three elements in each row, and a column that no neuron has; one norm for all.
    let (per_row, length) = (2, 3);
    for [dtype, state] in MIXES {
        let (mut u, mut variance) =
            (Memory::random(dtype, ROWS * STRIDE, 1), Memory::filled(state, ROWS * per_row, 0.5));
        let (mut squares, mut totals) = (Memory::new(DType::F64, ROWS * per_row), Memory::new(DType::F64, 2));
        let old = u.numbers();
        let at = |neuron: usize, j: usize| neuron / per_row * STRIDE + neuron % per_row * length + j;
        let own: Vec<f64> = (0..ROWS * per_row)
            .map(|neuron| (0..length).map(|j| old[at(neuron, j)] * old[at(neuron, j)]).sum())
            .collect();
        let mut all = [Neurons {
            u: u.view_mut().into_matrix(0, [ROWS, per_row * length], STRIDE),
            chosen: None,
            length,
            group: ROWS * per_row,
            variance: variance.view_mut().into_matrix(0, [ROWS, per_row], per_row),
            squares: squares.view_mut(),
            totals: totals.view_mut(),
        }];
        neuron_squares(&mut all).unwrap();
        neuron_variance(0.75, length, &mut all).unwrap();
        normalize_neurons(&mut all).unwrap();
        assert_within(&squares.numbers(), &own, 1e-12, "squares");
        let running: Vec<f64> = own.iter().map(|s| 0.75 * 0.5 + 0.25 * s / 3.0).collect();
        assert_near(&variance, &running, "variance");
        let stored = variance.numbers();
        let sum: f64 = own.iter().sum();
        let scaled: f64 = own.iter().zip(&stored).map(|(s, v)| s / (v.sqrt() + 1e-8).powi(2)).sum();
        assert_within(&totals.numbers(), &[sum, scaled], 1e-12, "totals");
        let mut expected = old.clone();
        for (neuron, v) in stored.iter().enumerate() {
            let factor = (sum / scaled).sqrt() / (v.sqrt() + 1e-8);
            (0..length).for_each(|j| expected[at(neuron, j)] *= factor);
        }
        assert_near(&u, &expected, "normalized");
    }
}

#[test]
fn channels_have_factors_by_which_a_parameter_moves() {
    for ([dtype, grad], (side, count)) in MIXES.into_iter().zip(SIDES.into_iter().cycle()) {
        let (mut low, mut factors) =
            (Memory::random(DType::F32, 3 * count, 1), Memory::new(DType::F64, count));
        let shape = if side == Side::Rows { [count, 3] } else { [3, count] };
        let squares = |numbers: &[f64]| {
            let mut sums = vec![0.0; count];
            let line = |at: usize| if side == Side::Rows { at / 3 } else { at % count };
            numbers.iter().enumerate().for_each(|(at, x)| sums[line(at)] += x * x);
            sums
        };
        fn of(side: Side, factors: &mut Memory) -> Channels<'_> {
            Channels { side, factors: factors.view_mut(), norms: FlatViewMut::EMPTY }
        }
        let before = squares(&low.numbers());
        let projected = low.view_mut().into_matrix(0, shape, shape[1]);
        channel_squares(&mut [Projected { low: projected, channels: of(side, &mut factors) }]).unwrap();
        assert_within(&factors.numbers(), &before, 1e-12, "squares");
        let mut low = Memory::random(DType::F32, 3 * count, 2);
        let after = squares(&low.numbers());
        let projected = low.view_mut().into_matrix(0, shape, shape[1]);
        channel_ratios(-0.5, &mut [Projected { low: projected, channels: of(side, &mut factors) }]).unwrap();
        let ratios: Vec<f64> =
            after.iter().zip(&before).map(|(n, r)| n.sqrt() / (0.5 * r.sqrt() + 1e-8)).collect();
        assert_within(&factors.numbers(), &ratios, 1e-12, "ratios");

        let (mut x, g) = (Memory::random(dtype, LEN, 3), Memory::random(grad, LEN, 4));
        let mut total = Memory::new(DType::F64, 1);
        channel_totals(&mut [(of(side, &mut factors), matrix(&g), total.view_mut())]).unwrap();
        let (mut expected, gradient) = (x.numbers(), g.numbers());
        let scaled = |i: usize, j: usize| ratios[of_line(side, i, j).0] * gradient[place(i, j)];
        let norm: f64 = elements().map(|(i, j)| scaled(i, j) * scaled(i, j)).sum();
        assert_within(&total.numbers(), &[norm], 1e-12, "total");
        for (i, j) in elements() {
            expected[place(i, j)] = 0.75 * expected[place(i, j)] + 0.5 * 0.25 * scaled(i, j);
        }
        let mut last = Memory::filled(DType::F32, 1, 0.0);
        let one = Limited {
            channels: of(side, &mut factors),
            param: matrix_mut(&mut x),
            grad: matrix(&g),
            total: total.view(),
            last: last.view_mut(),
            rate: 0.25,
        };
        let step = ChannelStep { grad_factor: -0.5, decay: 0.25, cautious: false, late: false };
        channel_steps(&step, &mut [one]).unwrap();
        assert_near(&x, &expected, "moved");
        assert_near(&last, &[0.5 * norm.sqrt()], "norm");
    }
}

#[test]
fn products_with_signs_are_written_by_several_threads_column_by_column() {
    // Enough elements for threads to share the groups of columns.
    let ([d, w], s) = ([350, 49], 2);
    let signs = Signs::new([d, s], stream([1, 2, 3], 4), 3);
    let mut omega = vec![0.0; d * s];
    signs.write(&mut omega);
    let small = |len: usize| (0..len).map(|i| (i % 23) as f64 - 11.0).collect::<Vec<_>>();
    let a = small(d * w);
    let memory = Memory::of(DType::F64, &a);
    with_threads(&[3], |_| {
        let mut found = Memory::new(DType::F64, s * w);
        signs.product(found.view_mut(), &memory.view(), false);
        let mut expected = vec![0.0; s * w];
        for i in 0..d {
            for column in (0..s).filter(|column| omega[i * s + column] != 0.0) {
                let (sign, line, to) =
                    (omega[i * s + column], &a[i * w..(i + 1) * w], &mut expected[column * w..]);
                let mut at = 0;
                while at < w {
                    to[at] += sign * line[at];
                    at += 1;
                }
            }
        }
        assert_eq!(found.numbers(), expected);
    });
    let (a, mut found) = (small(20 * 19), Memory::new(DType::F64, 4 * 19));
    let signs = Signs::new([20, 4], stream([1, 2, 3], 4), 0);
    let mut omega = vec![0.0; 80];
    signs.write(&mut omega);
    signs.product(found.view_mut(), &Memory::of(DType::F64, &a).view(), true);
    let sum = |column: usize, at: usize| (0..20).map(|i| omega[i * 4 + column] * a[at * 20 + i]).sum();
    let expected: Vec<f64> = (0..4 * 19).map(|at| sum(at / 19, at % 19)).collect();
    assert_eq!(found.numbers(), expected);
}

#[test]
fn runs_without_a_basis_are_cleared_and_rows_divided() {
    let mut out = [Memory::random(DType::F32, 9, 1), Memory::random(DType::BF16, 9, 2)];
    let expected = out[0].numbers();
    let bases = [Memory::random(DType::F32, LEN, 3), Memory::filled(DType::F64, LEN, 0.0)];
    let mut all: Vec<_> =
        bases.iter().zip(&mut out).map(|(basis, out)| (matrix(basis), out.view_mut())).collect();
    clear_without_basis(&mut all).unwrap();
    assert_eq!(out.map(|out| out.numbers()), [expected, vec![0.0; 9]]);

    for (shape @ [rows, cols], dtype) in [([3, 5], DType::F32), ([5, 3], DType::BF16)] {
        let (mut x, gram) = (Memory::random(dtype, 15, 4), Memory::random(DType::F32, 9, 5));
        let sums: Vec<f64> = gram.numbers().chunks(3).map(|row| row.iter().map(|g| g.abs()).sum()).collect();
        let short = |at: usize| if rows > cols { at % cols } else { at / cols };
        let old = x.numbers();
        let expected: Vec<f64> =
            old.iter().enumerate().map(|(at, x)| x / (0.5 * sums[short(at)].sqrt())).collect();
        divide_rows(&mut x.view_mut(), shape, &gram.view(), 0.5);
        assert_near(&x, &expected, "divided");
    }
}

/// Matrices of faer over memory with gaps.
#[test]
fn small_products_and_bases_are_those_of_float64() {
    let (rows, cols, inner) = (6, 4, 3);
    for dtype in [DType::F32, DType::F64] {
        for (turned, keep) in [(false, 0.0), (true, 0.5)] {
            let left = Memory::random(dtype, 1 + 8 * 6, 1);
            let right = Memory::random(dtype, 2 + 8 * 6, 2);
            let mut out = Memory::random(dtype, 3 + 8 * 6, 3);
            let shape = if turned { [inner, rows] } else { [rows, inner] };
            let factor = |i: usize, p: usize| {
                let (row, col) = if turned { (p, i) } else { (i, p) };
                left.numbers()[1 + row * 8 + col]
            };
            let mut expected = out.numbers();
            for (i, j) in (0..rows).flat_map(|i| (0..cols).map(move |j| (i, j))) {
                let sum: f64 = (0..inner).map(|p| factor(i, p) * right.numbers()[2 + p * 8 + j]).sum();
                expected[3 + i * 8 + j] = keep * expected[3 + i * 8 + j] + sum;
            }
            multiply(&mut [ThinProduct {
                out: out.view_mut().into_matrix(3, [rows, cols], 8),
                left: (left.view().matrix(1, shape, 8), turned),
                right: (right.view().matrix(2, [inner, cols], 8), false),
                keep,
            }]);
            assert_near(&out, &expected, "product");
        }
        let mut x = Memory::random(dtype, 8 * 3, 4);
        assert_eq!(cholesky_qr(vec![x.view_mut()], 3, true, None), [true]);
        let q = x.numbers();
        for (i, j) in (0..3).flat_map(|i| (0..3).map(move |j| (i, j))) {
            let dot: f64 = (0..8).map(|row| q[row * 3 + i] * q[row * 3 + j]).sum();
            assert!((dot - f64::from(u8::from(i == j))).abs() < 1e-6, "{i} {j}: {dot}");
        }
    }
}
