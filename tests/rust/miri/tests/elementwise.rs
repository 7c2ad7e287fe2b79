//! Element-wise operations over several jobs, in all types, against loops in float64.

use oxidion_miri::kernels::{
    Accumulate, AdEMAMix, AdamW, Apply, Combine, Convert, Decay, Direction, Factors, Job, Lamb, Lion, Means,
    Momentum, NewShare, Release, Scale, Squares, Steps, count_steps, run, run_on_cpu,
};
use oxidion_miri::numbers::{FLOATS, Memory, assert_near, with_threads};
use oxidion_miri::tensor::DType;

/// Lengths of jobs: short ones are worked on in stretches of 64, with memory of the next one asked for.
const SIZES: [usize; 3] = [67, 1, 5];

/// Types of a parameter, of its gradient and of its states.
const MIXES: [[DType; 3]; 6] = [
    [DType::F32; 3],
    [DType::F64; 3],
    [DType::BF16, DType::BF16, DType::F32],
    [DType::F16, DType::F32, DType::F16],
    [DType::F32, DType::BF16, DType::BF16],
    [DType::F64, DType::F32, DType::F32],
];

/// Memory of one operand for each job.
fn operand(dtype: DType, seed: usize) -> [Memory; 3] {
    let mut seed = seed * SIZES.len();
    SIZES.map(|len| {
        seed += 1;
        Memory::random(dtype, len, seed)
    })
}

/// Numbers that are no less than 0.
fn squares(dtype: DType, seed: usize) -> [Memory; 3] {
    operand(dtype, seed).map(|x| Memory::of(dtype, &x.numbers().iter().map(|x| x * x).collect::<Vec<_>>()))
}

/// What a loop over the elements of all jobs makes of operands: `step` gets the job and the element of each.
fn loops<const N: usize>(
    operands: [&[Memory; 3]; N],
    step: impl Fn(usize, &mut [f64; N]),
) -> [[Vec<f64>; N]; 3] {
    std::array::from_fn(|job| {
        let mut numbers = operands.map(|x| x[job].numbers());
        let mut at = 0;
        while at < SIZES[job] {
            let mut element = [0.0; N];
            let mut operand = 0;
            while operand < N {
                element[operand] = numbers[operand][at];
                operand += 1;
            }
            step(job, &mut element);
            while operand > 0 {
                operand -= 1;
                numbers[operand][at] = element[operand];
            }
            at += 1;
        }
        numbers
    })
}

/// Compares operands with what the loops made of them.
fn assert_all<const N: usize>(found: [&[Memory; 3]; N], expected: &[[Vec<f64>; N]; 3], what: &str) {
    for (job, expected) in expected.iter().enumerate() {
        for (operand, expected) in expected.iter().enumerate() {
            assert_near(&found[operand][job], expected, &format!("{what}, job {job}, operand {operand}"));
        }
    }
}

/// Runs an operation on all jobs, with the operands that are read and those that are written.
macro_rules! run_all {
    ($op:expr, [$($read:ident),*], [$($write:ident),*]) => {{
        #[allow(unused_mut)]
        let mut jobs: Vec<_> = {
            $(let mut $read = $read.iter();)*
            $(let mut $write = $write.iter_mut();)*
            SIZES.iter().map(|_| Job {
                read: [$($read.next().unwrap().view()),*],
                write: [$($write.next().unwrap().view_mut()),*],
            }).collect()
        };
        run(&$op, &mut jobs).unwrap();
    }};
}

#[test]
fn lion() {
    for ([param, grad, state], cautious) in MIXES.into_iter().zip([false, true].into_iter().cycle()) {
        let (mut x, g, mut m) = (operand(param, 1), operand(grad, 2), operand(state, 3));
        let expected = loops([&x, &m, &g], |_, [x, m, g]| {
            let (gradient, blend) = (-0.5 * *g, 0.75 * *m + 0.25 * (-0.5 * *g));
            let kept = if cautious && *x * blend < 0.0 { *x } else { *x * 0.875 };
            *x = kept - 0.25 * if blend == 0.0 { 0.0 } else { blend.signum() };
            *m = 0.9 * *m + 0.1 * gradient;
        });
        let pass = Lion { lr: 0.25, beta1: 0.75, beta2: 0.9, decay: 0.125, cautious, grad_factor: -0.5 };
        run_all!(pass, [g], [x, m]);
        assert_all([&x, &m, &g], &expected, "lion");
    }
}

fn adamw(steps: [f64; 3], cautious: bool, late: bool) -> AdamW<'static> {
    let corrections = AdamW::corrections(0.25, [0.9, 0.99], steps.into_iter());
    AdamW {
        beta1: 0.9,
        beta2: 0.99,
        epsilon: 1e-3,
        decay: 0.125,
        cautious,
        late,
        grad_factor: 0.5,
        corrections,
        steps: Vec::new(),
    }
}

#[test]
fn adamw_with_and_without_the_largest_second_moment() {
    for (at, [param, grad, state]) in MIXES.into_iter().enumerate() {
        let (cautious, late, keeps_largest) = (at % 2 == 1, at % 3 == 1, at % 2 == 0);
        let (mut x, g, mut m) = (operand(param, 1), operand(grad, 2), operand(state, 3));
        let (mut v, mut largest) = (squares(state, 4), squares(state, 5));
        let steps = [1.0, 7.0, 7.0];
        let expected = loops([&x, &m, &v, &largest, &g], |job, [x, m, v, largest, g]| {
            let gradient = 0.5 * *g;
            *m = 0.9 * *m + 0.1 * gradient;
            *v = 0.99 * *v + 0.01 * gradient * gradient;
            let divisor = if keeps_largest { v.max(*largest) } else { *v };
            *largest = if keeps_largest { divisor } else { *largest };
            let corrected = (divisor / (1.0 - 0.99_f64.powf(steps[job]))).sqrt() + 1e-3;
            let step = 0.25 * (*m / (1.0 - 0.9_f64.powf(steps[job]))) / corrected;
            let decays = |x: f64| !cautious || *m * x >= 0.0;
            *x = match late {
                true if decays(*x - step) => (*x - step) * 0.875,
                true => *x - step,
                false if decays(*x) => *x * 0.875 - step,
                false => *x - step,
            };
        });
        let pass = adamw(steps, cautious, late);
        if keeps_largest {
            run_all!(pass, [g], [x, m, v, largest]);
        } else {
            run_all!(pass, [g], [x, m, v]);
        }
        assert_all([&x, &m, &v, &largest, &g], &expected, "adamw");
    }
}

#[test]
fn ademamix() {
    for ([param, grad, state], cautious) in MIXES.into_iter().zip([true, false].into_iter().cycle()) {
        let (mut x, g, mut fast) = (operand(param, 1), operand(grad, 2), operand(state, 3));
        let (mut slow, mut v) = (operand(state, 4), squares(state, 5));
        let steps = [2.0, 5.0, 11.0];
        let (beta3, warmup) = (0.999_f64, 8.0);
        let expected = loops([&x, &fast, &slow, &v, &g], |job, [x, fast, slow, v, g]| {
            let (gradient, t) = (0.5 * *g, steps[job] / warmup);
            let half_life = (1.0 - t) / 0.9_f64.ln() + t / beta3.ln();
            let (beta, alpha) = if t < 1.0 { ((1.0 / half_life).exp(), 5.0 * t) } else { (beta3, 5.0) };
            *fast = 0.9 * *fast + 0.1 * gradient;
            *slow = beta * *slow + (1.0 - beta) * gradient;
            *v = 0.99 * *v + 0.01 * gradient * gradient;
            let along = *fast / (1.0 - 0.9_f64.powf(steps[job])) + alpha * *slow;
            let step = 0.25 * along / ((*v / (1.0 - 0.99_f64.powf(steps[job]))).sqrt() + 0.1);
            let kept = if cautious && step * *x < 0.0 { *x } else { *x * 0.875 };
            *x = kept - step;
        });
        let pass = AdEMAMix {
            lr: 0.25,
            beta1: 0.9,
            beta2: 0.99,
            beta3,
            alpha: 5.0,
            warmup,
            epsilon: 0.1,
            decay: 0.125,
            cautious,
            grad_factor: 0.5,
            known: Vec::new(),
            steps: Vec::new(),
        };
        run_all!(pass.at(Steps::Counted(steps.to_vec())), [g], [x, fast, slow, v]);
        // A step is divided by 0.1 at least: what float32 rounds is ten times as large.
        let wide = |found: &[Memory; 3], at: usize, share: f64| {
            for (job, expected) in expected.iter().enumerate() {
                let (found, what) = (found[job].numbers(), format!("ademamix, job {job}, operand {at}"));
                oxidion_miri::numbers::assert_within(&found, &expected[at], share, &what);
            }
        };
        let share = match param {
            DType::F64 => 1e-12,
            DType::F32 => 2e-5,
            DType::F16 => 6e-4,
            _ => 5e-3,
        };
        wide(&x, 0, share);
        let [fast_only, slow_only, v_only] = [&fast, &slow, &v].map(|x| x.clone());
        let states: [[Vec<f64>; 3]; 3] = expected.each_ref().map(|all| [1, 2, 3].map(|at| all[at].clone()));
        assert_all([&fast_only, &slow_only, &v_only], &states, "ademamix");
    }
}

#[test]
fn momentum_and_what_is_taken_out_of_it() {
    for (at, [out, grad, state]) in MIXES.into_iter().enumerate() {
        let nesterov = at % 2 == 0;
        let (g, mut m, mut u) = (operand(grad, 1), operand(state, 2), operand(out, 3));
        let expected = loops([&m, &u, &g], |_, [m, u, g]| {
            *m = 0.75 * *m + 0.5 * *g;
            *u = if nesterov { 0.75 * *m + 0.5 * *g } else { *m };
        });
        let pass = Momentum { mu: 0.75, grad_factor: 0.5, nesterov };
        run_all!(pass, [g], [m, u]);
        assert_all([&m, &u, &g], &expected, "momentum");

        let expected = loops([&m, &g], |_, [m, g]| *m = 0.75 * *m + 0.5 * *g);
        run_all!(pass, [g], [m]);
        assert_all([&m, &g], &expected, "momentum alone");

        let expected = loops([&u, &m, &g], |_, [u, m, g]| *u = *m - 0.5 * *g);
        run_all!(Accumulate { grad_factor: -0.5 }, [g, m], [u]);
        assert_all([&u, &m, &g], &expected, "accumulate");

        let expected = loops([&m, &u], |_, [m, u]| (*m, *u) = (0.25 * *m, *m));
        run_all!(Release { keep: 0.25 }, [], [m, u]);
        assert_all([&m, &u], &expected, "release");
    }
}

#[test]
fn updates_are_applied_and_parameters_decay() {
    for (at, &[param, grad, _]) in MIXES[..4].iter().enumerate() {
        let cautious = at % 2 == 0;
        let (mut x, u) = (operand(param, 1), operand(grad, 2));
        let expected = loops([&x, &u], |_, [x, u]| {
            let kept = if cautious && *x * *u < 0.0 { *x } else { *x * 0.75 };
            *x = kept - 0.5 * *u;
        });
        run_all!(Apply { rate: 0.5, decay: 0.25, cautious, late: false }, [u], [x]);
        assert_all([&x, &u], &expected, "apply");

        let expected = loops([&x, &u], |_, [x, u]| {
            let y = *x - 0.5 * *u;
            *x = if cautious && y * *u < 0.0 { y } else { y * 0.75 };
        });
        run_all!(Apply { rate: 0.5, decay: 0.25, cautious, late: true }, [u], [x]);
        assert_all([&x, &u], &expected, "apply late");

        let expected = loops([&x], |_, [x]| *x *= 0.75);
        run_all!(Decay { decay: 0.25, per_rate: true }, [], [x]);
        assert_all([&x], &expected, "decay");

        let expected = loops([&x, &u], |_, [x, u]| *x = 0.5 * *x - 0.25 * *u);
        run_all!(Combine { keep: 0.5, factor: -0.25 }, [u], [x]);
        assert_all([&x, &u], &expected, "combine");

        let expected = loops([&x], |_, [x]| *x *= -3.0);
        run_all!(Scale(-3.0), [], [x]);
        assert_all([&x], &expected, "scale");
    }
}

#[test]
fn numbers_are_converted_between_all_types() {
    for from in FLOATS {
        for to in FLOATS {
            let (x, mut y) = (operand(from, 1), operand(to, 2));
            let expected = loops([&y, &x], |_, [y, x]| *y = -0.5 * *x);
            run_all!(Convert { factor: -0.5 }, [x], [y]);
            assert_all([&y, &x], &expected, "convert");
        }
    }
    // Beyond what is converted at a time.
    let (x, mut y) = (Memory::random(DType::F16, 520, 1), Memory::new(DType::BF16, 520));
    run(&Convert { factor: 1.0 }, &mut [Job { read: [x.view()], write: [y.view_mut()] }]).unwrap();
    assert_near(&y, &x.numbers(), "two tiles");
}

#[test]
fn moments_of_a_projected_gradient_and_running_means() {
    let counted = Steps::Counted(vec![1.0, 2.0, 3.0]);
    for &[param, _, state] in &MIXES[..4] {
        let (mut r, mut m, mut v) = (operand(param, 1), operand(state, 2), squares(state, 3));
        let expected = loops([&r, &m, &v], |_, [r, m, v]| {
            let g = 0.5 * *r;
            *m = 0.9 * *m + 0.1 * g;
            *v = 0.99 * *v + 0.01 * g * g;
            *r = 2.0 * *m / (0.5 * v.sqrt() + 0.25);
        });
        let pass = Direction {
            beta1: 0.9,
            beta2: 0.99,
            epsilon: 0.25,
            grad_factor: 0.5,
            unit: 1.0,
            corrections: vec![[2.0, 0.5]; 3],
            per_rate: false,
        };
        run_all!(pass, [], [r, m, v]);
        assert_all([&r, &m, &v], &expected, "direction");

        let expected = loops([&v, &r], |job, [v, r]| {
            let share = 1.0 / (job as f64 + 1.0);
            *v = (1.0 - share) * *v + share * (0.25 * *r * *r + 1e-3);
        });
        let share = NewShare::OfSteps { steps: &counted, exponent: -1.0 };
        run_all!(Squares::new(1e-3, f64::MAX, &share, (0.5, 3)), [r], [v]);
        assert_all([&v, &r], &expected, "squares");

        let expected =
            loops([&v, &m], |job, [v, m]| *v = 0.75 * *v + 0.25 * (*m / [2.0, 4.0, 8.0][job] + 1e-3));
        let jobs = [(0, 2.0), (1, 4.0), (2, 8.0)];
        run_all!(Means::new(1e-3, f64::MAX, &NewShare::Same(0.25), &jobs), [m], [v]);
        assert_all([&v, &m], &expected, "means");
    }
}

#[test]
fn lamb_with_factors_of_each_job() {
    let factors = [[1.0, 1.0, 0.5, 0.25], [2.0, 0.5, 1.0, 0.5], [1.0, 2.0, -1.0, 0.125]];
    for &[param, grad, state] in &MIXES[..4] {
        let (mut x, g, mut m, mut v) =
            (operand(param, 1), operand(grad, 2), operand(state, 3), squares(state, 4));
        let expected = loops([&x, &m, &v, &g], |job, [x, m, v, g]| {
            let [first, second, factor, rate] = factors[job];
            let gradient = factor * *g;
            *m = 0.9 * *m + 0.1 * gradient;
            *v = 0.99 * *v + 0.01 * gradient * gradient;
            *x -= rate * (*m * first / (v.sqrt() * second + 0.25) + 0.125 * *x);
        });
        let pass = Lamb {
            beta1: 0.9,
            blend: 0.1,
            beta2: 0.99,
            epsilon: 0.25,
            weight_decay: 0.125,
            cautious: false,
            factors: Factors::known(factors.to_vec()),
        };
        run_all!(pass, [g], [x, m, v]);
        assert_all([&x, &m, &v, &g], &expected, "lamb");
        let expected = loops([&x, &m, &v], |job, [x, m, v]| {
            let [first, second, _, rate] = factors[job];
            *x -= rate * (*m * first / (v.sqrt() * second + 0.25) + 0.125 * *x);
        });
        run_all!(pass, [m, v], [x]);
        assert_all([&x, &m, &v], &expected, "lamb along its moments");
    }
}

#[test]
fn steps_are_counted_before_they_correct() {
    let mut counters = [3.0, 3.0, 0.0].map(|steps| Memory::of(DType::F32, &[steps]));
    let views = counters.iter_mut().map(Memory::view_mut).collect();
    let (found, left) = count_steps(views, 0.5, [0.9, 0.99]).unwrap();
    assert!(left.is_empty());
    for ([rate, root], step) in found.into_iter().zip([4, 4, 1]) {
        assert!((rate - 0.5 / (1.0 - 0.9_f64.powi(step))).abs() < 1e-12);
        assert!((root - 1.0 / (1.0 - 0.99_f64.powi(step)).sqrt()).abs() < 1e-12);
    }
    assert_eq!(counters.map(|counter| counter.numbers()[0]), [4.0, 4.0, 1.0]);
}

/// More elements than a piece has, so that threads share them.
#[test]
fn pieces_of_jobs_are_worked_on_by_several_threads() {
    let lengths = [65_543, 3, 2100];
    with_threads(&[3], |_| {
        let mut x = lengths.map(|len| Memory::filled(DType::F32, len, 0.5));
        let mut jobs = x.each_mut().map(|x| Job { read: [], write: [x.view_mut()] });
        run_on_cpu(&Scale(-3.0), &mut jobs);
        assert!(x == lengths.map(|len| Memory::filled(DType::F32, len, -1.5)));
    });
}
