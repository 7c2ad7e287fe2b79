//! Numbers in memory that a test owns, and what they should be.

use std::sync::{Mutex, PoisonError};

use half::{bf16, f16};

use crate::tensor::{DType, Encoding, FlatPtr, FlatView, FlatViewMut};
use crate::threads;

/// Element types of numbers.
pub const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];

/// Elements in front of those of a [`Memory`], an odd number, and behind them.
const AHEAD: usize = 3;
const BEHIND: usize = 5;
/// Bits of what must not be written.
const UNTOUCHED: u64 = 0x5a5a_5a5a_5a5a_5a5a;

/// Elements of one type between others that must not be written.
#[derive(Clone, Debug, PartialEq)]
pub struct Memory {
    words: Vec<u64>,
    dtype: DType,
    len: usize,
}

impl Memory {
    /// Unwritten elements.
    #[must_use]
    pub fn new(dtype: DType, len: usize) -> Self {
        let words = ((AHEAD + len + BEHIND) * dtype.bytes()).div_ceil(8);
        Self { words: repeated(UNTOUCHED, words), dtype, len }
    }

    /// One number everywhere.
    #[must_use]
    pub fn filled(dtype: DType, len: usize, number: f64) -> Self {
        let (mut memory, ends) = (Self::new(dtype, len), 16.min(len));
        (0..ends).chain(len - ends..len).for_each(|at| set(&mut memory.words, dtype, at, number));
        // Whole words between them.
        let (start, end) = ((AHEAD * dtype.bytes()).div_ceil(8), (AHEAD + len) * dtype.bytes() / 8);
        if start + 1 < end {
            let word = memory.words[start];
            memory.words[start..end].copy_from_slice(&repeated(word, end - start));
        }
        memory
    }

    /// These numbers, rounded to the type.
    #[must_use]
    pub fn of(dtype: DType, numbers: &[f64]) -> Self {
        let mut memory = Self::new(dtype, numbers.len());
        // Miri takes a while for each call, and an iterator makes several.
        let (words, mut at) = (&mut memory.words[..], 0);
        while at < numbers.len() {
            set(words, dtype, at, numbers[at]);
            at += 1;
        }
        memory
    }

    /// Numbers between -1 and 1, others for each seed.
    #[must_use]
    pub fn random(dtype: DType, len: usize, seed: usize) -> Self {
        Self::of(dtype, &random(len, seed))
    }

    /// To be read.
    #[must_use]
    pub fn view(&self) -> FlatView<'_> {
        FlatView::over(&self.words, self.dtype).part(AHEAD, self.len)
    }

    /// To be written.
    #[must_use]
    pub fn view_mut(&mut self) -> FlatViewMut<'_> {
        FlatViewMut::over(&mut self.words, self.dtype).into_part(AHEAD, self.len)
    }

    /// Returns the address from which views are made, as the session keeps memory.
    #[must_use]
    pub fn ptr(&mut self) -> FlatPtr {
        let offset = AHEAD * self.dtype.bytes();
        FlatPtr::over(&mut self.words, self.dtype).carve(offset, self.len, self.dtype).unwrap()
    }

    /// Returns a mutable view with an encoding. Nothing else uses the encoding's memory while the view lives.
    #[must_use]
    pub fn encoded<'a>(&'a mut self, encoding: &'a Encoding) -> FlatViewMut<'a> {
        // SAFETY: the memory is borrowed to be written for as long as the view; the caller answers for the encoding's.
        unsafe { self.ptr().view_mut(Some(encoding)) }
    }

    /// The numbers.
    ///
    /// # Panics
    /// Panics if something was written around them.
    #[must_use]
    pub fn numbers(&self) -> Vec<f64> {
        let (bits, mut all) = (self.bits(), vec![0.0; self.len]);
        let (bits, numbers, mut at) = (&bits[..], &mut all[..], 0);
        while at < numbers.len() {
            numbers[at] = number(self.dtype, bits[at]);
            at += 1;
        }
        all
    }

    /// The bits of all elements.
    ///
    /// # Panics
    /// As [`numbers`](Self::numbers).
    #[must_use]
    pub fn bits(&self) -> Vec<u64> {
        let size = 8 * self.dtype.bytes() as u32;
        let (mask, end) = (u64::MAX >> (64 - size), AHEAD + self.len);
        let mut all = vec![0; self.len];
        let (words, elements) = (&self.words[..], &mut all[..]);
        let (mut at, mut word) = (0, 0);
        while word < words.len() {
            let mut shift = 0;
            while shift < 64 {
                let bits = words[word] >> shift & mask;
                if at < AHEAD || at >= end {
                    assert!(bits == UNTOUCHED & mask, "written around the elements");
                } else {
                    elements[at - AHEAD] = bits;
                }
                at += 1;
                shift += size;
            }
            word += 1;
        }
        all
    }

    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }
}

/// Sets an element behind those that must not be written.
fn set(words: &mut [u64], dtype: DType, at: usize, number: f64) {
    let size = 8 * dtype.bytes();
    let start = (AHEAD + at) * size;
    let (word, shift) = (start / 64, start % 64);
    words[word] = words[word] & !((u64::MAX >> (64 - size)) << shift) | bits(dtype, number) << shift;
}

/// One word many times, copied by what is there already: Miri takes a while for each that is written by itself.
fn repeated(word: u64, count: usize) -> Vec<u64> {
    let mut words = vec![0; count];
    let mut done = count.min(1);
    words[..done].fill(word);
    while done < count {
        words.copy_within(..done.min(count - done), done);
        done = count.min(2 * done);
    }
    words
}

fn bits(dtype: DType, x: f64) -> u64 {
    match dtype {
        DType::F16 => u64::from(f16::from_f64(x).to_bits()),
        DType::BF16 => u64::from(bf16::from_f64(x).to_bits()),
        DType::F32 => u64::from((x as f32).to_bits()),
        DType::F64 => x.to_bits(),
        DType::Q8 | DType::UQ8 => x as u64,
        DType::I16 => u64::from((x as i16).cast_unsigned()),
    }
}

fn number(dtype: DType, bits: u64) -> f64 {
    match dtype {
        DType::F16 => f16::from_bits(bits as u16).to_f64(),
        DType::BF16 => bf16::from_bits(bits as u16).to_f64(),
        DType::F32 => f64::from(f32::from_bits(bits as u32)),
        DType::F64 => f64::from_bits(bits),
        DType::Q8 | DType::UQ8 => bits as f64,
        DType::I16 => f64::from((bits as u16).cast_signed()),
    }
}

/// A number between -1 and 1 for each place. Neither sine nor the like, to which Miri adds an error of its own.
#[must_use]
pub fn random(len: usize, seed: usize) -> Vec<f64> {
    let mut all = vec![0.0; len];
    let mut state = (seed as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let (numbers, mut at) = (&mut all[..], 0);
    while at < len {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        numbers[at] = (state >> 40) as f64 / 8_388_608.0 - 1.0;
        at += 1;
    }
    all
}

/// Writes a number for each place.
pub fn write(view: FlatViewMut<'_>, number: impl Fn(usize) -> f64) {
    let at = |at| number(at);
    match view.dtype() {
        DType::F16 => put(view.into_slice::<f16>(), |i| f16::from_f64(at(i))),
        DType::BF16 => put(view.into_slice::<bf16>(), |i| bf16::from_f64(at(i))),
        DType::F32 => put(view.into_slice::<f32>(), |i| at(i) as f32),
        DType::F64 => put(view.into_slice::<f64>(), at),
        DType::Q8 | DType::UQ8 | DType::I16 => panic!("a kernel writes what is encoded"),
    }
}

fn put<T>(slice: &mut [T], number: impl Fn(usize) -> T) {
    slice.iter_mut().enumerate().for_each(|(at, x)| *x = number(at));
}

/// Reads all numbers.
#[must_use]
pub fn read(view: &FlatView<'_>) -> Vec<f64> {
    match view.dtype() {
        DType::F16 => view.slice::<f16>().iter().map(|x| x.to_f64()).collect(),
        DType::BF16 => view.slice::<bf16>().iter().map(|x| x.to_f64()).collect(),
        DType::F32 => view.slice::<f32>().iter().map(|x| f64::from(*x)).collect(),
        DType::F64 => view.slice::<f64>().to_vec(),
        DType::Q8 | DType::UQ8 | DType::I16 => panic!("a kernel reads what is encoded"),
    }
}

/// Compares with numbers in float64. A result is rounded to its type once; before that arithmetic in float32 has an error
/// of some units in the last place, relative to sizes of about 1.
///
/// # Panics
/// Panics where they differ by more.
pub fn assert_near(memory: &Memory, expected: &[f64], what: &str) {
    let rounding = match memory.dtype {
        DType::F64 => 1e-13,
        DType::F32 => 2e-6,
        DType::BF16 => 4e-3,
        DType::F16 => 5e-4,
        DType::Q8 | DType::UQ8 | DType::I16 => panic!("another function compares what is encoded"),
    };
    assert_within(&memory.numbers(), expected, rounding, &format!("{what} {:?}", memory.dtype));
}

/// Compares numbers that may differ by a share of their size, or of 1 if they are smaller.
///
/// # Panics
/// Panics where they differ by more.
pub fn assert_within(found: &[f64], expected: &[f64], share: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let mut at = 0;
    while at < found.len() {
        let (found, expected) = (found[at], expected[at]);
        let off = found - expected;
        let near = off <= share && off >= -share || off.abs() <= share * expected.abs();
        assert!(near, "{what}, element {at}: {found} is not {expected}");
        at += 1;
    }
}

/// Does work with each of some numbers of threads, while no other test of the process does.
pub fn with_threads(counts: &[usize], mut work: impl FnMut(usize)) {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    for &count in counts {
        threads::set(count);
        work(count);
    }
    threads::set(1);
}
