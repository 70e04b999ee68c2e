//! Modules, libraries and the functions and variables in them. Of PTX text, the names are read; of a binary image, every name
//! is taken to be there. Loading a module takes what the machine's file says; its variables take their size.

use std::{
    collections::HashMap,
    ffi::{CString, c_char, c_int, c_void},
    sync::Arc,
};

use crate::{
    context::{Context, current},
    driver::{Driver, Registry, Tables, charge, driver, tables},
    ffi::{INVALID_HANDLE, INVALID_VALUE, In, NOT_FOUND, Out, Outcome, Text, api},
    image::Image,
    memory::Kind,
};

/// A loaded module.
struct Module {
    context: &'static Context,
    image: Arc<Image>,
    taken: u64,
    functions: HashMap<String, u64>,
    variables: HashMap<String, (u64, u64)>,
}

/// A function of a module, or a kernel of a library, which belongs to no context.
struct Function {
    name: CString,
    of: Of,
    /// Nanoseconds that a launch takes.
    duration: u64,
    /// The shape of a block, for launches of the old way.
    block: [u32; 3],
    attributes: HashMap<c_int, c_int>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    Module(u64),
    Library(u64),
}

/// A library: an image that is loaded into each context when it is first used there.
struct Library {
    image: Arc<Image>,
    modules: HashMap<u64, u64>,
    kernels: HashMap<String, u64>,
}

/// The process's modules, libraries and functions.
#[derive(Default)]
pub(crate) struct Modules {
    all: Registry<Module>,
    libraries: Registry<Library>,
    functions: Registry<Function>,
}

impl Modules {
    /// Whether a handle is that of something that can be launched.
    pub(crate) fn launchable(&mut self, function: u64) -> Outcome {
        self.functions.get(function, INVALID_HANDLE).map(drop)
    }

    /// Nanoseconds that a launch of it takes.
    pub(crate) fn duration(&mut self, function: u64) -> Outcome<u64> {
        self.functions.get(function, INVALID_HANDLE).map(|function| function.duration)
    }

    pub(crate) fn set_block(&mut self, function: u64, block: [u32; 3]) -> Outcome {
        self.functions.get(function, INVALID_HANDLE)?.block = block;
        Ok(())
    }

    pub(crate) fn block(&mut self, function: u64) -> Outcome<[u32; 3]> {
        self.functions.get(function, INVALID_HANDLE).map(|function| function.block)
    }

    fn function(&mut self, module: u64, name: &[u8]) -> Outcome<u64> {
        let name = std::str::from_utf8(name).map_err(|_| NOT_FOUND)?;
        let of = self.all.get(module, INVALID_HANDLE)?;
        if let Some(known) = of.functions.get(name) {
            return Ok(*known);
        }
        if !of.image.has(name) {
            return Err(NOT_FOUND);
        }
        let duration = of.image.duration(name);
        let new = self.functions.add(Function::new(name, Of::Module(module), duration)?);
        self.all.get(module, INVALID_HANDLE)?.functions.insert(name.to_owned(), new);
        Ok(new)
    }

    fn kernel(&mut self, library: u64, name: &[u8]) -> Outcome<u64> {
        let name = std::str::from_utf8(name).map_err(|_| NOT_FOUND)?;
        let of = self.libraries.get(library, INVALID_HANDLE)?;
        if let Some(known) = of.kernels.get(name) {
            return Ok(*known);
        }
        if !of.image.has(name) {
            return Err(NOT_FOUND);
        }
        let duration = of.image.duration(name);
        let new = self.functions.add(Function::new(name, Of::Library(library), duration)?);
        self.libraries.get(library, INVALID_HANDLE)?.kernels.insert(name.to_owned(), new);
        Ok(new)
    }
}

impl Function {
    fn new(name: &str, of: Of, duration: u64) -> Outcome<Self> {
        let name = CString::new(name).map_err(|_| NOT_FOUND)?;
        Ok(Self { name, of, duration, block: [1; 3], attributes: HashMap::new() })
    }

    /// `CUfunction_attribute`: what is set, or what an ordinary kernel has.
    fn attribute(&self, which: c_int, capability: (u32, u32)) -> Outcome<c_int> {
        if let Some(set) = self.attributes.get(&which) {
            return Ok(*set);
        }
        let binary = c_int::try_from(capability.0 * 10 + capability.1).unwrap_or(0);
        Ok(match which {
            0 => 1024,
            4 => 32,
            5 | 6 => binary,
            8 => 48 << 10,
            9 => -1,
            1..=3 | 7 | 10..=17 => 0,
            _ => return Err(INVALID_VALUE),
        })
    }
}

impl Tables {
    fn load(&mut self, driver: &Driver, context: &'static Context, image: Arc<Image>) -> Outcome<u64> {
        let taken = driver.state(context.gpu).facts.module;
        charge(driver, self, context.gpu, taken)?;
        let mut variables = HashMap::new();
        if let Image::Text { variables: wanted, .. } = &*image {
            for (name, bytes) in wanted.iter().filter(|(_, bytes)| *bytes > 0) {
                match self.allocate(driver, context, *bytes) {
                    Ok(at) => {
                        if let Some(block) = self.blocks.at(at) {
                            block.kind = Kind::Variable;
                        }
                        variables.insert(name.clone(), (at, *bytes));
                    }
                    Err(error) => {
                        for (at, _) in variables.into_values() {
                            self.forget_block(driver, at);
                        }
                        driver.discharge(context.gpu, taken);
                        return Err(error);
                    }
                }
            }
        }
        Ok(self.modules.all.add(Module { context, image, taken, functions: HashMap::new(), variables }))
    }

    fn unload(&mut self, driver: &Driver, handle: u64) -> Outcome {
        let module = self.modules.all.remove(handle, INVALID_HANDLE)?;
        for function in module.functions.into_values() {
            let _ = self.modules.functions.remove(function, INVALID_HANDLE);
        }
        for (at, _) in module.variables.into_values() {
            self.forget_block(driver, at);
        }
        driver.discharge(module.context.gpu, module.taken);
        Ok(())
    }

    /// Unloads the modules of a context.
    pub(crate) fn release_modules_of(&mut self, driver: &Driver, context: &'static Context) {
        let of_context = self.modules.all.iter().filter(|(_, module)| std::ptr::eq(module.context, context));
        let of_context: Vec<u64> = of_context.map(|(handle, _)| handle).collect();
        for handle in of_context {
            let _ = self.unload(driver, handle);
        }
        for library in self.modules.libraries.values() {
            library.modules.remove(&context.handle());
        }
    }

    /// The module of a library in a context.
    fn module_of(&mut self, driver: &Driver, library: u64, context: &'static Context) -> Outcome<u64> {
        let of = self.modules.libraries.get(library, INVALID_HANDLE)?;
        if let Some(module) = of.modules.get(&context.handle()) {
            return Ok(*module);
        }
        let image = Arc::clone(&of.image);
        let module = self.load(driver, context, image)?;
        self.modules.libraries.get(library, INVALID_HANDLE)?.modules.insert(context.handle(), module);
        Ok(module)
    }

    fn variable(&mut self, module: u64, name: Text) -> Outcome<(u64, usize)> {
        let name = std::str::from_utf8(name.bytes()?).map_err(|_| NOT_FOUND)?;
        let (at, bytes) =
            *self.modules.all.get(module, INVALID_HANDLE)?.variables.get(name).ok_or(NOT_FOUND)?;
        Ok((at, usize::try_from(bytes).unwrap_or(0)))
    }
}

fn load(to: Out<u64>, image: Outcome<Image>) -> Outcome {
    let driver = driver()?;
    let context = current()?;
    to.wanted()?;
    let module = driver.tables().load(driver, context, Arc::new(image?))?;
    to.put(module)
}

fn load_library(to: Out<u64>, image: Outcome<Image>) -> Outcome {
    let driver = driver()?;
    to.wanted()?;
    let library = Library { image: Arc::new(image?), modules: HashMap::new(), kernels: HashMap::new() };
    to.put(driver.tables().modules.libraries.add(library))
}

fn capability(gpu: usize) -> Outcome<(u32, u32)> {
    let facts = &driver()?.state(gpu).facts;
    Ok((facts.major, facts.minor_capability))
}

fn set_attribute(function: u64, which: c_int, value: c_int) -> Outcome {
    // MAX_DYNAMIC_SHARED_SIZE_BYTES and those after it, except what the compiler decides.
    if !matches!(which, 8 | 9 | 11..=15) {
        return Err(INVALID_VALUE);
    }
    tables()?.modules.functions.get(function, INVALID_HANDLE)?.attributes.insert(which, value);
    Ok(())
}

fn name_of(to: Out<*const c_char>, function: u64) -> Outcome {
    to.put(tables()?.modules.functions.get(function, INVALID_HANDLE)?.name.as_ptr())
}

/// Blocks of a kernel that a multiprocessor runs at once: as many as its threads allow.
fn active_blocks(function: u64, block: c_int) -> Outcome<c_int> {
    current()?;
    tables()?.modules.launchable(function)?;
    if block <= 0 { Err(INVALID_VALUE) } else { Ok((2048 / block).min(32)) }
}

api! {
    fn cuModuleLoad(module: Out<u64>, path: Text) { load(module, Image::file(path)) }

    fn cuModuleLoadData, cuModuleLoadFatBinary(module: Out<u64>, image: In<[u8; 4]>) { load(module, Image::at(image)) }

    fn cuModuleLoadDataEx(
        module: Out<u64>, image: In<[u8; 4]>, count: u32, options: *const c_int, values: *const c_void
    ) {
        let _ = (count, options, values);
        load(module, Image::at(image))
    }

    fn cuModuleUnload(module: u64) {
        let driver = driver()?;
        current()?;
        driver.tables().unload(driver, module)
    }

    fn cuModuleGetLoadingMode(mode: Out<c_int>) {
        driver()?;
        // CU_MODULE_EAGER_LOADING.
        mode.put(1)
    }

    fn cuModuleGetFunction(function: Out<u64>, module: u64, name: Text) {
        current()?;
        function.wanted()?;
        function.put(tables()?.modules.function(module, name.bytes()?)?)
    }

    fn cuModuleGetGlobal_v2(address: Out<u64>, bytes: Out<usize>, module: u64, name: Text) {
        current()?;
        let (at, size) = tables()?.variable(module, name)?;
        address.put_if_wanted(at);
        bytes.put_if_wanted(size);
        Ok(())
    }

    fn cuModuleGetFunctionCount(count: Out<u32>, module: u64) {
        let mut tables = tables()?;
        count.put(match &*tables.modules.all.get(module, INVALID_HANDLE)?.image {
            Image::Binary => 0,
            Image::Text { functions, .. } => u32::try_from(functions.len()).unwrap_or(0),
        })
    }

    fn cuLibraryLoadData(
        library: Out<u64>, image: In<[u8; 4]>, options: *const c_int, values: *const c_void, count: u32,
        library_options: *const c_int, library_values: *const c_void, library_count: u32,
    ) {
        let _ = (options, values, count, library_options, library_values, library_count);
        load_library(library, Image::at(image))
    }

    fn cuLibraryLoadFromFile(
        library: Out<u64>, path: Text, options: *const c_int, values: *const c_void, count: u32,
        library_options: *const c_int, library_values: *const c_void, library_count: u32,
    ) {
        let _ = (options, values, count, library_options, library_values, library_count);
        load_library(library, Image::file(path))
    }

    fn cuLibraryUnload(library: u64) {
        let driver = driver()?;
        let mut tables = driver.tables();
        let of = tables.modules.libraries.remove(library, INVALID_HANDLE)?;
        for module in of.modules.into_values() {
            let _ = tables.unload(driver, module);
        }
        for kernel in of.kernels.into_values() {
            let _ = tables.modules.functions.remove(kernel, INVALID_HANDLE);
        }
        Ok(())
    }

    fn cuLibraryGetKernel(kernel: Out<u64>, library: u64, name: Text) {
        kernel.wanted()?;
        kernel.put(tables()?.modules.kernel(library, name.bytes()?)?)
    }

    fn cuLibraryGetModule(module: Out<u64>, library: u64) {
        let driver = driver()?;
        let context = current()?;
        module.wanted()?;
        module.put(driver.tables().module_of(driver, library, context)?)
    }

    fn cuLibraryGetGlobal, cuLibraryGetManaged(address: Out<u64>, bytes: Out<usize>, library: u64, name: Text) {
        let driver = driver()?;
        let context = current()?;
        let mut tables = driver.tables();
        let module = tables.module_of(driver, library, context)?;
        let (at, size) = tables.variable(module, name)?;
        address.put_if_wanted(at);
        bytes.put_if_wanted(size);
        Ok(())
    }

    fn cuLibraryGetKernelCount(count: Out<u32>, library: u64) {
        let mut tables = tables()?;
        count.put(match &*tables.modules.libraries.get(library, INVALID_HANDLE)?.image {
            Image::Binary => 0,
            Image::Text { functions, .. } => u32::try_from(functions.len()).unwrap_or(0),
        })
    }

    fn cuKernelGetFunction(function: Out<u64>, kernel: u64) {
        let driver = driver()?;
        let context = current()?;
        function.wanted()?;
        let mut tables = driver.tables();
        let (of, name) = {
            let kernel = tables.modules.functions.get(kernel, INVALID_HANDLE)?;
            (kernel.of, kernel.name.clone())
        };
        let Of::Library(library) = of else { return Err(INVALID_HANDLE) };
        let module = tables.module_of(driver, library, context)?;
        function.put(tables.modules.function(module, name.as_bytes())?)
    }

    fn cuKernelGetLibrary(library: Out<u64>, kernel: u64) {
        match tables()?.modules.functions.get(kernel, INVALID_HANDLE)?.of {
            Of::Library(of) => library.put(of),
            Of::Module(_) => Err(INVALID_HANDLE),
        }
    }

    fn cuFuncGetModule(module: Out<u64>, function: u64) {
        match tables()?.modules.functions.get(function, INVALID_HANDLE)?.of {
            Of::Module(of) => module.put(of),
            Of::Library(_) => Err(INVALID_HANDLE),
        }
    }

    fn cuFuncGetName, cuKernelGetName(name: Out<*const c_char>, function: u64) { name_of(name, function) }

    fn cuFuncGetAttribute(value: Out<c_int>, which: c_int, function: u64) {
        let gpu = current()?.gpu;
        let capability = capability(gpu)?;
        value.put(tables()?.modules.functions.get(function, INVALID_HANDLE)?.attribute(which, capability)?)
    }

    fn cuKernelGetAttribute(value: Out<c_int>, which: c_int, kernel: u64, device: c_int) {
        let capability = capability(driver()?.gpu(device)?)?;
        value.put(tables()?.modules.functions.get(kernel, INVALID_HANDLE)?.attribute(which, capability)?)
    }

    fn cuFuncSetAttribute(function: u64, which: c_int, value: c_int) {
        current()?;
        set_attribute(function, which, value)
    }

    fn cuKernelSetAttribute(which: c_int, value: c_int, kernel: u64, device: c_int) {
        driver()?.gpu(device)?;
        set_attribute(kernel, which, value)
    }

    fn cuFuncSetCacheConfig, cuFuncSetSharedMemConfig(function: u64, config: c_int) {
        let _ = config;
        current()?;
        tables()?.modules.launchable(function)
    }

    fn cuKernelSetCacheConfig(kernel: u64, config: c_int, device: c_int) {
        let _ = config;
        driver()?.gpu(device)?;
        tables()?.modules.launchable(kernel)
    }

    fn cuFuncIsLoaded(state: Out<c_int>, function: u64) {
        tables()?.modules.launchable(function)?;
        // CU_FUNCTION_LOADING_STATE_LOADED.
        state.put(1)
    }

    fn cuFuncLoad(function: u64) { tables()?.modules.launchable(function) }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks: Out<c_int>, function: u64, block: c_int, shared: usize) {
        let _ = shared;
        blocks.put(active_blocks(function, block)?)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks: Out<c_int>, function: u64, block: c_int, shared: usize, flags: u32
    ) {
        let _ = (shared, flags);
        blocks.put(active_blocks(function, block)?)
    }

    fn cuOccupancyMaxPotentialBlockSize(
        grid: Out<c_int>, block: Out<c_int>, function: u64, shared_of: *const c_void, shared: usize, limit: c_int
    ) {
        let _ = (shared_of, shared);
        potential(grid, block, function, limit)
    }

    fn cuOccupancyMaxPotentialBlockSizeWithFlags(
        grid: Out<c_int>, block: Out<c_int>, function: u64, shared_of: *const c_void, shared: usize, limit: c_int,
        flags: u32,
    ) {
        let _ = (shared_of, shared, flags);
        potential(grid, block, function, limit)
    }

    fn cuOccupancyAvailableDynamicSMemPerBlock(bytes: Out<usize>, function: u64, blocks: c_int, block: c_int) {
        let _ = blocks;
        active_blocks(function, block)?;
        bytes.put(48 << 10)
    }
}

fn potential(grid: Out<c_int>, block: Out<c_int>, function: u64, limit: c_int) -> Outcome {
    let gpu = current()?.gpu;
    let size = if limit > 0 { limit.min(1024) } else { 1024 };
    let blocks = active_blocks(function, size)?;
    let multiprocessors = c_int::try_from(driver()?.state(gpu).facts.multiprocessors).unwrap_or(1);
    grid.put(blocks * multiprocessors)?;
    block.put(size)
}
