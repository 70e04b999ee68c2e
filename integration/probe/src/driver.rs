//! The two driver libraries, as a program loads them that was not linked against them. All unsafe code of the probe
//! is here.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    fmt, mem, ptr,
};

/// A call that did not work.
#[derive(Debug)]
pub struct Failure {
    call: &'static str,
    reason: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.call, self.reason)
    }
}

impl std::error::Error for Failure {}

/// A loaded library. It is never unloaded.
struct Library(*mut c_void);

impl Library {
    fn open(name: &CStr, call: &'static str) -> Result<Self, Failure> {
        // SAFETY: `name` is a C string. Loading runs the library's initialisers, which is what it is for.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        if handle.is_null() {
            // SAFETY: after a failed `dlopen`, `dlerror` returns a C string that lives until the next call.
            let reason = unsafe { CStr::from_ptr(libc::dlerror()) };
            return Err(Failure { call, reason: reason.to_string_lossy().into_owned() });
        }
        Ok(Self(handle))
    }

    fn symbol(&self, name: &'static CStr) -> Result<*mut c_void, Failure> {
        // SAFETY: the handle is of a library that stays loaded, `name` is a C string.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if address.is_null() {
            let call = name.to_str().unwrap_or("dlsym");
            return Err(Failure { call, reason: "not exported".into() });
        }
        Ok(address)
    }
}

/// Declares a struct with one function pointer a line, looked up by the name of the exported symbol.
macro_rules! api {
    ($api:ident { $($field:ident: $symbol:literal = fn($($argument:ty),*);)* }) => {
        struct $api { $($field: unsafe extern "C" fn($($argument),*) -> c_int),* }

        impl $api {
            fn find(library: &Library) -> Result<Self, Failure> {
                Ok(Self {
                    $($field: {
                        let address = library.symbol($symbol)?;
                        // SAFETY: the symbol is a function of this signature, by cuda.h and nvml.h.
                        unsafe { mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> c_int>(address) }
                    }),*
                })
            }
        }
    };
}

api!(CudaApi {
    init: c"cuInit" = fn(c_uint);
    driver_version: c"cuDriverGetVersion" = fn(*mut c_int);
    device_count: c"cuDeviceGetCount" = fn(*mut c_int);
    device_get: c"cuDeviceGet" = fn(*mut c_int, c_int);
    device_name: c"cuDeviceGetName" = fn(*mut c_char, c_int, c_int);
    device_uuid: c"cuDeviceGetUuid" = fn(*mut [u8; 16], c_int);
    device_total: c"cuDeviceTotalMem_v2" = fn(*mut usize, c_int);
    retain: c"cuDevicePrimaryCtxRetain" = fn(*mut *mut c_void, c_int);
    set_current: c"cuCtxSetCurrent" = fn(*mut c_void);
    mem_info: c"cuMemGetInfo_v2" = fn(*mut usize, *mut usize);
    mem_alloc: c"cuMemAlloc_v2" = fn(*mut u64, usize);
    mem_free: c"cuMemFree_v2" = fn(u64);
    module_load: c"cuModuleLoadData" = fn(*mut *mut c_void, *const c_char);
    module_function: c"cuModuleGetFunction" = fn(*mut *mut c_void, *mut c_void, *const c_char);
    stream_create: c"cuStreamCreate" = fn(*mut *mut c_void, c_uint);
    stream_synchronize: c"cuStreamSynchronize" = fn(*mut c_void);
    context_synchronize: c"cuCtxSynchronize" = fn();
    launch: c"cuLaunchKernel" = fn(
        *mut c_void, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, *mut c_void, *mut *mut c_void,
        *mut *mut c_void
    );
    capture_begin: c"cuStreamBeginCapture_v2" = fn(*mut c_void, c_int);
    capture_end: c"cuStreamEndCapture" = fn(*mut c_void, *mut *mut c_void);
    graph_instantiate: c"cuGraphInstantiateWithFlags" = fn(*mut *mut c_void, *mut c_void, u64);
    graph_launch: c"cuGraphLaunch" = fn(*mut c_void, *mut c_void);
});

api!(NvmlApi {
    init: c"nvmlInit_v2" = fn();
    count: c"nvmlDeviceGetCount_v2" = fn(*mut c_uint);
    by_index: c"nvmlDeviceGetHandleByIndex_v2" = fn(c_uint, *mut *mut c_void);
    uuid: c"nvmlDeviceGetUUID" = fn(*mut c_void, *mut c_char, c_uint);
    memory: c"nvmlDeviceGetMemoryInfo" = fn(*mut c_void, *mut [u64; 3]);
});

/// libcuda, initialised.
pub struct Cuda(CudaApi);

/// NVML, initialised.
pub struct Nvml(NvmlApi);

/// A loaded module.
pub struct Module(*mut c_void);

/// A function of one.
pub struct Function(*mut c_void);

/// A stream.
pub struct Stream(*mut c_void);

/// A graph that can be launched.
pub struct Graph(*mut c_void);

fn check(call: &'static str, code: c_int) -> Result<(), Failure> {
    if code == 0 { Ok(()) } else { Err(Failure { call, reason: format!("error {code}") }) }
}

fn text(buffer: &[c_char]) -> String {
    let bytes = buffer.iter().take_while(|&&c| c != 0).map(|c| c.to_ne_bytes()[0]).collect::<Vec<_>>();
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Cuda {
    /// Loads and initialises libcuda, or another file in its place.
    pub fn load(file: &CStr) -> Result<Self, Failure> {
        let api = CudaApi::find(&Library::open(file, "dlopen libcuda.so.1")?)?;
        // SAFETY: `cuInit` takes a number.
        check("cuInit", unsafe { (api.init)(0) })?;
        Ok(Self(api))
    }

    /// CUDA version of the driver.
    pub fn version(&self) -> Result<i32, Failure> {
        let mut version = 0;
        // SAFETY: the pointer is to a live `int`.
        check("cuDriverGetVersion", unsafe { (self.0.driver_version)(&raw mut version) })?;
        Ok(version)
    }

    /// How many GPUs there are.
    pub fn count(&self) -> Result<i32, Failure> {
        let mut count = 0;
        // SAFETY: the pointer is to a live `int`.
        check("cuDeviceGetCount", unsafe { (self.0.device_count)(&raw mut count) })?;
        Ok(count)
    }

    /// Name, UUID and memory in bytes of a GPU.
    pub fn device(&self, ordinal: i32) -> Result<(String, String, u64), Failure> {
        let device = self.handle(ordinal)?;
        let mut name = [0; 128];
        let mut uuid = [0; 16];
        let mut total = 0;
        // SAFETY: the buffer is as long as it is said to be.
        check("cuDeviceGetName", unsafe { (self.0.device_name)(name.as_mut_ptr(), 128, device) })?;
        // SAFETY: the pointer is to a live `CUuuid`.
        check("cuDeviceGetUuid", unsafe { (self.0.device_uuid)(&raw mut uuid, device) })?;
        // SAFETY: the pointer is to a live `size_t`.
        check("cuDeviceTotalMem", unsafe { (self.0.device_total)(&raw mut total, device) })?;
        let mut spelled = String::from("GPU");
        for (at, byte) in uuid.iter().enumerate() {
            if matches!(at, 0 | 4 | 6 | 8 | 10) {
                spelled.push('-');
            }
            spelled.push_str(&format!("{byte:02x}"));
        }
        Ok((text(&name), spelled, total as u64))
    }

    /// Makes the GPU's primary context current.
    pub fn use_device(&self, ordinal: i32) -> Result<(), Failure> {
        let device = self.handle(ordinal)?;
        let mut context = ptr::null_mut();
        // SAFETY: the pointer is to a live `CUcontext`.
        check("cuDevicePrimaryCtxRetain", unsafe { (self.0.retain)(&raw mut context, device) })?;
        // SAFETY: the driver has just returned this context.
        check("cuCtxSetCurrent", unsafe { (self.0.set_current)(context) })
    }

    /// Free and total bytes of the current GPU.
    pub fn memory(&self) -> Result<(u64, u64), Failure> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both pointers are to live `size_t`.
        check("cuMemGetInfo", unsafe { (self.0.mem_info)(&raw mut free, &raw mut total) })?;
        Ok((free as u64, total as u64))
    }

    /// Allocates device memory; an error is the `CUresult`.
    pub fn alloc(&self, bytes: u64) -> Result<u64, i32> {
        let mut pointer = 0;
        let size = usize::try_from(bytes).unwrap_or(usize::MAX);
        // SAFETY: the pointer is to a live `CUdeviceptr`.
        match unsafe { (self.0.mem_alloc)(&raw mut pointer, size) } {
            0 => Ok(pointer),
            code => Err(code),
        }
    }

    /// Frees device memory.
    pub fn free(&self, pointer: u64) -> Result<(), Failure> {
        // SAFETY: a number that the driver checks.
        check("cuMemFree", unsafe { (self.0.mem_free)(pointer) })
    }

    /// Loads a module of PTX text.
    pub fn module(&self, text: &CStr) -> Result<Module, Failure> {
        let mut module = ptr::null_mut();
        // SAFETY: the pointer is to a live `CUmodule`, the text a C string.
        check("cuModuleLoadData", unsafe { (self.0.module_load)(&raw mut module, text.as_ptr()) })?;
        Ok(Module(module))
    }

    /// A function of a module.
    pub fn function(&self, module: &Module, name: &CStr) -> Result<Function, Failure> {
        let mut function = ptr::null_mut();
        // SAFETY: the pointer is to a live `CUfunction`, the module a loaded one, the name a C string.
        let code = unsafe { (self.0.module_function)(&raw mut function, module.0, name.as_ptr()) };
        check("cuModuleGetFunction", code)?;
        Ok(Function(function))
    }

    /// A stream that does not wait for the default stream.
    pub fn stream(&self) -> Result<Stream, Failure> {
        let mut stream = ptr::null_mut();
        // SAFETY: the pointer is to a live `CUstream`.
        check("cuStreamCreate", unsafe { (self.0.stream_create)(&raw mut stream, 1) })?;
        Ok(Stream(stream))
    }

    /// Launches a function that takes no parameters.
    pub fn launch(&self, function: &Function, blocks: u32, stream: &Stream) -> Result<(), Failure> {
        let none: *mut *mut c_void = ptr::null_mut();
        // SAFETY: a function of a loaded module without parameters, a live stream.
        let code = unsafe { (self.0.launch)(function.0, blocks, 1, 1, 256, 1, 1, 0, stream.0, none, none) };
        check("cuLaunchKernel", code)
    }

    /// Waits for a stream.
    pub fn synchronize(&self, stream: &Stream) -> Result<(), Failure> {
        // SAFETY: a live stream.
        check("cuStreamSynchronize", unsafe { (self.0.stream_synchronize)(stream.0) })
    }

    /// Waits for the whole context.
    pub fn synchronize_all(&self) -> Result<(), Failure> {
        // SAFETY: it takes nothing.
        check("cuCtxSynchronize", unsafe { (self.0.context_synchronize)() })
    }

    /// Makes a graph of what is launched meanwhile in a stream.
    pub fn graph(
        &self,
        stream: &Stream,
        work: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<Graph, Failure> {
        let (mut graph, mut exec) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a live stream.
        check("cuStreamBeginCapture", unsafe { (self.0.capture_begin)(stream.0, 0) })?;
        work()?;
        // SAFETY: the pointer is to a live `CUgraph`.
        check("cuStreamEndCapture", unsafe { (self.0.capture_end)(stream.0, &raw mut graph) })?;
        // SAFETY: the pointer is to a live `CUgraphExec`, the graph a live one.
        check("cuGraphInstantiate", unsafe { (self.0.graph_instantiate)(&raw mut exec, graph, 0) })?;
        Ok(Graph(exec))
    }

    /// Launches a graph.
    pub fn launch_graph(&self, graph: &Graph, stream: &Stream) -> Result<(), Failure> {
        // SAFETY: a live graph and a live stream.
        check("cuGraphLaunch", unsafe { (self.0.graph_launch)(graph.0, stream.0) })
    }

    fn handle(&self, ordinal: i32) -> Result<c_int, Failure> {
        let mut device = 0;
        // SAFETY: the pointer is to a live `CUdevice`.
        check("cuDeviceGet", unsafe { (self.0.device_get)(&raw mut device, ordinal) })?;
        Ok(device)
    }
}

impl Nvml {
    /// Loads and initialises NVML.
    pub fn load() -> Result<Self, Failure> {
        let api = NvmlApi::find(&Library::open(c"libnvidia-ml.so.1", "dlopen libnvidia-ml.so.1")?)?;
        // SAFETY: it takes nothing.
        check("nvmlInit", unsafe { (api.init)() })?;
        Ok(Self(api))
    }

    /// How many GPUs there are.
    pub fn count(&self) -> Result<u32, Failure> {
        let mut count = 0;
        // SAFETY: the pointer is to a live `unsigned int`.
        check("nvmlDeviceGetCount", unsafe { (self.0.count)(&raw mut count) })?;
        Ok(count)
    }

    /// UUID, and total, free and used bytes of a GPU.
    pub fn device(&self, index: u32) -> Result<(String, u64, u64, u64), Failure> {
        let mut handle = ptr::null_mut();
        let mut uuid = [0; 96];
        // nvmlMemory_t: total, free, used.
        let mut memory = [0; 3];
        // SAFETY: the pointer is to a live handle.
        check("nvmlDeviceGetHandleByIndex", unsafe { (self.0.by_index)(index, &raw mut handle) })?;
        // SAFETY: the buffer is as long as it is said to be.
        check("nvmlDeviceGetUUID", unsafe { (self.0.uuid)(handle, uuid.as_mut_ptr(), 96) })?;
        // SAFETY: the pointer is to three live `unsigned long long`, which is what the struct is.
        check("nvmlDeviceGetMemoryInfo", unsafe { (self.0.memory)(handle, &raw mut memory) })?;
        Ok((text(&uuid), memory[0], memory[1], memory[2]))
    }
}
