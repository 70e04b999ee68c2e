//! Blocks and events that other processes open by a handle. An opened block is its owner's: it takes no room in the process
//! that opened it.

use std::collections::HashMap;

use sim_gpud::wire::request;

use crate::{
    context::current,
    driver::{Driver, Tables, driver, refused},
    ffi::{INVALID_CONTEXT, INVALID_VALUE, Out, Outcome, api},
    memory::{Block, Kind},
};

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
const LAZY_PEER: u32 = 1;

const MEMORY: u64 = u64::from_le_bytes(*b"sim-mem\0");
const EVENT: u64 = u64::from_le_bytes(*b"sim-evnt");

/// `CUipcMemHandle` and `CUipcEventHandle`: a mark, and what the module calls the block.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct IpcHandle([u64; 8]);

/// Names of this process's own blocks, and addresses of those that it opened, with how often.
#[derive(Default)]
pub(crate) struct Opened {
    own: HashMap<u64, (u64, u64)>,
    others: HashMap<(u64, u64), (u64, u32)>,
}

impl Tables {
    /// Lets nobody open a block any more.
    pub(crate) fn withdraw(&mut self, driver: &Driver, address: u64) {
        if let Some(name) = self.opened.own.remove(&address) {
            let _ = driver.link.ask(&[request::WITHDRAW, name.0, name.1], None);
        }
    }
}

fn open(to: Out<u64>, handle: IpcHandle, flags: u32) -> Outcome {
    let driver = driver()?;
    let context = current()?;
    to.wanted()?;
    let [mark, one, other, ..] = handle.0;
    if mark != MEMORY || flags != LAZY_PEER {
        return Err(INVALID_VALUE);
    }
    let name = (one, other);
    let mut tables = driver.tables();
    if let Some((address, times)) = tables.opened.others.get_mut(&name) {
        *times += 1;
        return to.put(*address);
    }
    if tables.opened.own.values().any(|own| *own == name) {
        return Err(INVALID_CONTEXT);
    }
    let answer = driver.link.ask(&[request::OPEN, one, other], None);
    let ([_, _, gpu, bytes, ..], _) = answer.map_err(|error| refused(&error))?;
    let gpu = usize::try_from(gpu).ok().filter(|gpu| driver.devices.contains(gpu)).ok_or(INVALID_VALUE)?;
    let address = tables.place(Block::new(bytes, gpu, Some(context), Kind::Imported { name }))?;
    tables.opened.others.insert(name, (address, 1));
    to.put(address)
}

api! {
    fn cuIpcGetMemHandle(handle: Out<IpcHandle>, address: u64) {
        let driver = driver()?;
        current()?;
        handle.wanted()?;
        let mut tables = driver.tables();
        let (at, block) = tables.blocks.around(address).ok_or(INVALID_VALUE)?;
        if block.kind != Kind::Device {
            return Err(INVALID_VALUE);
        }
        let words = [request::PUBLISH, block.gpu as u64, block.bytes];
        let name = match tables.opened.own.get(&at) {
            Some(name) => *name,
            None => {
                let (answer, _) = driver.link.ask(&words, None).map_err(|error| refused(&error))?;
                (answer[1], answer[2])
            }
        };
        tables.opened.own.insert(at, name);
        handle.put(IpcHandle([MEMORY, name.0, name.1, 0, 0, 0, 0, 0]))
    }

    fn cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2(address: Out<u64>, handle: IpcHandle, flags: u32) {
        open(address, handle, flags)
    }

    fn cuIpcCloseMemHandle(address: u64) {
        let driver = driver()?;
        current()?;
        let mut tables = driver.tables();
        let Some(Kind::Imported { name }) = tables.blocks.at(address).map(|block| block.kind) else {
            return Err(INVALID_VALUE);
        };
        let (_, times) = tables.opened.others.get_mut(&name).ok_or(INVALID_VALUE)?;
        *times -= 1;
        if *times == 0 {
            tables.opened.others.remove(&name);
            tables.forget_block(driver, address);
        }
        Ok(())
    }

    // Work is done as soon as it is asked for, so an event of another process has always happened.
    fn cuIpcGetEventHandle(handle: Out<IpcHandle>, event: u64) {
        crate::driver::tables()?.streams.event(event)?;
        handle.put(IpcHandle([EVENT, event, 0, 0, 0, 0, 0, 0]))
    }

    fn cuIpcOpenEventHandle(event: Out<u64>, handle: IpcHandle) {
        let context = current()?;
        if handle.0[0] != EVENT {
            return Err(INVALID_VALUE);
        }
        event.put(crate::driver::tables()?.streams.new_event(context, 0))
    }
}
