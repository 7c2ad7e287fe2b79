//! Passes that sum something up, copies and messages, against loops in float64.

use oxidion_miri::kernels::{
    Copy, Factors, GradientSquares, Job, Lamb, LambNorms, Messages, Momentum, MomentumSquares, Residual,
    ScaledApply, Scales, Stack, SumOfSquares, UpdateSquares, WideSquares, copy, fold, fold_on_cpu,
    fold_units, gaussian, measured_squares, move_down, only_zeros, rows, stream, sum,
};
use oxidion_miri::numbers::{FLOATS, Memory, assert_near, assert_within, with_threads};
use oxidion_miri::tensor::{Blocks, DType, Encoding, FlatViewMut};
use oxidion_miri::threads;

fn squared(numbers: &[f64]) -> f64 {
    numbers.iter().map(|x| x * x).sum()
}

#[test]
fn squares_of_jobs_and_of_units_are_summed() {
    for dtype in FLOATS {
        let x = [70, 1, 18].map(|len| Memory::random(dtype, len, len));
        let own = x.each_ref().map(|x| 0.25 * squared(&x.numbers()));
        let job = |at: usize| Job { read: [x[at].view()], write: [] };
        let pass = SumOfSquares { factor: -0.5 };
        let mut sums = Memory::new(DType::F64, 3);
        let mut places: Vec<_> = sums.view_mut().chunks(1).collect();
        fold(&pass, &mut [job(0), job(1), job(2)], &mut places).unwrap();
        assert!(fold(&pass, &mut [job(0)], &mut places).is_err());
        assert_within(&sums.numbers(), &own, 1e-5, "sums of jobs");

        let mut sums = Memory::new(DType::F64, 2);
        let mut places: Vec<_> = sums.view_mut().chunks(1).collect();
        fold_units(&pass, vec![vec![job(0), job(2)], vec![job(1)]], &mut places).unwrap();
        assert_within(&sums.numbers(), &[own[0] + own[2], own[1]], 1e-5, "sums of units");

        let wide = fold_on_cpu(&WideSquares, &mut [job(0), job(1)]);
        assert_within(&[wide[0][0], wide[1][0]], &[4.0 * own[0], 4.0 * own[1]], 1e-12, "wide");
        assert_within(&[measured_squares(&x[0].view()).unwrap()], &[4.0 * own[0]], 1e-12, "measured");
        assert!(!only_zeros(&x[0].view()) && only_zeros(&Memory::filled(dtype, 9, 0.0).view()));
    }
}

/// A sum that several threads have parts of: more elements than a piece.
#[test]
#[ignore = "takes Miri a minute"]
fn squares_of_many_elements_are_summed_by_several_threads() {
    let (short, long) = (Memory::filled(DType::F32, 40, 0.5), Memory::filled(DType::F32, 65_536 + 30, -2.0));
    with_threads(&[3], |_| {
        let mut jobs = [&short, &long].map(|x| Job { read: [x.view()], write: [] });
        assert_eq!(fold_on_cpu(&WideSquares, &mut jobs), [[10.0], [4.0 * 65_566.0]]);
    });
}

#[test]
fn momentum_and_lamb_sum_the_squares_of_what_they_compute() {
    let len = 35;
    for (dtype, stored) in [(DType::F32, DType::F32), (DType::F32, DType::BF16), (DType::F64, DType::F64)] {
        let (g, mut m, mut u) =
            (Memory::random(dtype, len, 1), Memory::random(dtype, len, 2), Memory::new(stored, len));
        let expected: Vec<f64> = m.numbers().iter().zip(g.numbers()).map(|(m, g)| 0.5 * m + g).collect();
        let pass =
            MomentumSquares { momentum: Momentum { mu: 0.5, grad_factor: 1.0, nesterov: false }, stored };
        let job = Job { read: [g.view()], write: [m.view_mut(), u.view_mut()] };
        let [[found]] = fold_on_cpu(&pass, &mut [job])[..] else { panic!("one job has one sum") };
        assert_near(&u, &expected, "momentum");
        assert_within(&[found], &[squared(&u.numbers())], 1e-12, "of what is stored");

        let lamb = Lamb {
            beta1: 0.5,
            blend: 0.5,
            beta2: 0.75,
            epsilon: 0.5,
            weight_decay: 0.25,
            cautious: false,
            factors: Factors::known(vec![[2.0, 0.5, 1.0, 1.0]]),
        };
        let (x, v) = (Memory::random(dtype, len, 3), Memory::filled(dtype, len, 0.25));
        let (x_numbers, m_numbers, g_numbers) = (x.numbers(), m.numbers(), g.numbers());
        let mut all = [0.0; 2];
        for at in 0..len {
            let moment = 0.5 * m_numbers[at] + 0.5 * g_numbers[at];
            let second = 0.75 * 0.25 + 0.25 * g_numbers[at] * g_numbers[at];
            let along = 2.0 * moment / (0.5 * second.sqrt() + 0.5) + 0.25 * x_numbers[at];
            all = [all[0] + x_numbers[at] * x_numbers[at], all[1] + along * along];
        }
        let read = Job { read: [x.view(), g.view(), m.view(), v.view()], write: [] };
        let alone = fold_on_cpu(&LambNorms::<false>(&lamb), &mut [read]);
        let (mut kept, mut second) = (m.clone(), v.clone());
        let write = Job { read: [x.view(), g.view()], write: [kept.view_mut(), second.view_mut()] };
        let stored = fold_on_cpu(&LambNorms::<true>(&lamb), &mut [write]);
        assert_within(&alone[0], &all, 1e-5, "lamb");
        assert_eq!(alone, stored);
        let moments: Vec<f64> = m_numbers.iter().zip(&g_numbers).map(|(m, g)| 0.5 * m + 0.5 * g).collect();
        assert_near(&kept, &moments, "first moment");
    }
}

/// Memory for the sums of a stack of matrices: by row, by column, of each matrix, and one of all.
fn sums([stack, rows, cols]: [usize; 3]) -> [Memory; 4] {
    [stack * rows, stack * cols, stack, 1].map(|len| Memory::new(DType::F64, len))
}

fn stack_of<'a, const R: usize, const W: usize>(
    operands: Job<'a, R, W>,
    [stack, rows, cols]: [usize; 3],
    sums: &'a mut [Memory; 4],
) -> Stack<'a, R, W> {
    let [row_sums, col_sums, all_sums, total] = sums.each_mut().map(Memory::view_mut);
    Stack { operands, stack, rows, cols, row_sums, col_sums, all_sums, total }
}

#[test]
fn squares_are_summed_by_row_and_column_of_each_matrix() {
    for (dtype, shape @ [stack, height, width]) in [
        (DType::F32, [2, 5, 19]),
        (DType::BF16, [1, 7, 3]),
        (DType::F64, [3, 1, 20]),
        (DType::F16, [1, 1, 530]),
    ] {
        let len = stack * height * width;
        let (g, x) = (Memory::random(dtype, len, 1), Memory::random(DType::F32, len, 2));
        let mut found = sums(shape);
        let operands = Job { read: [g.view(), x.view()], write: [] };
        let job = stack_of(operands, shape, &mut found);
        rows::<2, 2, 0, _>(&GradientSquares { grad_factor: -0.5 }, &mut [job]).unwrap();
        let numbers = g.numbers();
        let mut expected = [stack * height, stack * width, stack].map(|len| vec![0.0; len]);
        for (at, g) in numbers.iter().enumerate() {
            let (matrix, row, col) = (at / (height * width), at / width, at % width);
            let square = 0.25 * g * g;
            expected[0][row] += square;
            expected[1][matrix * width + col] += square;
            expected[2][matrix] += square;
        }
        for (found, expected) in found.iter().zip(&expected) {
            assert_within(&found.numbers(), expected, 1e-5, "sums");
        }
        assert_within(&found[3].numbers(), &[squared(&x.numbers())], 1e-5, "total");
    }
}

/// Two parts of one matrix, which threads share, and a whole one. The rows are read only, all the same.
#[test]
#[ignore = "takes Miri a minute"]
fn rows_of_a_large_matrix_are_summed_by_several_threads() {
    let (shape, small) = ([1, 2, 65_536], [1, 1, 2]);
    let (g, other) = (Memory::filled(DType::F32, 131_072, 0.5), Memory::filled(DType::F32, 2, -1.0));
    with_threads(&[3], |_| {
        let (mut found, mut of_small) = (sums(shape), sums(small));
        let one = stack_of(Job { read: [g.view()], write: [] }, shape, &mut found);
        let other = stack_of(Job { read: [other.view()], write: [] }, small, &mut of_small);
        rows::<1, 1, 0, _>(&GradientSquares { grad_factor: 2.0 }, &mut [one, other]).unwrap();
        assert_eq!(found[0].numbers(), [65_536.0; 2]);
        assert!(found[1] == Memory::filled(DType::F64, 65_536, 2.0));
        assert_eq!(found[2].numbers(), [131_072.0]);
        assert_eq!(of_small.map(|sums| sums.numbers()), [vec![8.0], vec![4.0; 2], vec![8.0], vec![0.0]]);
    });
}

#[test]
fn factored_moments_scale_an_update_that_is_applied() {
    let (height, width) = (3, 17);
    let len = height * width;
    for (param, grad) in [(DType::F32, DType::F32), (DType::BF16, DType::F32), (DType::F64, DType::F32)] {
        let (mut x, g) = (Memory::random(param, len, 1), Memory::random(grad, len, 2));
        let positive = |len: usize, seed: usize| {
            let numbers = Memory::random(DType::F64, len, seed).numbers();
            Memory::of(DType::F64, &numbers.iter().map(|x| x * x + 0.25).collect::<Vec<_>>())
        };
        let (by_row, by_col, all) = (positive(height, 3), positive(width, 4), positive(1, 5));
        let scales = [Scales::of([by_row.view(), by_col.view(), all.view()])];
        let scale = |at: usize| {
            let product = by_row.numbers()[at / width] * by_col.numbers()[at % width];
            (all.numbers()[0] / product).sqrt()
        };
        let updates: Vec<f64> = g.numbers().iter().enumerate().map(|(at, g)| g * scale(at)).collect();
        let shape = [1, height, width];
        let mut found = sums(shape);
        let mut job = stack_of(Job { read: [g.view()], write: [] }, shape, &mut found);
        (job.row_sums, job.col_sums) = (FlatViewMut::EMPTY, FlatViewMut::EMPTY);
        job.all_sums = FlatViewMut::EMPTY;
        rows::<1, 1, 0, _>(&UpdateSquares { scales: &scales, grad_factor: 2.0 }, &mut [job]).unwrap();
        assert_within(&found[3].numbers(), &[4.0 * squared(&updates)], 1e-5, "update");

        let m = Memory::random(param, len, 6);
        let factors = Factors::known(vec![[0.5, 0.125]]);
        let pass = Residual { scales: &scales, factors: &factors, beta1: 0.75 };
        let mut found = sums(shape);
        let job = stack_of(Job { read: [g.view(), m.view()], write: [] }, shape, &mut found);
        rows::<2, 2, 0, _>(&pass, &mut [job]).unwrap();
        let away: Vec<f64> = updates.iter().zip(m.numbers()).map(|(u, m)| 0.75 * (0.5 * u - m)).collect();
        assert_within(&found[2].numbers(), &[squared(&away)], 1e-5, "residual");

        let old = x.numbers();
        let expected: Vec<f64> = old.iter().zip(&updates).map(|(x, u)| 0.875 * x - 0.5 * u).collect();
        let pass = ScaledApply { scales: &scales, factors: &factors, cautious: false, beta1: 0.0 };
        let mut unused = sums(shape);
        let mut job = stack_of(Job { read: [g.view()], write: [x.view_mut()] }, shape, &mut unused);
        (job.row_sums, job.col_sums) = (FlatViewMut::EMPTY, FlatViewMut::EMPTY);
        (job.all_sums, job.total) = (FlatViewMut::EMPTY, FlatViewMut::EMPTY);
        rows::<2, 1, 1, _>(&pass, &mut [job]).unwrap();
        assert_near(&x, &expected, "applied");
    }
}

/// Rows that are blocks of quantized values, which are read and written tile by tile.
#[test]
fn quantized_rows_are_averaged() {
    let (height, width) = (2, 20);
    let len = height * width;
    let (mut x, g) = (Memory::random(DType::F32, len, 1), Memory::random(DType::F32, len, 2));
    let (mut quantized, mut scales) =
        (Memory::filled(DType::Q8, len, 127.0), Memory::filled(DType::F32, 2 * 2, 0.0));
    let encoding = Encoding::Blocks(Blocks { scales: scales.ptr(), width, block: 16, rounding: None });
    let by_row = Memory::filled(DType::F64, height, 1.0);
    let (by_col, all) = (Memory::filled(DType::F64, width, 1.0), Memory::filled(DType::F64, 1, 1.0));
    let same = [Scales::of([by_row.view(), by_col.view(), all.view()])];
    let factors = Factors::known(vec![[0.5, 0.0]]);
    let pass = ScaledApply { scales: &same, factors: &factors, cautious: false, beta1: 0.5 };
    let expected: Vec<f64> = x.numbers().iter().zip(g.numbers()).map(|(x, g)| x - 0.25 * g).collect();
    let mut unused = sums([1, height, width]);
    let operands = Job { read: [g.view()], write: [x.view_mut(), quantized.encoded(&encoding)] };
    let mut job = stack_of(operands, [1, height, width], &mut unused);
    (job.row_sums, job.col_sums) = (FlatViewMut::EMPTY, FlatViewMut::EMPTY);
    (job.all_sums, job.total) = (FlatViewMut::EMPTY, FlatViewMut::EMPTY);
    rows::<3, 1, 2, _>(&pass, &mut [job]).unwrap();
    assert_near(&x, &expected, "applied");
    let largest = |range: std::ops::Range<usize>| {
        g.numbers()[range].iter().fold(0.0_f64, |most, g| most.max(0.25 * g.abs()))
    };
    let expected = [largest(0..16), largest(16..20), largest(20..36), largest(36..40)];
    assert_within(&scales.numbers(), &expected, 1e-7, "scales");
}

#[test]
fn rectangles_and_runs_are_copied() {
    for dtype in FLOATS {
        let (from, mut to) = (Memory::random(dtype, 40, 1), Memory::filled(dtype, 50, 0.0));
        let (low, high) = to.view_mut().split_at(30);
        let copies = vec![
            Copy { from: from.view().matrix(3, [4, 5], 9), to: low.into_matrix(1, [4, 5], 7) },
            Copy::run(from.view().part(11, 13), high),
        ];
        copy(copies).unwrap();
        let (numbers, mut expected) = (from.numbers(), vec![0.0; 50]);
        for at in 0..20 {
            expected[1 + at / 5 * 7 + at % 5] = numbers[3 + at / 5 * 9 + at % 5];
        }
        expected[30..43].copy_from_slice(&numbers[11..24]);
        assert_eq!(to.numbers(), expected);
        move_down(&mut to.view_mut(), &[[30, 2, 13], [43, 15, 7], [15, 15, 0], [20, 19, 30]]).unwrap();
        expected.copy_within(30..43, 2);
        expected.copy_within(43..50, 15);
        expected.copy_within(20..50, 19);
        assert_eq!(to.numbers(), expected);
    }
}

/// Enough elements for threads to share the copies: pages of one buffer, each copied by one thread.
#[test]
fn large_copies_are_shared_by_threads() {
    let half = 1 << 17;
    let from = Memory::filled(DType::F16, 2 * half, 1.5);
    with_threads(&[3], |_| {
        let mut to = Memory::new(DType::F16, 2 * half);
        let (low, high) = to.view_mut().split_at(half);
        let copies = vec![Copy::run(from.view().part(half, half), low), Copy::run(from.view(), high)];
        copy(copies).unwrap();
        assert!(to == from);
    });
}

#[test]
fn messages_of_ranks_are_summed() {
    for (message, out) in [(DType::F32, DType::F32), (DType::BF16, DType::F64), (DType::F16, DType::BF16)] {
        // Of the first one two tiles.
        let len = if message == DType::F32 { 520 } else { 20 };
        let (pitch, count) = (len + 3, 3);
        let (all, mut to) = (Memory::random(message, pitch * count, 1), Memory::new(out, len));
        sum(&Messages { all: all.view(), pitch, count }, 1.0 / 3.0, to.view_mut()).unwrap();
        let numbers = all.numbers();
        let mut expected = vec![0.0; len];
        for at in 0..len {
            expected[at] = (numbers[at] + numbers[pitch + at] + numbers[2 * pitch + at]) / 3.0;
        }
        assert_near(&to, &expected, "mean");
    }
}

#[test]
fn normal_numbers_do_not_depend_on_what_a_stream_is_split_into() {
    let key = stream([7, 1, 3], 5);
    let mut whole = vec![0.0_f32; 200];
    gaussian(&mut whole, key, 1);
    let mean = whole.iter().sum::<f32>() / 200.0;
    let variance = whole.iter().map(|x| (x - mean) * (x - mean)).sum::<f32>() / 200.0;
    // Five standard errors.
    assert!(mean.abs() < 0.36 && (variance - 1.0).abs() < 0.5, "{mean} {variance}");
    let mut part = vec![0.0_f32; 71];
    gaussian(&mut part, key, 64);
    assert_eq!(part, whole[63..134]);
}

#[test]
#[ignore = "takes Miri a minute"]
fn normal_numbers_are_made_by_several_threads() {
    let key = stream([7, 1, 3], 5);
    with_threads(&[2], |_| {
        // Two tasks have the parts.
        let mut long = vec![f32::NAN; (1 << 14) + 5];
        gaussian(&mut long, key, 1);
        for start in [0, 1 << 13, (1 << 14) - 5] {
            let mut part = [0.0; 10];
            gaussian(&mut part, key, 1 + start as u64);
            assert_eq!(long[start..start + 10], part);
        }
    });
}

/// Every thread that works on a piece has jobs of its own in it.
#[test]
fn sums_of_a_thread_inside_of_a_team_are_its_own() {
    let x = Memory::random(DType::F32, 50, 1);
    with_threads(&[3], |_| {
        let found = threads::map(5, |i| {
            let mut jobs = [Job { read: [x.view().part(0, 10 * (i + 1))], write: [] }];
            fold_on_cpu(&WideSquares, &mut jobs)[0][0]
        });
        let numbers = x.numbers();
        let expected: Vec<f64> = (1..6).map(|i| squared(&numbers[..10 * i])).collect();
        assert_within(&found, &expected, 1e-12, "sums");
    });
}
