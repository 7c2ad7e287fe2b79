//! The calls of the CUDA driver. No other file makes one.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::sync::OnceLock;

use libloading::os::unix::Library;

use crate::error::{Error, Result};

/// The context of a device that torch shares with all code in the process: the primary one. Handles of the driver may be used
/// by any thread; a context lives as long as the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kernels) struct Context(usize);

/// A kernel that is loaded on a device, until the process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kernels) struct Function(usize);

/// Machine code that is loaded on a device, until the process ends.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels) struct Module(usize);

/// Node of a graph: one launch of a kernel. It lives as long as its graph.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels) struct Node(usize);

/// A stream of torch's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kernels) struct Stream(pub(in crate::kernels) usize);

/// Name of the driver's library, as torch opens it.
const LIBRARY: &str = "libcuda.so.1";

/// The numbers by which the driver knows what is asked of it.
mod numbers {
    use std::ffi::c_int;

    pub(super) const MULTIPROCESSORS: c_int = 16;
    pub(super) const CAPABILITY_MAJOR: c_int = 75;
    pub(super) const CAPABILITY_MINOR: c_int = 76;
    pub(super) const MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;
    pub(super) const CAPTURE_IS_ACTIVE: c_int = 1;
    pub(super) const FLOAT16: c_int = 6;
    pub(super) const BFLOAT16: c_int = 9;
    pub(super) const NOT_INTERLEAVED: c_int = 0;
    pub(super) const SWIZZLE_128_BYTES: c_int = 3;
    pub(super) const L2_PROMOTION_256_BYTES: c_int = 3;
    pub(super) const ZEROS_OUTSIDE: c_int = 0;
}

/// New parameters for a launch of a graph, as the driver lays them out.
#[repr(C)]
struct NodeParameters {
    function: usize,
    blocks: [u32; 3],
    threads: [u32; 3],
    shared: u32,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
    kernel: usize,
    context: usize,
}

/// Declares the calls: those that every driver has, then those that old ones lack. Handles are numbers here. All are looked up
/// when the driver is opened: what is missing is known before a step begins.
///
/// # Safety
/// Of each call: as the driver's manual says.
macro_rules! calls {
    (always { $($always:ident = $always_symbol:ident($($argument:ty),*);)* }
     perhaps { $($perhaps:ident = $perhaps_symbol:ident($($other:ty),*);)* }) => {
        struct Calls {
            $($always: unsafe extern "C" fn($($argument),*) -> c_int,)*
            $($perhaps: Option<unsafe extern "C" fn($($other),*) -> c_int>,)*
        }

        impl Calls {
            fn of(library: &Library) -> std::result::Result<Self, String> {
                // SAFETY: the types of the functions are those of the driver's header, by whose names they are looked up.
                unsafe {
                    Ok(Self {
                        $($always: *library.get(stringify!($always_symbol)).map_err(|_| missing(stringify!($always_symbol)))?,)*
                        $($perhaps: library.get(stringify!($perhaps_symbol)).ok().map(|found| *found),)*
                    })
                }
            }
        }
    };
}

fn missing(symbol: &str) -> String {
    format!("{LIBRARY} has no {symbol}")
}

calls! {
    always {
        init = cuInit(u32);
        version = cuDriverGetVersion(*mut c_int);
        device = cuDeviceGet(*mut c_int, c_int);
        device_name = cuDeviceGetName(*mut c_char, c_int, c_int);
        attribute = cuDeviceGetAttribute(*mut c_int, c_int, c_int);
        retain = cuDevicePrimaryCtxRetain(*mut usize, c_int);
        context = cuCtxGetCurrent(*mut usize);
        set_context = cuCtxSetCurrent(usize);
        capturing = cuStreamIsCapturing(usize, *mut c_int);
        load = cuModuleLoadData(*mut usize, *const c_void);
        function = cuModuleGetFunction(*mut usize, usize, *const c_char);
        set_attribute = cuFuncSetAttribute(usize, c_int, c_int);
        launch = cuLaunchKernel(usize, u32, u32, u32, u32, u32, u32, u32, usize, *mut *mut c_void, *mut *mut c_void);
        error_name = cuGetErrorName(c_int, *mut *const c_char);
    }
    perhaps {
        tensor_map = cuTensorMapEncodeTiled(
            *mut TensorMap, c_int, u32, *mut c_void, *const u64, *const u64, *const u32, *const u32, c_int, c_int, c_int, c_int
        );
        captured = cuStreamGetCaptureInfo_v3(
            usize, *mut c_int, *mut u64, *mut usize, *mut *const usize, *mut *const c_void, *mut usize
        );
        captured_before = cuStreamGetCaptureInfo_v2(
            usize, *mut c_int, *mut u64, *mut usize, *mut *const usize, *mut usize
        );
        set_parameters = cuGraphExecKernelNodeSetParams_v2(usize, usize, *const NodeParameters);
    }
}

impl fmt::Debug for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Calls")
    }
}

/// Properties of a device, asked for once.
#[derive(Clone, Debug)]
pub(in crate::kernels) struct Properties {
    pub(in crate::kernels) context: Context,
    pub(in crate::kernels) name: String,
    /// Major and minor number of what it can do, where the driver says.
    pub(in crate::kernels) capability: Option<(i32, i32)>,
    pub(in crate::kernels) multiprocessors: u32,
}

/// Numbers of blocks and threads of a launch, and the shared memory of a block in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kernels) struct Grid {
    pub(in crate::kernels) blocks: u32,
    pub(in crate::kernels) threads: u32,
    pub(in crate::kernels) shared: u32,
}

impl Grid {
    /// Of a number of blocks that was computed.
    pub(in crate::kernels) fn of(blocks: usize, threads: u32, shared: u32) -> Result<Self> {
        let blocks = u32::try_from(blocks).map_err(|_| Error::Internal(format!("{blocks} blocks")))?;
        Ok(Self { blocks, threads, shared })
    }
}

/// Description of matrices for tensor copies: as the driver encodes it, and as `hopper.cuh` lays it out.
#[repr(C, align(128))]
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels) struct TensorMap([u64; 16]);

/// Matrices of one shape for tensor copies. Lengths are in elements, of two bytes each.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels) struct Boxes {
    pub(in crate::kernels) first: usize,
    /// Columns, rows, matrices.
    pub(in crate::kernels) extent: [usize; 3],
    /// From row to row, from matrix to matrix: multiples of 16 bytes.
    pub(in crate::kernels) strides: [usize; 2],
    /// Rows of what one copy moves, and its columns.
    pub(in crate::kernels) moved: [u32; 2],
    /// True if the elements are float16 numbers, not bfloat16.
    pub(in crate::kernels) float16: bool,
}

/// The driver, opened when it is asked for first.
fn calls() -> Result<&'static Calls> {
    static CALLS: OnceLock<std::result::Result<Calls, String>> = OnceLock::new();
    let opened = CALLS.get_or_init(|| {
        // SAFETY: loading a library runs its initializers, and those of the driver do nothing that is seen.
        let library = unsafe { Library::new(LIBRARY) };
        let library = library.map_err(|_| format!("no driver was found ({LIBRARY})"))?;
        let calls = Calls::of(&library)?;
        std::mem::forget(library); // keeps its functions loaded
        Ok(calls)
    });
    opened.as_ref().map_err(|reason| Error::Cuda(reason.clone()))
}

fn check(calls: &Calls, what: &str, code: c_int) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    let mut name = std::ptr::null();
    // SAFETY: the driver writes the address of a string that stays, or leaves null.
    let said = unsafe {
        let _ = (calls.error_name)(code, &raw mut name);
        if name.is_null() {
            format!("error {code}")
        } else {
            CStr::from_ptr(name).to_string_lossy().into_owned()
        }
    };
    Err(Error::Cuda(format!("{what}: {said}")))
}

/// The newest version of CUDA that the driver has, as 12040 for 12.4.
pub(in crate::kernels) fn version() -> Result<i32> {
    let (calls, mut version) = (calls()?, 0);
    // SAFETY: the driver writes to what it is given.
    check(calls, "version", unsafe { (calls.version)(&raw mut version) })?;
    Ok(version)
}

/// Why launches of a graph cannot be given other parameters with this driver, if they cannot.
///
/// # Errors
/// [`Error::Cuda`] where there is no driver.
pub fn graphs_refusal() -> Result<Option<String>> {
    let calls = calls()?;
    let missing = if calls.captured.is_none() && calls.captured_before.is_none() {
        "cuStreamGetCaptureInfo (11.3)"
    } else if calls.set_parameters.is_none() {
        "cuGraphExecKernelNodeSetParams (12.0)"
    } else {
        return Ok(None);
    };
    Ok(Some(format!("the driver ({}) has no {missing}", versioned(version()?))))
}

/// A version as it is written, as 12.4 for 12040.
pub(in crate::kernels) fn versioned(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// Takes hold of a device's primary context and asks what the device is.
pub(in crate::kernels) fn open(ordinal: usize) -> Result<Properties> {
    let calls = calls()?;
    let number = c_int::try_from(ordinal).map_err(|_| Error::Cuda(format!("no device {ordinal}")))?;
    let (mut device, mut context, mut name) = (0, 0, [0; 128]);
    // SAFETY: the driver writes to what it is given, and `name` is as long as is said.
    unsafe {
        check(calls, "initialization", (calls.init)(0))?;
        check(calls, "device", (calls.device)(&raw mut device, number))?;
        check(calls, "primary context", (calls.retain)(&raw mut context, device))?;
        check(calls, "name", (calls.device_name)(name.as_mut_ptr(), 128, device))?;
    }
    let attribute = |which: c_int| -> Result<i32> {
        let mut value = 0;
        // SAFETY: the driver writes one number to `value`, which is of its type.
        check(calls, "attribute", unsafe { (calls.attribute)(&raw mut value, which, device) })?;
        Ok(value)
    };
    // SAFETY: the driver ends the name with a zero.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let capability = attribute(numbers::CAPABILITY_MAJOR).ok().zip(attribute(numbers::CAPABILITY_MINOR).ok());
    let multiprocessors = u32::try_from(attribute(numbers::MULTIPROCESSORS)?).unwrap_or(1);
    Ok(Properties { context: Context(context), name, capability, multiprocessors })
}

/// The context of the calling thread.
pub(in crate::kernels) fn current() -> Result<Context> {
    let (calls, mut context) = (calls()?, 0);
    // SAFETY: the driver writes to what it is given.
    check(calls, "current context", unsafe { (calls.context)(&raw mut context) })?;
    Ok(Context(context))
}

/// Makes a context that of the calling thread.
pub(in crate::kernels) fn set_current(context: Context) -> Result<()> {
    let calls = calls()?;
    // SAFETY: it is one that the driver gave.
    check(calls, "set context", unsafe { (calls.set_context)(context.0) })
}

/// Tests whether launches on the stream are put into a graph instead of being run.
pub(in crate::kernels) fn is_capturing(stream: Stream) -> Result<bool> {
    let (calls, mut status) = (calls()?, 0);
    // SAFETY: the stream is torch's and alive; the driver writes to what it is given.
    check(calls, "capture status", unsafe { (calls.capturing)(stream.0, &raw mut status) })?;
    Ok(status != 0)
}

/// Loads machine code, or PTX that ends with a zero, into the current context.
pub(in crate::kernels) fn load(image: &[u8]) -> Result<Module> {
    let (calls, mut module) = (calls()?, 0);
    // SAFETY: a cubin says how long it is, and PTX ends with its zero.
    check(calls, "loading a module", unsafe { (calls.load)(&raw mut module, image.as_ptr().cast()) })?;
    Ok(Module(module))
}

/// Encodes how tensor copies with the 128-byte swizzle see matrices. What lies outside of them is read as zero.
pub(in crate::kernels) fn tensor_map(boxes: &Boxes) -> Result<TensorMap> {
    let calls = calls()?;
    let encode =
        calls.tensor_map.ok_or_else(|| Error::Cuda("the driver has no cuTensorMapEncodeTiled".into()))?;
    let element = if boxes.float16 { numbers::FLOAT16 } else { numbers::BFLOAT16 };
    let extent = boxes.extent.map(|n| n as u64);
    let strides = boxes.strides.map(|n| 2 * n as u64);
    let [rows, columns] = boxes.moved;
    let (moved, steps) = ([columns, rows, 1], [1_u32; 3]);
    let mut map = TensorMap([0; 16]);
    // SAFETY: the driver reads as many numbers as there are dimensions (strides: one less), and writes the map.
    check(calls, "a tensor map", unsafe {
        encode(
            &raw mut map,
            element,
            3,
            boxes.first as *mut c_void,
            extent.as_ptr(),
            strides.as_ptr(),
            moved.as_ptr(),
            steps.as_ptr(),
            numbers::NOT_INTERLEAVED,
            numbers::SWIZZLE_128_BYTES,
            numbers::L2_PROMOTION_256_BYTES,
            numbers::ZEROS_OUTSIDE,
        )
    })?;
    Ok(map)
}

/// Finds a kernel, and lets its blocks have `shared` bytes of shared memory.
pub(in crate::kernels) fn function(module: Module, name: &str, shared: u32) -> Result<Function> {
    let (calls, mut function) = (calls()?, 0);
    let text = CString::new(name).map_err(|_| Error::Internal(format!("a kernel named {name:?}")))?;
    // SAFETY: the module is loaded, the name ends in a zero.
    check(calls, name, unsafe { (calls.function)(&raw mut function, module.0, text.as_ptr()) })?;
    if shared > 0 {
        let bytes = c_int::try_from(shared).unwrap_or(c_int::MAX);
        let most = numbers::MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function was found above.
        check(calls, name, unsafe { (calls.set_attribute)(function, most, bytes) })?;
    }
    Ok(Function(function))
}

/// Launches a kernel that takes one structure by value. Nothing is waited for.
///
/// # Safety
/// `Parameters` is laid out as the kernel's structure, and what it points to is memory of the device that is alive
/// when the kernel runs.
pub(in crate::kernels) unsafe fn launch<Parameters>(
    function: Function,
    grid: Grid,
    stream: Stream,
    parameters: &Parameters,
) -> Result<()> {
    let calls = calls()?;
    let mut arguments = [std::ptr::from_ref(parameters).cast_mut().cast::<c_void>()];
    let Grid { blocks, threads, shared } = grid;
    let (at, none) = (arguments.as_mut_ptr(), std::ptr::null_mut());
    // SAFETY: the driver copies the structure before it returns; the caller upholds the rest.
    check(calls, "launch", unsafe {
        (calls.launch)(function.0, blocks, 1, 1, threads, 1, 1, shared, stream.0, at, none)
    })
}

/// The node that the stream's last launch became in the graph that is captured.
pub(in crate::kernels) fn captured_node(stream: Stream) -> Result<Node> {
    let calls = calls()?;
    let (mut status, mut nodes, mut count) = (0, std::ptr::null(), 0);
    let (status_at, nodes_at, count_at) = (&raw mut status, &raw mut nodes, &raw mut count);
    let (id, graph, edges) = (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the stream is torch's and alive; the driver writes to what it is given, and leaves out what is null.
    let code = unsafe {
        match (calls.captured, calls.captured_before) {
            (Some(captured), _) => captured(stream.0, status_at, id, graph, nodes_at, edges, count_at),
            (None, Some(captured)) => captured(stream.0, status_at, id, graph, nodes_at, count_at),
            _ => return Err(Error::Cuda("the driver does not say what was captured".into())),
        }
    };
    check(calls, "captured launch", code)?;
    if status != numbers::CAPTURE_IS_ACTIVE || count != 1 {
        return Err(Error::Cuda(format!("a captured launch became {count} nodes (status {status})")));
    }
    // SAFETY: there is one; the driver keeps the list until the next call for this stream.
    Ok(Node(unsafe { *nodes }))
}

/// Gives a launch of a graph that is ready to run other parameters, for the replays that follow.
///
/// # Safety
/// As [`launch`], for every replay until the parameters are set again. `graph` was instantiated from the graph that the node
/// belongs to.
pub(in crate::kernels) unsafe fn set_parameters<Parameters>(
    graph: usize,
    node: Node,
    function: Function,
    grid: Grid,
    parameters: &Parameters,
) -> Result<()> {
    let calls = calls()?;
    let set =
        calls.set_parameters.ok_or_else(|| Error::Cuda("the driver sets no parameters of graphs".into()))?;
    let mut arguments = [std::ptr::from_ref(parameters).cast_mut().cast::<c_void>()];
    let how = NodeParameters {
        function: function.0,
        blocks: [grid.blocks, 1, 1],
        threads: [grid.threads, 1, 1],
        shared: grid.shared,
        parameters: arguments.as_mut_ptr(),
        extra: std::ptr::null_mut(),
        kernel: 0,
        context: 0,
    };
    // SAFETY: the driver copies the structure before it returns; the caller upholds the rest.
    check(calls, "parameters of a replay", unsafe { set(graph, node.0, &raw const how) })
}
