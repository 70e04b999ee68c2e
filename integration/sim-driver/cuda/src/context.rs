//! Contexts: primary ones, created ones, and each thread's stack of them. A process's first context on a GPU takes what the
//! machine's file says; what was allocated in a context goes with it.

use std::{
    cell::RefCell,
    collections::HashMap,
    ffi::{c_int, c_void},
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed},
};

use crate::{
    driver::{Driver, Tables, charge, driver, tables},
    ffi::{
        CONTEXT_IS_DESTROYED, DEVICE_UNAVAILABLE, Error, INVALID_CONTEXT, INVALID_VALUE, Out, Outcome,
        PEER_ACCESS_ALREADY_ENABLED, PEER_ACCESS_NOT_ENABLED, api,
    },
};

/// A handle: the address of a `Context`.
pub(crate) type Handle = u64;

/// A GPU that fell off the bus (`CUDA_ERROR_UNKNOWN`).
const LOST: Error = Error(999);

/// `CUDA_ERROR_DEINITIALIZED`.
const DEINITIALIZED: Error = Error(4);

/// `CUlimit`s, and what they are at first.
const LIMITS: [u64; 8] = [1024, 1 << 20, 8 << 20, 2, 2048, 64, 0, 0];

/// A context. Never freed, so a handle that is used too late does no harm.
pub(crate) struct Context {
    pub gpu: usize,
    alive: AtomicBool,
    primary: bool,
    flags: AtomicU32,
    limits: [AtomicU64; LIMITS.len()],
    number: u64,
}

impl Context {
    pub(crate) fn handle(&'static self) -> Handle {
        std::ptr::from_ref(self) as u64
    }
}

/// The process's contexts.
#[derive(Default)]
pub(crate) struct Contexts {
    all: HashMap<Handle, &'static Context>,
    /// Primary context of each GPU, how often it is retained, and its flags for the next time.
    primary: HashMap<usize, Primary>,
    peers: Vec<(Handle, Handle)>,
}

#[derive(Default)]
struct Primary {
    context: Option<&'static Context>,
    retained: u32,
    flags: u32,
}

thread_local! {
    static STACK: RefCell<Vec<&'static Context>> = const { RefCell::new(Vec::new()) };
}

fn on_stack<T>(work: impl FnOnce(&mut Vec<&'static Context>) -> T) -> Outcome<T> {
    // A thread that is ending has no stack any more.
    STACK.try_with(|stack| work(&mut stack.borrow_mut())).map_err(|_| DEINITIALIZED)
}

/// This thread's current context.
#[inline]
pub(crate) fn current() -> Outcome<&'static Context> {
    let driver = driver()?;
    let context = on_stack(|stack| stack.last().copied())?.ok_or(INVALID_CONTEXT)?;
    if !context.alive.load(Relaxed) {
        return Err(CONTEXT_IS_DESTROYED);
    }
    if driver.state(context.gpu).lost.load(Relaxed) != 0 {
        return Err(LOST);
    }
    Ok(context)
}

/// The context of a handle; of none, the current one.
pub(crate) fn context_of(handle: Handle) -> Outcome<&'static Context> {
    if handle == 0 { current() } else { tables()?.contexts.get(handle) }
}

impl Contexts {
    pub(crate) fn get(&self, handle: Handle) -> Outcome<&'static Context> {
        self.all.get(&handle).copied().ok_or(INVALID_CONTEXT)
    }

    fn on(&self, gpu: usize) -> usize {
        self.all.values().filter(|context| context.gpu == gpu).count()
    }
}

impl Tables {
    fn new_context(
        &mut self,
        driver: &Driver,
        gpu: usize,
        primary: bool,
        flags: u32,
    ) -> Outcome<&'static Context> {
        let state = driver.state(gpu);
        if state.lost.load(Relaxed) != 0 {
            return Err(DEVICE_UNAVAILABLE);
        }
        if self.contexts.on(gpu) == 0 {
            charge(driver, self, gpu, state.facts.context)?;
        }
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        let context: &'static Context = Box::leak(Box::new(Context {
            gpu,
            alive: AtomicBool::new(true),
            primary,
            flags: AtomicU32::new(flags),
            limits: LIMITS.map(AtomicU64::new),
            number: NUMBER.fetch_add(1, Relaxed),
        }));
        self.contexts.all.insert(context.handle(), context);
        driver.link.state.clients[driver.link.slot].contexts[gpu].fetch_add(1, Relaxed);
        Ok(context)
    }

    fn end_context(&mut self, driver: &Driver, context: &'static Context) {
        context.alive.store(false, Relaxed);
        self.contexts.all.remove(&context.handle());
        self.contexts.peers.retain(|(one, other)| ![*one, *other].contains(&context.handle()));
        self.forget_context(driver, context);
        driver.link.state.clients[driver.link.slot].contexts[context.gpu].fetch_sub(1, Relaxed);
        if self.contexts.on(context.gpu) == 0 {
            self.empty_pools(driver, context.gpu);
            driver.discharge(context.gpu, driver.state(context.gpu).facts.context);
        }
    }

    /// Gives back everything that was made in a context.
    fn forget_context(&mut self, driver: &Driver, context: &'static Context) {
        self.release_blocks_of(driver, context);
        self.release_arrays_of(driver, context);
        self.release_modules_of(driver, context);
        self.streams.forget_context(context.handle());
        driver.work.forget_context(context.handle());
    }
}

fn create(out: Out<Handle>, flags: u32, device: c_int) -> Outcome {
    let driver = driver()?;
    let gpu = driver.gpu(device)?;
    out.wanted()?;
    let context = driver.tables().new_context(driver, gpu, false, flags)?;
    on_stack(|stack| stack.push(context))?;
    out.put(context.handle())
}

fn synchronize(context: &'static Context) -> Outcome {
    let driver = driver()?;
    driver.work.wait_for_context(driver, context)?;
    driver.tables().settle(driver);
    Ok(())
}

/// Before a GPU's primary context ends, its work does.
fn finish_primary(driver: &Driver, gpu: usize) -> Outcome {
    let primary = driver.tables().contexts.primary.get(&gpu).and_then(|primary| primary.context);
    primary.map_or(Ok(()), |context| driver.work.wait_for_context(driver, context))
}

fn destroy(handle: Handle) -> Outcome {
    let driver = driver()?;
    let context = driver.tables().contexts.get(handle)?;
    if context.primary {
        return Err(INVALID_CONTEXT);
    }
    driver.work.wait_for_context(driver, context)?;
    let mut tables = driver.tables();
    tables.contexts.get(handle)?;
    // Only where it is current: elsewhere it stays on the stack, and is found destroyed.
    on_stack(|stack| {
        if stack.last().is_some_and(|top| top.handle() == handle) {
            stack.pop();
        }
    })?;
    tables.end_context(driver, context);
    Ok(())
}

api! {
    fn cuCtxCreate, cuCtxCreate_v2(context: Out<Handle>, flags: u32, device: c_int) { create(context, flags, device) }

    fn cuCtxCreate_v3(context: Out<Handle>, affinity: *const c_void, count: c_int, flags: u32, device: c_int) {
        let _ = (affinity, count);
        create(context, flags, device)
    }

    fn cuCtxCreate_v4(context: Out<Handle>, parameters: *const c_void, flags: u32, device: c_int) {
        let _ = parameters;
        create(context, flags, device)
    }

    fn cuCtxDestroy, cuCtxDestroy_v2(context: Handle) { destroy(context) }

    fn cuCtxAttach(context: Out<Handle>, flags: u32) {
        if flags != 0 { Err(INVALID_VALUE) } else { context.put(current()?.handle()) }
    }

    fn cuCtxDetach(context: Handle) { destroy(context) }

    fn cuCtxPushCurrent, cuCtxPushCurrent_v2(context: Handle) {
        let context = tables()?.contexts.get(context)?;
        on_stack(|stack| stack.push(context))
    }

    fn cuCtxPopCurrent, cuCtxPopCurrent_v2(context: Out<Handle>) {
        driver()?;
        let popped = on_stack(Vec::pop)?.ok_or(INVALID_CONTEXT)?;
        context.put_if_wanted(popped.handle());
        Ok(())
    }

    fn cuCtxSetCurrent(context: Handle) {
        let context = match context {
            0 => { driver()?; None }
            handle => Some(tables()?.contexts.get(handle)?),
        };
        on_stack(|stack| {
            stack.pop();
            stack.extend(context);
        })
    }

    fn cuCtxGetCurrent(context: Out<Handle>) {
        driver()?;
        context.put(on_stack(|stack| stack.last().map_or(0, |context| context.handle()))?)
    }

    fn cuCtxGetDevice(device: Out<c_int>) { device.put(driver()?.device(current()?.gpu)) }

    fn cuCtxGetDevice_v2(device: Out<c_int>, context: Handle) {
        device.put(driver()?.device(context_of(context)?.gpu))
    }

    fn cuCtxGetId(context: Handle, id: Out<u64>) { id.put(context_of(context)?.number) }

    fn cuCtxGetApiVersion(context: Handle, version: Out<u32>) {
        context_of(context)?;
        version.put(3020)
    }

    fn cuCtxGetFlags(flags: Out<u32>) { flags.put(current()?.flags.load(Relaxed)) }

    fn cuCtxSetFlags(flags: u32) {
        current()?.flags.store(flags, Relaxed);
        Ok(())
    }

    fn cuCtxSynchronize() { synchronize(current()?) }

    fn cuCtxSynchronize_v2(context: Handle) { synchronize(context_of(context)?) }

    fn cuCtxGetLimit(value: Out<usize>, limit: c_int) {
        let context = current()?;
        let limit = usize::try_from(limit).ok().and_then(|limit| context.limits.get(limit)).ok_or(INVALID_VALUE)?;
        value.put(usize::try_from(limit.load(Relaxed)).unwrap_or(usize::MAX))
    }

    fn cuCtxSetLimit(limit: c_int, value: usize) {
        let context = current()?;
        let limit = usize::try_from(limit).ok().and_then(|limit| context.limits.get(limit)).ok_or(INVALID_VALUE)?;
        limit.store(value as u64, Relaxed);
        Ok(())
    }

    fn cuCtxGetCacheConfig, cuCtxGetSharedMemConfig(config: Out<c_int>) {
        current()?;
        config.put(0)
    }

    fn cuCtxSetCacheConfig, cuCtxSetSharedMemConfig(config: c_int) {
        let _ = config;
        current().map(drop)
    }

    fn cuCtxResetPersistingL2Cache() { current().map(drop) }

    fn cuCtxGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) {
        current()?;
        least.put_if_wanted(0);
        greatest.put_if_wanted(-5);
        Ok(())
    }

    fn cuCtxEnablePeerAccess(peer: Handle, flags: u32) {
        let own = current()?;
        let mut tables = tables()?;
        let peer = tables.contexts.get(peer)?;
        if flags != 0 || peer.gpu == own.gpu {
            return Err(INVALID_VALUE);
        }
        let pair = (own.handle(), peer.handle());
        if tables.contexts.peers.contains(&pair) {
            return Err(PEER_ACCESS_ALREADY_ENABLED);
        }
        tables.contexts.peers.push(pair);
        Ok(())
    }

    fn cuCtxDisablePeerAccess(peer: Handle) {
        let own = current()?;
        let mut tables = tables()?;
        let pair = (own.handle(), tables.contexts.get(peer)?.handle());
        let at = tables.contexts.peers.iter().position(|other| *other == pair).ok_or(PEER_ACCESS_NOT_ENABLED)?;
        tables.contexts.peers.swap_remove(at);
        Ok(())
    }

    fn cuDevicePrimaryCtxRetain(context: Out<Handle>, device: c_int) {
        let driver = driver()?;
        let gpu = driver.gpu(device)?;
        context.wanted()?;
        let mut tables = driver.tables();
        let primary = tables.contexts.primary.entry(gpu).or_default();
        let own = match primary.context {
            Some(own) => own,
            None => {
                let flags = primary.flags;
                tables.new_context(driver, gpu, true, flags)?
            }
        };
        let primary = tables.contexts.primary.entry(gpu).or_default();
        primary.context = Some(own);
        primary.retained += 1;
        context.put(own.handle())
    }

    fn cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2(device: c_int) {
        let driver = driver()?;
        let gpu = driver.gpu(device)?;
        finish_primary(driver, gpu)?;
        let mut tables = driver.tables();
        let primary = tables.contexts.primary.entry(gpu).or_default();
        primary.retained = primary.retained.checked_sub(1).ok_or(INVALID_CONTEXT)?;
        if primary.retained == 0 && let Some(context) = primary.context.take() {
            tables.end_context(driver, context);
        }
        Ok(())
    }

    fn cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2(device: c_int) {
        let driver = driver()?;
        let gpu = driver.gpu(device)?;
        finish_primary(driver, gpu)?;
        let mut tables = driver.tables();
        // Who retained it must still release it.
        if let Some(context) = tables.contexts.primary.entry(gpu).or_default().context.take() {
            tables.end_context(driver, context);
        }
        Ok(())
    }

    fn cuDevicePrimaryCtxSetFlags, cuDevicePrimaryCtxSetFlags_v2(device: c_int, flags: u32) {
        let driver = driver()?;
        let gpu = driver.gpu(device)?;
        let mut tables = driver.tables();
        let primary = tables.contexts.primary.entry(gpu).or_default();
        primary.flags = flags;
        if let Some(context) = primary.context {
            context.flags.store(flags, Relaxed);
        }
        Ok(())
    }

    fn cuDevicePrimaryCtxGetState(device: c_int, flags: Out<u32>, active: Out<c_int>) {
        let driver = driver()?;
        let gpu = driver.gpu(device)?;
        flags.wanted()?;
        active.wanted()?;
        let mut tables = driver.tables();
        let primary = tables.contexts.primary.entry(gpu).or_default();
        flags.put(primary.flags)?;
        active.put(c_int::from(primary.context.is_some()))
    }
}
