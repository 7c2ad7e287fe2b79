//! AMX instructions for processors without them: a signal handler decodes the instruction that the processor refused,
//! computes what it does, and goes on behind it. Tests of the kernel run everywhere with it.

use std::cell::UnsafeCell;
use std::sync::OnceLock;

use half::bf16;

/// Tile registers of a thread, with the shapes that [`super::amx`] gives them: 16 rows of 64 bytes.
struct Tiles {
    are_configured: bool,
    rows: [[[u8; 64]; 16]; 8],
}

thread_local! {
    static TILES: UnsafeCell<Tiles> =
        const { UnsafeCell::new(Tiles { are_configured: false, rows: [[[0; 64]; 16]; 8] }) };
}

/// Installs the handler of SIGILL. Returns false where the other instructions of the kernel do not exist either.
pub(super) fn install() -> bool {
    static INSTALLED: OnceLock<bool> = OnceLock::new();
    *INSTALLED.get_or_init(|| {
        let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = refused;
        // SAFETY: all bits zero are a valid action, which is filled in before it is installed.
        let installed = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
            libc::sigaction(libc::SIGILL, &raw const action, std::ptr::null_mut())
        };
        installed == 0 && std::is_x86_feature_detected!("avx512bf16")
    })
}

extern "C" fn refused(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: Linux passes a context of this type to handlers with `SA_SIGINFO`.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    // SAFETY: the instruction that was refused was read by the processor, and the tiles are this thread's own: the handler
    // runs between two instructions of an `asm!` block, which has no reference to them.
    let done = TILES.with(|tiles| unsafe { execute(registers, &mut *tiles.get()) });
    if done.is_none() {
        // Not AMX, or used without a configuration.
        std::process::abort();
    }
}

/// General registers by their numbers in an instruction.
const GENERAL: [i32; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

/// Executes the instruction at the instruction pointer; `None` if it is none that is known.
///
/// # Safety
/// The pointer is that of an instruction, and its operands in memory are what the instruction may read and write.
unsafe fn execute(registers: &mut [libc::greg_t; 23], tiles: &mut Tiles) -> Option<()> {
    let slot = |register: i32| usize::try_from(register).ok();
    let pointer = slot(libc::REG_RIP)?;
    let code = registers[pointer] as *const u8;
    // SAFETY: a VEX prefix of three bytes, the code, ModRM and SIB; code has at least as many bytes behind it.
    let [prefix, first, second, operation, mode] =
        unsafe { [*code, *code.add(1), *code.add(2), *code.add(3), *code.add(4)] };
    if prefix != 0xc4 || first & 0x1f != 2 {
        return None;
    }
    let general = |number: u8| Some(registers[slot(GENERAL[usize::from(number)])?]);
    let (form, register, low) = (mode >> 6, usize::from(mode >> 3 & 7), mode & 7);
    let mut length = 5_usize;
    let (mut address, mut stride) = (0_i64, 0_i64);
    if form < 3 {
        let mut base = low | (!first >> 5 & 1) << 3;
        if low == 4 {
            // SAFETY: the SIB byte.
            let sib = unsafe { *code.add(length) };
            length += 1;
            base = (sib & 7) | (!first >> 5 & 1) << 3;
            let index = (sib >> 3 & 7) | (!first >> 6 & 1) << 3;
            stride = if index == 4 { 0 } else { general(index)? << (sib >> 6) };
        }
        // SAFETY: a displacement of as many bytes as the form says.
        let (bytes, displacement) = unsafe {
            match form {
                0 if base & 7 != 5 => (0, 0),
                1 => (1, i64::from(*code.add(length).cast::<i8>())),
                _ => (4, i64::from(code.add(length).cast::<i32>().read_unaligned())),
            }
        };
        length += bytes;
        address = match (form, low) {
            (0, 5) => registers[pointer] + i64::try_from(length).ok()? + displacement,
            (0, _) if base & 7 == 5 => return None,
            _ => general(base)? + displacement,
        };
    }
    let row = |i: i64| (address + i * stride) as *mut [u8; 64];
    let (kind, third) = (second & 3, usize::from(!second >> 3 & 15));
    match (operation, kind, form) {
        (0x49, 0, 0..3) => {
            // SAFETY: the instruction reads 64 bytes: palette, first row, reserved, bytes of a row, rows.
            let shapes = unsafe { *(address as *const [u8; 64]) };
            let expected = shapes[0] == 1 && (0..8).all(|i| shapes[16 + 2 * i] == 64 && shapes[48 + i] == 16);
            tiles.are_configured = expected.then_some(true)?;
        }
        (0x49, 0, 3) => tiles.are_configured = false,
        _ if !tiles.are_configured => return None,
        (0x49, 3, 3) => tiles.rows[register] = [[0; 64]; 16],
        // SAFETY: the instruction reads 16 rows of 64 bytes.
        (0x4b, 3, 0..3) => (0..).zip(&mut tiles.rows[register]).for_each(|(i, to)| *to = unsafe { *row(i) }),
        // SAFETY: the instruction writes 16 rows of 64 bytes.
        (0x4b, 2, 0..3) => (0..).zip(&tiles.rows[register]).for_each(|(i, from)| unsafe { *row(i) = *from }),
        (0x5c, 2, 3) => multiply(tiles, [register, usize::from(low), third]),
        _ => return None,
    }
    registers[pointer] += i64::try_from(length).ok()?;
    Some(())
}

/// `sums[i][j] += Σ left[i][2 p + h] right[p][2 j + h]`, of pairs of bfloat16.
fn multiply(tiles: &mut Tiles, [sums, left, right]: [usize; 3]) {
    let number = |row: &[u8; 64], at: usize| bf16::from_le_bytes([row[2 * at], row[2 * at + 1]]).to_f32();
    let [left, right] = [tiles.rows[left], tiles.rows[right]];
    for (to, row) in tiles.rows[sums].iter_mut().zip(&left) {
        let elements: [f32; 32] = std::array::from_fn(|p| number(row, p));
        for (j, sum) in to.chunks_exact_mut(4).enumerate() {
            let mut total = f32::from_le_bytes([sum[0], sum[1], sum[2], sum[3]]);
            for (p, pair) in right.iter().enumerate() {
                total +=
                    elements[2 * p] * number(pair, 2 * j) + elements[2 * p + 1] * number(pair, 2 * j + 1);
            }
            sum.copy_from_slice(&total.to_le_bytes());
        }
    }
}
