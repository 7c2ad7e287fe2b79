//! bfloat16 with AMX: tiles of 32 x 32 sums in four tile registers, by inline assembly, as the compiler has no stable
//! intrinsics for it.

use std::arch::asm;
use std::cell::RefCell;
use std::sync::OnceLock;

use half::bf16;

use super::Outcome;
use super::pack::panel;
use super::tiled::Sums;
use super::tiles::Bf16Avx512;
use super::transpose::mirror_bf16;
use super::types::{Call, Mirror, Rows, Tile};

/// Rows and columns of a tile: two by two registers of 16 x 16 sums.
const SIDE: usize = 32;
/// Elements along the inner dimension in a register.
const DEPTH: usize = 32;
/// Bytes of a line of the caches.
const LINE: usize = 64;
/// Steps along the inner dimension between which the sums of a task go through memory.
///
/// A step multiplies for 64 cycles and reads 2 KiB of rows and 2 KiB of columns; a Xeon has 64 bytes a cycle of its
/// second-level cache and 15 of the third. In parts of eight steps a panel of columns takes 16 KiB and stays in the
/// first-level cache while the panels of rows pass, which come from the second level with 32 bytes a cycle. All panels of a
/// part of a task take 256 KiB and are used eight times: 8 bytes a cycle come from the third level, and are asked for ahead.
/// The sums take 256 KiB.
const PART: usize = 8;

thread_local! {
    // Sums of a task. The thread keeps the buffer, so that its pages are reused.
    static SUMS: RefCell<Vec<Sums<f32>>> = const { RefCell::new(Vec::new()) };
}

/// Configuration that `ldtilecfg` reads: eight registers of 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes_of_row: [u16; 16],
    rows: [u8; 16],
}

static SHAPES: Shapes = Shapes {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    bytes_of_row: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// Tests whether this process may use the tile registers, and they multiply: asked of CPU and system once.
///
/// CPUID leaf 0x1D, in which a virtual machine describes its tiles, does not count: some say nothing and have them.
pub(super) fn is_usable() -> bool {
    static USABLE: OnceLock<bool> = OnceLock::new();
    *USABLE.get_or_init(|| crate::tensor::cpu_names_amx() && are_saved() && is_permitted() && multiplies())
}

/// Tests whether the system saves the tile registers when it switches threads.
fn are_saved() -> bool {
    const TILES: u64 = 3 << 17;
    std::arch::is_x86_feature_detected!("avx512bf16") && {
        // SAFETY: a CPU with AVX has the instruction, and systems that save its registers have switched it on.
        unsafe { xgetbv() & TILES == TILES }
    }
}

/// # Safety
/// The CPU has XSAVE, switched on.
#[target_feature(enable = "xsave")]
unsafe fn xgetbv() -> u64 {
    // SAFETY: the caller's.
    unsafe { std::arch::x86_64::_xgetbv(0) }
}

/// Asks Linux for the registers, which it gives a process only then.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_PRCTL: isize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const TILE_DATA: usize = 18;
    let result: isize;
    // SAFETY: the call gives a permission; it writes no memory. It uses the registers that are named.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") TILE_DATA,
            out("rcx") _,
            out("r11") _,
            options(nostack)
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// Multiplies two small matrices of whole numbers twice, and adds the results.
pub(super) fn multiplies() -> bool {
    let left = |i: usize, p: usize| (i * 7 + p * 3) % 11;
    let right = |p: usize, j: usize| (p * 5 + j * 13) % 7;
    let number = |x: usize| bf16::from_f32(f32::from(u8::try_from(x).unwrap_or(0)));
    let mut panels = [[bf16::ZERO; SIDE * DEPTH]; 2];
    for p in 0..DEPTH {
        for i in 0..SIDE {
            panels[0][i * DEPTH + p] = number(left(i, p));
            panels[1][p / 2 * 2 * SIDE + 2 * i + p % 2] = number(right(p, i));
        }
    }
    let mut sums = [0.0_f32; SIDE * SIDE];
    // SAFETY: CPU, system and permission were asked for; the panels have one step and the sums are a tile.
    unsafe {
        configure();
        let panels = panels.each_ref().map(|panel| panel.as_ptr());
        let ahead = Ahead::only(panels[1]);
        (0..2).for_each(|i| multiply(i > 0, 1, panels, &ahead, sums.as_mut_ptr()));
        release();
    }
    (0..SIDE * SIDE).all(|at| {
        let exact: usize = (0..DEPTH).map(|p| 2 * left(at / SIDE, p) * right(p, at % SIDE)).sum();
        f64::from(sums[at]).to_bits() == f64::from(u32::try_from(exact).unwrap_or(0)).to_bits()
    })
}

/// Gives the tile registers of this thread their shapes.
///
/// # Safety
/// The machine has AMX, and the process is permitted to use it.
unsafe fn configure() {
    // SAFETY: the caller's; the instruction reads 64 bytes.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const SHAPES, options(nostack, readonly, preserves_flags)) };
}

/// Frees the tile registers of this thread: the system has nothing to save then.
///
/// # Safety
/// As [`configure`].
unsafe fn release() {
    // SAFETY: the caller's.
    unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
}

/// Panels of rows are groups of 32 elements of each row; those of columns pairs, as with AVX512-BF16.
pub(super) struct Bf16Amx;

impl Tile for Bf16Amx {
    type Element = bf16;
    const ROWS: usize = SIDE;
    const COLS: usize = SIDE;
    const DEPTH: usize = DEPTH;
    const BLOCK: [usize; 2] = [8, 8];
    const TRANSPOSES: bool = true;
    const ROUNDS: bool = true;

    /// # Safety
    /// As the trait says, with registers that [`configure`] gave their shapes.
    #[inline]
    unsafe fn multiply(steps: usize, a: *const bf16, b: *const bf16, out: *mut f32) {
        // SAFETY: the caller's.
        unsafe { multiply(false, steps, [a, b], &Ahead::only(b), out) };
    }

    /// # Safety
    /// As the trait says.
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx512bf16")]
    unsafe fn pack(left: bool, x: &Rows<bf16>, start: usize, range: [usize; 2], to: *mut bf16) {
        let whole = x.inner.next_multiple_of(DEPTH);
        // SAFETY: the caller's: the panel has `SIDE * whole` elements, `range` is inside the rows.
        unsafe {
            if left {
                groups(x, start, range, to);
            } else {
                panel::<Bf16Avx512, SIDE>(x, start, range, to);
                if range[1] == x.inner {
                    let done = x.inner.next_multiple_of(2);
                    std::slice::from_raw_parts_mut(to.add(done * SIDE), (whole - done) * SIDE)
                        .fill(bf16::ZERO);
                }
            }
        }
    }

    /// # Safety
    /// As the trait says.
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx512bf16")]
    unsafe fn mirror(sums: *const f32, to: &Mirror, out: *mut bf16) {
        for top in (0..to.rows).step_by(16) {
            let part = Mirror { rows: (to.rows - top).min(16), below: to.below - top.cast_signed(), ..*to };
            // SAFETY: the caller's; rows from `top` on, at most 16.
            unsafe { mirror_bf16(sums.add(top * SIDE), SIDE, &part, out.wrapping_add(top)) };
        }
    }

    /// # Safety
    /// As the trait says.
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx512bf16")]
    unsafe fn task(call: &Call<'_, bf16>, task: usize) {
        // SAFETY: the caller's; [`is_usable`] asked for the permission before there was a kernel.
        unsafe {
            configure();
            by_parts(call, task);
            release();
        }
    }
}

/// Memory that a product of panels asks to come into the second-level cache: by each step 256 bytes at the first place, and
/// four lines at each of the other two, at distances of `stride` bytes.
struct Ahead {
    whole: *const bf16,
    lines: [*const bf16; 2],
    stride: usize,
}

impl Ahead {
    fn only(place: *const bf16) -> Self {
        Self { whole: place, lines: [place; 2], stride: LINE }
    }
}

/// Multiplies panels `a` and `b` as [`Tile::multiply`] does, and adds to the sums that are in `out` if there are `more`.
///
/// # Safety
/// As there, with registers that [`configure`] gave their shapes.
#[inline]
unsafe fn multiply(more: bool, steps: usize, [a, b]: [*const bf16; 2], ahead: &Ahead, out: *mut f32) {
    // SAFETY: the caller's. A step reads 32 rows of 64 bytes, and 16 rows of 128 bytes; a row of sums has 128. What is asked for
    // ahead need not be there.
    unsafe {
        asm!(
            "test {more}, {more}",
            "jz 4f",
            "tileloadd tmm0, [{out} + {pair}]",
            "tileloadd tmm1, [{out} + {pair} + 64]",
            "tileloadd tmm2, [{out} + {pair} + 2048]",
            "tileloadd tmm3, [{out} + {pair} + 2112]",
            "jmp 5f",
            "4:",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "5:",
            "test {steps}, {steps}",
            "jz 3f",
            "2:",
            "tileloadd tmm4, [{a} + {row}]",
            "tileloadd tmm6, [{b} + {pair}]",
            "tileloadd tmm7, [{b} + {pair} + 64]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{a} + {row} + 1024]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "prefetcht1 [{whole}]",
            "prefetcht1 [{whole} + 64]",
            "prefetcht1 [{whole} + 128]",
            "prefetcht1 [{whole} + 192]",
            "prefetcht1 [{first}]",
            "prefetcht1 [{first} + {stride}]",
            "lea {first}, [{first} + 2 * {stride}]",
            "prefetcht1 [{first}]",
            "prefetcht1 [{first} + {stride}]",
            "lea {first}, [{first} + 2 * {stride}]",
            "prefetcht1 [{second}]",
            "prefetcht1 [{second} + {stride}]",
            "lea {second}, [{second} + 2 * {stride}]",
            "prefetcht1 [{second}]",
            "prefetcht1 [{second} + {stride}]",
            "lea {second}, [{second} + 2 * {stride}]",
            "add {whole}, 256",
            "add {a}, 2048",
            "add {b}, 2048",
            "dec {steps}",
            "jnz 2b",
            "3:",
            "tilestored [{out} + {pair}], tmm0",
            "tilestored [{out} + {pair} + 64], tmm1",
            "tilestored [{out} + {pair} + 2048], tmm2",
            "tilestored [{out} + {pair} + 2112], tmm3",
            more = in(reg) usize::from(more),
            steps = inout(reg) steps => _,
            a = inout(reg) a => _,
            b = inout(reg) b => _,
            whole = inout(reg) ahead.whole => _,
            first = inout(reg) ahead.lines[0] => _,
            second = inout(reg) ahead.lines[1] => _,
            stride = in(reg) ahead.stride,
            out = in(reg) out,
            row = in(reg) 64_usize,
            pair = in(reg) 128_usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack)
        );
    }
}

/// Multiplies the panels of a task, a part of the inner dimension after the other. While a panel of columns is multiplied
/// with all rows the next one is asked for, with a share of the rows of the next part, in the last part of the rows of the
/// result.
///
/// # Safety
/// As [`Call::task`], with registers that [`configure`] gave their shapes.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx512bf16")]
unsafe fn by_parts(call: &Call<'_, bf16>, task: usize) {
    let [rows, columns] = call.panels::<Bf16Amx>(task);
    let steps = call.steps::<Bf16Amx>();
    let parts = steps.div_ceil(PART).max(1);
    let length = steps.div_ceil(parts).max(1);
    let panel = |first: *const bf16, number: usize, step: usize| {
        first.wrapping_add((number * steps + step) * SIDE * DEPTH)
    };
    let result = |row: usize, column: usize| {
        call.out.cast_const().wrapping_add(row * SIDE * call.stride + column * SIDE)
    };
    let share = |k: usize, of: usize| k * length * SIDE * DEPTH / of;
    let mut sums = SUMS.take();
    if sums.len() < rows.len() * columns.len() {
        sums.resize_with(rows.len() * columns.len(), || Sums([0.0; SIDE * SIDE]));
    }
    for part in 0..parts {
        let (begin, is_last) = (part * length, part + 1 == parts);
        let count = length.min(steps.saturating_sub(begin));
        let next = if is_last { 0 } else { begin + length };
        for column in columns.clone() {
            let (column_ahead, step_ahead) =
                if column + 1 < columns.end { (column + 1, begin) } else { (columns.start, next) };
            for row in rows.clone().filter(|row| *row >= call.first::<Bf16Amx>(column)) {
                let [i, j] = [row - rows.start, column - columns.start];
                let panels = [panel(call.left, row, begin), panel(call.right, column, begin)];
                let whole = panel(call.right, column_ahead, step_ahead).wrapping_add(share(i, rows.len()));
                // Sums that need not be kept lie in one place, which stays in the first-level cache.
                let sums = &mut sums[if parts == 1 { 0 } else { i * columns.len() + j }];
                let place = sums.0.as_mut_ptr();
                let ahead = if is_last {
                    let lines = match call.outcome {
                        Outcome::General => [result(row, column); 2],
                        Outcome::Symmetric => [result(row, column), result(column, row)],
                        Outcome::Transposed => [result(column, row); 2],
                    };
                    Ahead { whole, lines, stride: call.stride * size_of::<bf16>() }
                } else {
                    let rows_ahead = panel(call.left, row, next).wrapping_add(share(j, columns.len()));
                    Ahead { whole, lines: [rows_ahead; 2], stride: LINE }
                };
                // SAFETY: the panels are there, and have the steps; the first part writes the sums.
                unsafe {
                    multiply(part > 0, count, panels, &ahead, place);
                    if is_last {
                        call.finish::<Bf16Amx>(sums, &call.spot::<Bf16Amx>([row, column]));
                    }
                }
            }
        }
    }
    SUMS.set(sums);
}

/// Writes elements `range` of rows `start..start + SIDE` in groups of `DEPTH` elements of each row, zeros for what there is
/// not.
///
/// # Safety
/// As [`panel`].
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx512bf16")]
unsafe fn groups(x: &Rows<bf16>, start: usize, [begin, end]: [usize; 2], to: *mut bf16) {
    let rows = SIDE.min(x.count - start);
    let place = |i: usize, p: usize| p / DEPTH * DEPTH * SIDE + i * DEPTH + p % DEPTH;
    // SAFETY: what is read lies in the rows that there are, what is written in the panel.
    unsafe {
        let from = x.first.add(start * x.steps[0]);
        if x.steps[1] == 1 {
            // 16 rows from one end to the other: more are too many streams for the prefetcher.
            for part in (0..rows).step_by(16) {
                for p in (begin..end).step_by(DEPTH) {
                    for i in part..rows.min(part + 16) {
                        let (group, count) = (to.add(place(i, p)), DEPTH.min(end - p));
                        let row = from.add(i * x.steps[0] + p);
                        if count == DEPTH {
                            std::ptr::copy_nonoverlapping(row, group, DEPTH);
                        } else {
                            std::ptr::copy_nonoverlapping(row, group, count);
                        }
                    }
                }
            }
        } else {
            for p in begin..end {
                for i in 0..rows {
                    *to.add(place(i, p)) = *from.add(i * x.steps[0] + p * x.steps[1]);
                }
            }
        }
        let whole = if end == x.inner { end.next_multiple_of(DEPTH) } else { end };
        for i in 0..SIDE {
            for p in (if i < rows { end } else { begin })..whole {
                *to.add(place(i, p)) = bf16::ZERO;
            }
        }
    }
}
