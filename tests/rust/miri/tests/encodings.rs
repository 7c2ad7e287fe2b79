//! 8-bit values with a scale for each block, and stochastic rounding: blocks written side by side, by several threads.

use oxidion_miri::kernels::{AdamW, Convert, Job, Momentum, run, run_on_cpu};
use oxidion_miri::numbers::{Memory, assert_near, assert_within, random, with_threads};
use oxidion_miri::tensor::{Blocks, DType, Encoding, FlatView, FlatViewMut, Places, Rounding};
use oxidion_miri::threads;

/// Entries of a code book in ascending order, as `src/kernels/cpu/minifloat.rs` describes them.
fn book(dtype: DType) -> Vec<f64> {
    let mut entries = vec![0.0, 1.0];
    let signed = dtype == DType::Q8;
    for octave in 1..=if signed { 23 } else { 36 } {
        let count = match (octave, signed) {
            (1 | 2, _) => 32,
            (3, true) => 16,
            (4, true) | (3..=16, false) => 8,
            (_, true) => 2,
            (_, false) => 4,
        };
        let least = 0.5_f64.powi(octave);
        entries.extend((0..count).map(|j| least * (1.0 + f64::from(j) / f64::from(count))));
    }
    entries.sort_by(f64::total_cmp);
    if !signed {
        let surplus = entries.len() - 256;
        entries.drain(1..=surplus);
        return entries;
    }
    let negative: Vec<f64> = entries.iter().rev().filter(|e| **e > 0.0).map(|e| -e).collect();
    [negative, entries].concat()
}

/// Numbers after they were quantized and dequantized, in rows of `width` with blocks of `block`.
fn quantized(dtype: DType, numbers: &[f64], width: usize, block: usize) -> Vec<f64> {
    let book = book(dtype);
    // Of the entries around a number the one that is less far away.
    let nearest = |x: f64| {
        let above = book.partition_point(|entry| *entry < x).clamp(1, book.len() - 1);
        let [low, high] = [book[above - 1], book[above]];
        if x - low <= high - x { low } else { high }
    };
    let blocks = numbers.chunks(width).flat_map(|row| row.chunks(block));
    let decode = |block: &[f64]| {
        let scale = block.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
        block.iter().map(|x| if scale > 0.0 { nearest(x / scale) * scale } else { 0.0 }).collect::<Vec<_>>()
    };
    blocks.flat_map(decode).collect()
}

/// Quantized rows, with memory for their scales.
struct QuantizedRows {
    rows: Memory,
    scales: Memory,
    width: usize,
    block: usize,
}

impl QuantizedRows {
    fn new(dtype: DType, len: usize, width: usize, block: usize) -> Self {
        let count = len.div_ceil(width) * width.div_ceil(block);
        let (rows, scales) = (Memory::of(dtype, &vec![0.0; len]), Memory::of(DType::F32, &vec![0.0; count]));
        Self { rows, scales, width, block }
    }

    /// Runs `work` on the quantized values. Nothing else uses them or their scales meanwhile.
    fn with<R>(&mut self, work: impl FnOnce(FlatViewMut<'_>) -> R) -> R {
        let Self { width, block, .. } = *self;
        let encoding = Encoding::Blocks(Blocks { scales: self.scales.ptr(), width, block, rounding: None });
        work(self.rows.encoded(&encoding))
    }

    fn numbers(&mut self) -> Vec<f64> {
        // Nothing was written around the scales.
        assert!(self.scales.numbers().iter().all(|scale| *scale >= 0.0));
        self.with(|rows| decode(&rows.view()))
    }
}

fn decode(rows: &FlatView<'_>) -> Vec<f64> {
    let mut out = Memory::new(DType::F32, rows.len());
    run(&Convert { factor: 1.0 }, &mut [Job { read: [*rows], write: [out.view_mut()] }]).unwrap();
    out.numbers()
}

fn encode(from: FlatView<'_>, to: FlatViewMut<'_>) {
    run_on_cpu(&Convert { factor: 1.0 }, &mut [Job { read: [from], write: [to] }]);
}

/// Takes parts off a view whose ends are ends of blocks.
fn parts<'a>(mut rows: FlatViewMut<'a>, lengths: &[usize]) -> Vec<FlatViewMut<'a>> {
    let parts = lengths.iter().map(|length| rows.take_first(*length)).collect();
    assert!(rows.is_empty());
    parts
}

const LEN: usize = 57;
const WIDTH: usize = 19;
const BLOCK: usize = 8;

fn magnitudes(dtype: DType, len: usize, seed: usize) -> Vec<f64> {
    let numbers = random(len, seed).into_iter().enumerate();
    // Blocks of very different sizes, and one of zeros.
    let sized = numbers.map(|(at, x)| if at / BLOCK == 3 { 0.0 } else { x * 0.1_f64.powi((at / 5) as i32) });
    sized.map(|x| if dtype == DType::UQ8 { x.abs() } else { x }).collect()
}

#[test]
fn blocks_are_stored_by_several_threads_and_read_again() {
    with_threads(&[1, 3], |_| {
        for dtype in [DType::Q8, DType::UQ8] {
            let numbers = Memory::of(DType::F32, &magnitudes(dtype, LEN, 1));
            let mut rows = QuantizedRows::new(dtype, LEN, WIDTH, BLOCK);
            rows.with(|rows| {
                // Rows end amid these lengths: blocks of 8, 8, 3, and so on.
                let mut parts = parts(rows, &[8, 11, 16, 3, 8, 11]);
                threads::chunks(&mut parts, 1, |part, rows| {
                    let start = [0, 8, 19, 35, 38, 46][part];
                    let from = numbers.view().part(start, rows[0].len());
                    encode(from, rows[0].reborrow());
                    assert_eq!(decode(&rows[0].view()).len(), rows[0].len());
                });
            });
            let (found, numbers) = (rows.numbers(), numbers.numbers());
            let blocks = numbers.chunks(WIDTH).flat_map(|row| row.chunks(BLOCK));
            let scales: Vec<f64> =
                blocks.map(|block| block.iter().fold(0.0, |most, x| x.abs().max(most))).collect();
            assert_eq!(rows.scales.numbers(), scales);
            let expected = quantized(dtype, &numbers, WIDTH, BLOCK);
            assert_within(&found, &expected, 1e-7, "decoded");
            assert!(found.iter().filter(|x| **x != 0.0).count() > LEN / 2);
        }
    });
}

#[test]
fn blocks_are_written_in_place_with_their_scales() {
    let mut rows = QuantizedRows::new(DType::Q8, LEN, WIDTH, BLOCK);
    rows.with(|mut rows| {
        let mut quantized = rows.quantized().unwrap();
        assert_eq!(quantized.len(), LEN);
        for at in [0, 16, 19, 54] {
            let (bytes, scale) = quantized.block(at).unwrap();
            bytes.fill(255);
            *scale = at as f32 + 1.0;
        }
        // No beginning of a block.
        assert!(quantized.block(1).is_none() && quantized.block(18).is_none());
    });
    let found = rows.numbers();
    let bits = rows.rows.bits();
    for (at, (x, code)) in found.iter().zip(bits).enumerate() {
        let expected = match at {
            0..8 => 1.0,
            16..19 => 17.0,
            19..27 => 20.0,
            54..57 => 55.0,
            _ => 0.0,
        };
        assert_eq!((*x, code), (expected, if expected > 0.0 { 255 } else { 0 }), "{at}");
    }
}

#[test]
fn a_part_of_a_block_is_read_and_not_written() {
    let mut rows = QuantizedRows::new(DType::UQ8, LEN, WIDTH, BLOCK);
    let numbers = Memory::of(DType::F32, &magnitudes(DType::UQ8, LEN, 2));
    rows.with(|rows| encode(numbers.view(), rows));
    let all = rows.numbers();
    rows.with(|rows| {
        let (mut low, mut high) = rows.split_at(21);
        assert!(low.quantized().unwrap().block(19).is_none());
        assert!(high.quantized().unwrap().block(0).is_none());
        // Both hold a part of one block, and read its scale.
        let found = std::thread::scope(|scope| {
            let other = scope.spawn(|| decode(&high.view()));
            [decode(&low.view()), other.join().unwrap()].concat()
        });
        assert_eq!(found, all);
        assert_eq!(decode(&low.view().part(5, 9)), all[5..14]);
    });
}

#[test]
fn quantized_values_need_an_encoding_and_a_scale() {
    let mut rows = QuantizedRows::new(DType::Q8, LEN, WIDTH, BLOCK);
    assert!(decode(&rows.rows.view()).iter().all(|x| x.is_nan()));
    let scales = rows.scales.ptr().carve(0, 2, DType::F32).unwrap();
    let encoding = Encoding::Blocks(Blocks { scales, width: WIDTH, block: BLOCK, rounding: None });
    let found = decode(&rows.rows.encoded(&encoding).view());
    assert!(found[..16].iter().all(|x| *x == 0.0));
    assert!(found[16..].iter().all(|x| x.is_nan()));
}

#[test]
fn momentum_is_quantized() {
    let (mu, grad_factor) = (0.75, 0.5);
    let old = quantized(DType::Q8, &magnitudes(DType::Q8, LEN, 3), WIDTH, BLOCK);
    for (dtype, nesterov) in [(DType::F32, false), (DType::BF16, true), (DType::F64, true)] {
        let mut rows = QuantizedRows::new(DType::Q8, LEN, WIDTH, BLOCK);
        let old = Memory::of(DType::F32, &old);
        rows.with(|rows| encode(old.view(), rows));
        let before = rows.numbers();
        let (g, mut u) = (Memory::random(dtype, LEN, 4), Memory::new(DType::F32, LEN));
        let pass = Momentum { mu, grad_factor, nesterov };
        rows.with(|rows| {
            // Cut where a block ends, and rows do not.
            let (first, last) = rows.split_at(27);
            let (u_first, u_last) = u.view_mut().split_at(27);
            let jobs = [(first, u_first, 0), (last, u_last, 27)];
            let mut jobs = jobs.map(|(m, u, start)| {
                let len = m.len();
                Job { read: [g.view().part(start, len)], write: [m, u] }
            });
            run(&pass, &mut jobs).unwrap();
        });
        let g = g.numbers();
        let new: Vec<f64> = before.iter().zip(&g).map(|(m, g)| mu * m + grad_factor * g).collect();
        let along = |(m, g): (&f64, &f64)| if nesterov { mu * m + grad_factor * g } else { *m };
        let expected: Vec<f64> = new.iter().zip(&g).map(along).collect();
        assert_near(&u, &expected, "update");
        // Next to the middle of two entries float32 may find the other one: a step of the book is below a twentieth.
        let found = rows.numbers();
        let stored = quantized(DType::Q8, &new, WIDTH, BLOCK);
        let off = found.iter().zip(&stored).filter(|(a, b)| (*a - *b).abs() > 1e-6).count();
        assert!(off <= 1, "{off} of {LEN}");
        assert_within(&found, &stored, 0.05, "momentum");
    }
}

#[test]
fn both_moments_of_adamw_are_quantized() {
    let len = 40;
    let [mut m, mut v] = [DType::Q8, DType::UQ8].map(|dtype| QuantizedRows::new(dtype, len, len, 16));
    let (mut x, g) = (Memory::random(DType::BF16, len, 5), Memory::random(DType::F32, len, 6));
    let start = x.numbers();
    let pass = AdamW {
        beta1: 0.9,
        beta2: 0.99,
        epsilon: 1e-8,
        decay: 0.125,
        cautious: false,
        late: false,
        grad_factor: 1.0,
        corrections: AdamW::corrections(0.25, [0.9, 0.99], [1.0].into_iter()),
        steps: Vec::new(),
    };
    m.with(|m| v.with(|v| run(&pass, &mut [Job { read: [g.view()], write: [x.view_mut(), m, v] }]))).unwrap();
    let g = g.numbers();
    // The first step: m̂ is g, and v̂ is g².
    let step = |(x, g): (&f64, &f64)| x * 0.875 - 0.25 * g / (g.abs() + 1e-8);
    assert_near(&x, &start.iter().zip(&g).map(step).collect::<Vec<_>>(), "parameter");
    let moments = |f: fn(f64) -> f64| g.iter().map(|g| f(*g)).collect::<Vec<_>>();
    let expected = quantized(DType::Q8, &moments(|g| 0.1 * g), len, 16);
    assert_within(&m.numbers(), &expected, 1e-7, "first moment");
    let expected = quantized(DType::UQ8, &moments(|g| 0.01 * g * g), len, 16);
    assert_within(&v.numbers(), &expected, 1e-7, "second moment");
}

#[test]
fn numbers_are_rounded_at_random_to_a_neighbour_whatever_they_are_split_into() {
    let len = 45;
    // Rows 1 to 3 and columns 2 to 16 of a tensor of 5 x 20.
    let places = Places::new(&[5, 20], &[(1, 3), (2, 15)]);
    let encoding = Encoding::Rounding(Rounding { key: [1, 2], places, stays_positive: false });
    let numbers = Memory::random(DType::F32, len, 7);
    let mut whole = Memory::new(DType::BF16, len);
    encode(numbers.view(), whole.encoded(&encoding));
    let mut pieces = Memory::new(DType::BF16, len);
    with_threads(&[3], |_| {
        let mut parts = parts(pieces.encoded(&encoding), &[1, 6, 30, 8]);
        threads::chunks(&mut parts, 1, |part, to| {
            let from = numbers.view().part([0, 1, 7, 37][part], to[0].len());
            encode(from, to[0].reborrow());
        });
    });
    assert_eq!(whole.bits(), pieces.bits());
    let nearest = Memory::of(DType::BF16, &numbers.numbers());
    for (x, found) in numbers.numbers().into_iter().zip(whole.numbers()) {
        assert!((x - found).abs() <= 2_f64.powi(-7) * x.abs(), "{x} {found}");
    }
    let moved = whole.bits().iter().zip(nearest.bits()).filter(|(a, b)| **a != *b).count();
    assert!((5..30).contains(&moved), "{moved}");
}

#[test]
fn weights_in_two_halves_are_written_by_several_threads_and_read_again() {
    let len = 45;
    let numbers = Memory::random(DType::F32, len, 8);
    let (mut high, mut low) = (Memory::new(DType::BF16, len), Memory::new(DType::I16, len));
    let encoding = Encoding::Master(low.ptr());
    with_threads(&[3], |_| {
        let mut parts = parts(high.encoded(&encoding), &[1, 6, 30, 8]);
        threads::chunks(&mut parts, 1, |part, to| {
            let from = numbers.view().part([0, 1, 7, 37][part], to[0].len());
            encode(from, to[0].reborrow());
        });
    });
    let nearest = Memory::of(DType::BF16, &numbers.numbers());
    assert_eq!(high.bits(), nearest.bits());
    assert_eq!(decode(&high.encoded(&encoding).view()), numbers.numbers());
    assert_ne!(high.numbers(), numbers.numbers());
}
