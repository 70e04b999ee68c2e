//! What a process and the daemon say to each other: frames of eight words over a `SOCK_SEQPACKET` socket, each request
//! with one answer, and file descriptors beside them. Only what happens rarely goes this way; memory is taken and given
//! back in the shared state.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// Words of a frame.
pub const WORDS: usize = 8;

/// Bytes of a frame.
const BYTES: usize = WORDS * 8;

/// A request or an answer. The first word is the request's number, or 0 and above for an answer: an error number, 0 for
/// success.
pub type Frame = [u64; WORDS];

/// What a process can ask.
pub mod request {
    /// Who it is: `kind` (0: CUDA, gets a slot; 1: NVML, gets none). Answer: the slot, and the state.
    pub const HELLO: u64 = 1;
    /// Others may use memory that this process holds: GPU, bytes. Answer: a number, and a descriptor that stands for
    /// the memory, which lives as long as the descriptor or any process that uses it.
    pub const SHARE: u64 = 2;
    /// Uses the memory that the descriptor sent along stands for. Answer: number, GPU, bytes.
    pub const ADOPT: u64 = 3;
    /// Uses the memory of this number no longer.
    pub const DROP: u64 = 4;
    /// Lets others open a block: GPU, bytes. Answer: two words that name it.
    pub const PUBLISH: u64 = 5;
    /// Does so no longer: two words.
    pub const WITHDRAW: u64 = 6;
    /// Opens a block: two words. Answer: the owner's slot, GPU, bytes.
    pub const OPEN: u64 = 7;
    /// Sets the ceiling of the cgroup whose folder is sent along: GPU, soft, hard. Root only.
    pub const SET_CEILING: u64 = 8;
    /// Answer: soft, hard and used bytes of the cgroup whose folder is sent along, on a GPU.
    pub const GET_CEILING: u64 = 9;
    /// Brings all GPUs up to the present time. Answer: that, in nanoseconds of `CLOCK_MONOTONIC`.
    pub const CATCH_UP: u64 = 10;
}

/// Kinds of processes.
pub mod kind {
    /// Has contexts and memory.
    pub const CUDA: u64 = 0;
    /// Only looks.
    pub const NVML: u64 = 1;
}

/// Sends a frame, and at most one descriptor.
pub fn send(socket: impl AsFd, frame: &Frame, descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut bytes = [0; BYTES];
    for (to, word) in bytes.chunks_exact_mut(8).zip(frame) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if let Some(descriptor) = &descriptor {
        control.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(descriptor)));
    }
    sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives a frame, and at most one descriptor. An end that was closed is `UnexpectedEof`.
pub fn receive(socket: impl AsFd) -> io::Result<(Frame, Option<OwnedFd>)> {
    let mut bytes = [0; BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = loop {
        let mut into = [IoSliceMut::new(&mut bytes)];
        match recvmsg(&socket, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other?.bytes,
        }
    };
    let descriptor = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        })
        .next();
    match got {
        0 => return Err(io::ErrorKind::UnexpectedEof.into()),
        BYTES => {}
        _ => return Err(io::ErrorKind::InvalidData.into()),
    }
    let mut frame = [0; WORDS];
    for (word, from) in frame.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = from.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
    }
    Ok((frame, descriptor))
}
