//! The calls of the CUDA driver. No other file makes one.

use std::ffi::{CStr, CString, c_int, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUdevice_attribute, CUfunction_attribute};

use crate::error::{Error, Result};

/// The context of a device that torch shares with everybody in the process: the primary one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kernels) struct Context(sys::CUcontext);

/// A kernel that is loaded on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kernels) struct Function(sys::CUfunction);

/// Machine code that is loaded on a device, until the process ends.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels) struct Module(sys::CUmodule);

/// Node of a graph: one launch of a kernel.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels) struct Node(sys::CUgraphNode);

/// A stream of torch's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kernels) struct Stream(pub(in crate::kernels) usize);

// SAFETY: handles of the driver may be used by any thread; what they stand for lives as long as the process.
unsafe impl Send for Context {}
// SAFETY: handles of the driver may be used by any thread; a context lives as long as the process.
unsafe impl Sync for Context {}
// SAFETY: handles of the driver may be used by any thread; a function lives as long as the process.
unsafe impl Send for Function {}
// SAFETY: handles of the driver may be used by any thread; a module lives as long as the process.
unsafe impl Send for Module {}

// SAFETY: handles of the driver may be used by any thread; a function lives as long as the process.
unsafe impl Sync for Function {}
// SAFETY: handles of the driver may be used by any thread; a node lives as long as its graph.
unsafe impl Send for Node {}
// SAFETY: handles of the driver may be used by any thread; a node lives as long as its graph.
unsafe impl Sync for Node {}

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

/// Tests whether a driver can be loaded; looked for once.
pub(in crate::kernels) fn is_present() -> bool {
    static PRESENT: OnceLock<bool> = OnceLock::new();
    // SAFETY: loading a library runs its initializers, and those of the driver do nothing that is seen.
    *PRESENT.get_or_init(|| unsafe { sys::is_culib_present() })
}

fn check(what: &str, code: sys::CUresult) -> Result<()> {
    if code == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut name = std::ptr::null();
    // SAFETY: the driver writes the address of a string that stays, or leaves null.
    let said = unsafe {
        let _ = sys::cuGetErrorName(code, &raw mut name);
        if name.is_null() { format!("{code:?}") } else { CStr::from_ptr(name).to_string_lossy().into_owned() }
    };
    Err(Error::Cuda(format!("{what}: {said}")))
}

/// Takes hold of a device's primary context and asks what the device is.
pub(in crate::kernels) fn open(ordinal: usize) -> Result<Properties> {
    if !is_present() {
        return Err(Error::Cuda("no driver was found (libcuda.so.1)".into()));
    }
    let number = c_int::try_from(ordinal).map_err(|_| Error::Cuda(format!("no device {ordinal}")))?;
    let (mut device, mut context, mut name) = (0, std::ptr::null_mut(), [0; 128]);
    // SAFETY: the driver writes to what it is given, and `name` is as long as is said.
    unsafe {
        check("initialization", sys::cuInit(0))?;
        check("device", sys::cuDeviceGet(&raw mut device, number))?;
        check("primary context", sys::cuDevicePrimaryCtxRetain(&raw mut context, device))?;
        check("name", sys::cuDeviceGetName(name.as_mut_ptr(), 128, device))?;
    }
    let attribute = |which: CUdevice_attribute| -> Result<i32> {
        let mut value = 0;
        // SAFETY: the driver writes one number to `value`, which is of its type.
        check("attribute", unsafe { sys::cuDeviceGetAttribute(&raw mut value, which, device) })?;
        Ok(value)
    };
    // SAFETY: the driver ends the name with a zero.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    let capability = major.ok().zip(minor.ok());
    let multiprocessors = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    let multiprocessors = u32::try_from(multiprocessors).unwrap_or(1);
    Ok(Properties { context: Context(context), name, capability, multiprocessors })
}

/// The context of the calling thread.
pub(in crate::kernels) fn current() -> Result<Context> {
    let mut context = std::ptr::null_mut();
    // SAFETY: the driver writes to what it is given.
    check("current context", unsafe { sys::cuCtxGetCurrent(&raw mut context) })?;
    Ok(Context(context))
}

/// Makes a context that of the calling thread.
pub(in crate::kernels) fn set_current(context: Context) -> Result<()> {
    // SAFETY: it is one that the driver gave.
    check("set context", unsafe { sys::cuCtxSetCurrent(context.0) })
}

/// Tests whether launches on the stream are put into a graph instead of being run.
pub(in crate::kernels) fn is_capturing(stream: Stream) -> Result<bool> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the stream is torch's and alive; the driver writes to what it is given.
    check("capture status", unsafe { sys::cuStreamIsCapturing(stream.0 as sys::CUstream, &raw mut status) })?;
    Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// Loads machine code into the current context.
pub(in crate::kernels) fn load(image: &[u8]) -> Result<Module> {
    let mut module = std::ptr::null_mut();
    // SAFETY: a cubin says how long it is.
    check("loading a module", unsafe { sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast()) })?;
    Ok(Module(module))
}

/// Encodes how tensor copies with the 128-byte swizzle see matrices. What lies outside of them is read as zero.
pub(in crate::kernels) fn tensor_map(boxes: &Boxes) -> Result<TensorMap> {
    use sys::CUtensorMapDataType as Element;
    let element = if boxes.float16 {
        Element::CU_TENSOR_MAP_DATA_TYPE_FLOAT16
    } else {
        Element::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    };
    let extent = boxes.extent.map(|n| n as u64);
    let strides = boxes.strides.map(|n| 2 * n as u64);
    let [rows, columns] = boxes.moved;
    let (moved, steps) = ([columns, rows, 1], [1_u32; 3]);
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    // SAFETY: the driver reads as many numbers as there are dimensions (strides: one less), and writes the map.
    check("a tensor map", unsafe {
        sys::cuTensorMapEncodeTiled(
            &raw mut map,
            element,
            3,
            boxes.first as *mut c_void,
            extent.as_ptr(),
            strides.as_ptr(),
            moved.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    })?;
    Ok(TensorMap(map.opaque))
}

/// Finds a kernel, and lets its blocks have `shared` bytes of shared memory.
pub(in crate::kernels) fn function(module: Module, name: &str, shared: u32) -> Result<Function> {
    let text = CString::new(name).map_err(|_| Error::Internal(format!("a kernel named {name:?}")))?;
    let mut function = std::ptr::null_mut();
    // SAFETY: the module is loaded, the name ends in a zero.
    check(name, unsafe { sys::cuModuleGetFunction(&raw mut function, module.0, text.as_ptr()) })?;
    if shared > 0 {
        let most = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let bytes = c_int::try_from(shared).unwrap_or(c_int::MAX);
        // SAFETY: the function was found above.
        check(name, unsafe { sys::cuFuncSetAttribute(function, most, bytes) })?;
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
    let mut arguments = [std::ptr::from_ref(parameters).cast_mut().cast::<c_void>()];
    // SAFETY: the driver copies the structure before it returns; the caller upholds the rest.
    check("launch", unsafe {
        sys::cuLaunchKernel(
            function.0,
            grid.blocks,
            1,
            1,
            grid.threads,
            1,
            1,
            grid.shared,
            stream.0 as sys::CUstream,
            arguments.as_mut_ptr(),
            std::ptr::null_mut(),
        )
    })
}

/// The node that the stream's last launch became in the graph that is captured.
pub(in crate::kernels) fn captured_node(stream: Stream) -> Result<Node> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let (mut nodes, mut count) = (std::ptr::null(), 0);
    // SAFETY: the stream is torch's and alive; the driver writes to what it is given, and leaves out what is null.
    check("captured launch", unsafe {
        sys::cuStreamGetCaptureInfo_v3(
            stream.0 as sys::CUstream,
            &raw mut status,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            &raw mut nodes,
            std::ptr::null_mut(),
            &raw mut count,
        )
    })?;
    if status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE || count != 1 {
        return Err(Error::Cuda(format!("a captured launch became {count} nodes ({status:?})")));
    }
    // SAFETY: there is one; the driver keeps the list until the next call for this stream.
    Ok(Node(unsafe { *nodes }))
}

/// Gives a launch of a graph that is ready to run other parameters, for the replays that follow.
///
/// # Safety
/// As [`launch`], for every replay until the parameters are set anew; `graph` is an executable graph of the one that the
/// node belongs to.
pub(in crate::kernels) unsafe fn set_parameters<Parameters>(
    graph: usize,
    node: Node,
    function: Function,
    grid: Grid,
    parameters: &Parameters,
) -> Result<()> {
    let mut arguments = [std::ptr::from_ref(parameters).cast_mut().cast::<c_void>()];
    let how = sys::CUDA_KERNEL_NODE_PARAMS {
        func: function.0,
        gridDimX: grid.blocks,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: grid.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: grid.shared,
        kernelParams: arguments.as_mut_ptr(),
        extra: std::ptr::null_mut(),
        kern: std::ptr::null_mut(),
        ctx: std::ptr::null_mut(),
    };
    // SAFETY: the driver copies the structure before it returns; the caller upholds the rest.
    check("parameters of a replay", unsafe {
        sys::cuGraphExecKernelNodeSetParams_v2(graph as sys::CUgraphExec, node.0, &raw const how)
    })
}
