//! The library that stands for `libcuda.so.1`: GPUs that the daemon `sim-gpud` keeps, with memory that runs out across
//! processes. What is modelled, and what only answers "not supported", says `symbols.tsv`.
//!
//! It knows nothing of what is tested with it.

mod address;
mod array;
mod capture;
mod context;
mod copy;
mod device;
mod driver;
mod errors;
mod ffi;
mod graph;
mod graph_memory;
mod image;
mod ipc;
mod launch;
mod managed;
mod memory;
mod module;
mod pointer;
#[path = "../../shared/pointers.rs"]
mod pointers;
mod pool;
mod sleep;
mod space;
mod stream;
mod visible;
mod vmm;
mod work;

/// Every name of the real library, and the table behind `cuGetProcAddress`.
mod symbols {
    use crate::{
        address::*, array::*, capture::*, context::*, copy::*, device::*, errors::*, graph::*,
        graph_memory::*, ipc::*, launch::*, managed::*, memory::*, module::*, pointer::*, pool::*, stream::*,
        vmm::*,
    };

    /// One ABI of a name.
    pub(crate) struct Variant {
        /// CUDA version that brought it.
        pub since: u32,
        /// For the per-thread default stream.
        pub per_thread: bool,
        /// Whether drivers 535, 550 and 555 have it.
        pub seen: [bool; 3],
        /// The function.
        pub entry: *const (),
    }

    // SAFETY: pointers to functions.
    unsafe impl Sync for Variant {}

    include!(concat!(env!("OUT_DIR"), "/symbols.rs"));
}
