//! Copies and fills. Host memory is copied for real; device memory is, where its contents are kept.

use crate::{
    driver::{Driver, Tables, driver},
    ffi::{INVALID_VALUE, In, Outcome, api},
    stream::{Operation, Stream, submit},
};

/// `CUmemorytype`.
const DEVICE: u32 = 2;
const ARRAY: u32 = 3;
const UNIFIED: u32 = 4;

/// One end of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// An address; bytes from a row to the next, and from a slice to the next.
    Linear { address: u64, row: u64, slice: u64 },
    /// An array, and the byte, row and slice to begin at.
    Array { handle: u64, at: [u64; 3] },
}

impl Place {
    fn plain(address: u64) -> Self {
        Self::Linear { address, row: 0, slice: 0 }
    }
}

/// A copy of a box: bytes in a row, rows, slices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Copy {
    pub to: Place,
    pub from: Place,
    pub extent: [u64; 3],
}

/// A fill of rows with an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fill {
    pub address: u64,
    /// Bytes from a row to the next.
    pub pitch: u64,
    pub element: [u8; 4],
    /// Bytes of the element.
    pub size: u8,
    /// Elements in a row.
    pub width: u64,
    pub height: u64,
}

/// Copies and fills go piece by piece, so that a large one needs no memory as large. A multiple of every element.
const PIECE: u64 = 1 << 20;

/// Pieces of a row: where they begin, and their length.
fn pieces(bytes: u64) -> impl Iterator<Item = (u64, usize)> {
    let length = move |at: u64| usize::try_from(PIECE.min(bytes - at)).unwrap_or(0);
    (0..bytes.div_ceil(PIECE)).map(move |piece| (piece * PIECE, length(piece * PIECE)))
}

impl Place {
    /// The place of a byte of the box that begins here.
    fn plus(self, byte: u64, line: u64, plane: u64) -> Self {
        match self {
            Self::Linear { address, row, slice } => {
                Self::plain(address.wrapping_add(plane * slice + line * row + byte))
            }
            Self::Array { handle, at: [x, y, z] } => {
                Self::Array { handle, at: [x + byte, y + line, z + plane] }
            }
        }
    }
}

impl Tables {
    /// Does a copy.
    pub(crate) fn copy(&mut self, copy: &Copy) -> Outcome {
        let [bytes, rows, slices] = copy.extent;
        let mut buffer = vec![0; usize::try_from(bytes.min(PIECE)).unwrap_or(0)];
        for (slice, row) in (0..slices).flat_map(|slice| (0..rows).map(move |row| (slice, row))) {
            for (at, length) in pieces(bytes) {
                let piece = &mut buffer[..length];
                match copy.from.plus(at, row, slice) {
                    Place::Linear { address, .. } => self.read(address, piece)?,
                    Place::Array { handle, at } => self.read_array(handle, at, piece)?,
                }
                match copy.to.plus(at, row, slice) {
                    Place::Linear { address, .. } => self.write(address, piece)?,
                    Place::Array { handle, at } => self.write_array(handle, at, piece)?,
                }
            }
        }
        Ok(())
    }

    /// Does a fill on a GPU.
    pub(crate) fn fill(&mut self, driver: &Driver, gpu: usize, fill: &Fill) -> Outcome {
        let row = fill.width.checked_mul(fill.size.into()).ok_or(INVALID_VALUE)?;
        let before = (fill.height - 1).checked_mul(fill.pitch).ok_or(INVALID_VALUE)?;
        let end = before
            .checked_add(row)
            .and_then(|length| fill.address.checked_add(length))
            .ok_or(INVALID_VALUE)?;
        let (at, block) = self.blocks.around(fill.address).ok_or(INVALID_VALUE)?;
        if end > at + block.bytes {
            return Err(INVALID_VALUE);
        }
        if !block.keeps_contents() {
            return Ok(());
        }
        self.migrate(driver, fill.address, Some(gpu));
        let element = &fill.element[..fill.size.into()];
        let length = usize::try_from(row.min(PIECE)).unwrap_or(0);
        let pattern: Vec<u8> = element.iter().copied().cycle().take(length).collect();
        for line in 0..fill.height {
            for (at, length) in pieces(row) {
                self.write(fill.address + line * fill.pitch + at, &pattern[..length])?;
            }
        }
        Ok(())
    }
}

fn linear(to: u64, from: u64, bytes: usize, stream: Stream) -> Outcome {
    let copy = Copy { to: Place::plain(to), from: Place::plain(from), extent: [bytes as u64, 1, 1] };
    if bytes == 0 {
        return stream.context().map(drop);
    }
    if to == 0 || from == 0 {
        return Err(INVALID_VALUE);
    }
    submit(stream, Operation::Copy(copy))
}

/// The same, and the calling thread waits.
fn linear_now(to: u64, from: u64, bytes: usize, stream: Stream) -> Outcome {
    finish(stream)?;
    linear(to, from, bytes, stream)?;
    finish(stream)
}

/// Waits until a stream has done what it has to do.
fn finish(stream: Stream) -> Outcome {
    let driver = driver()?;
    let context = stream.context()?;
    let lane = stream.lane(&mut driver.tables(), context)?;
    driver.work.wait_for_stream(driver, &lane)
}

/// `CUDA_MEMCPY2D`, one end of it.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct End2d {
    x: usize,
    y: usize,
    kind: u32,
    host: u64,
    device: u64,
    array: u64,
    pitch: usize,
}

/// `CUDA_MEMCPY2D`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Copy2d {
    from: End2d,
    to: End2d,
    width: usize,
    height: usize,
}

/// `CUDA_MEMCPY3D` and `CUDA_MEMCPY3D_PEER`, one end of it.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct End3d {
    x: usize,
    y: usize,
    z: usize,
    level: usize,
    kind: u32,
    host: u64,
    device: u64,
    array: u64,
    /// Reserved, or the context of a peer.
    context: u64,
    pitch: usize,
    height: usize,
}

/// `CUDA_MEMCPY3D` and `CUDA_MEMCPY3D_PEER`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Copy3d {
    from: End3d,
    to: End3d,
    width: usize,
    height: usize,
    depth: usize,
}

impl End3d {
    fn place(&self) -> Outcome<Place> {
        let address = match self.kind {
            ARRAY => {
                let at = [self.x as u64, self.y as u64, self.z as u64];
                return Ok(Place::Array { handle: self.array, at });
            }
            DEVICE | UNIFIED => self.device,
            1 => self.host,
            _ => return Err(INVALID_VALUE),
        };
        let (row, slice) = (self.pitch as u64, self.pitch as u64 * self.height as u64);
        let offset = self.z as u64 * slice + self.y as u64 * row + self.x as u64;
        Ok(Place::Linear { address: address.wrapping_add(offset), row, slice })
    }
}

impl From<End2d> for End3d {
    fn from(end: End2d) -> Self {
        let End2d { x, y, kind, host, device, array, pitch } = end;
        Self { x, y, z: 0, level: 0, kind, host, device, array, context: 0, pitch, height: 0 }
    }
}

impl Copy3d {
    pub(crate) fn resolved(&self) -> Outcome<Copy> {
        let extent = [self.width as u64, self.height as u64, self.depth as u64];
        Ok(Copy { to: self.to.place()?, from: self.from.place()?, extent })
    }
}

impl From<Copy2d> for Copy3d {
    fn from(copy: Copy2d) -> Self {
        let Copy2d { from, to, width, height } = copy;
        Self { from: from.into(), to: to.into(), width, height, depth: 1 }
    }
}

fn boxed(copy: Copy3d, stream: Stream) -> Outcome {
    submit(stream, Operation::Copy(copy.resolved()?))
}

fn boxed_now(copy: Copy3d, stream: Stream) -> Outcome {
    finish(stream)?;
    boxed(copy, stream)?;
    finish(stream)
}

fn array_to(to: Place, from: Place, bytes: usize, stream: Stream) -> Outcome {
    submit(stream, Operation::Copy(Copy { to, from, extent: [bytes as u64, 1, 1] }))
}

fn array_now(to: Place, from: Place, bytes: usize, stream: Stream) -> Outcome {
    finish(stream)?;
    array_to(to, from, bytes, stream)?;
    finish(stream)
}

fn in_array(handle: u64, offset: usize) -> Place {
    Place::Array { handle, at: [offset as u64, 0, 0] }
}

fn fill(
    address: u64,
    pitch: usize,
    element: u32,
    size: u8,
    extent: (usize, usize),
    stream: Stream,
) -> Outcome {
    let fill = Fill {
        address,
        pitch: pitch as u64,
        element: element.to_le_bytes(),
        size,
        width: extent.0 as u64,
        height: extent.1 as u64,
    };
    if extent.0 == 0 || extent.1 == 0 {
        return stream.context().map(drop);
    }
    if !address.is_multiple_of(size.into()) {
        return Err(INVALID_VALUE);
    }
    submit(stream, Operation::Fill(fill))
}

api! {
    fn cuMemcpy, cuMemcpy_ptds(to: u64, from: u64, bytes: usize) {
        linear_now(to, from, bytes, Stream::new(0, PER_THREAD))
    }
    fn cuMemcpyAsync, cuMemcpyAsync_ptsz(to: u64, from: u64, bytes: usize, stream: u64) {
        linear(to, from, bytes, Stream::new(stream, PER_THREAD))
    }
    fn cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_ptds(to: u64, from: u64, bytes: usize) {
        linear_now(to, from, bytes, Stream::new(0, PER_THREAD))
    }
    fn cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync_v2_ptsz(to: u64, from: u64, bytes: usize, stream: u64) {
        linear(to, from, bytes, Stream::new(stream, PER_THREAD))
    }
    fn cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds(to: u64, from: u64, bytes: usize) {
        linear_now(to, from, bytes, Stream::new(0, PER_THREAD))
    }
    fn cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync_v2_ptsz(to: u64, from: u64, bytes: usize, stream: u64) {
        linear(to, from, bytes, Stream::new(stream, PER_THREAD))
    }
    fn cuMemcpyDtoD_v2, cuMemcpyDtoD_v2_ptds(to: u64, from: u64, bytes: usize) {
        linear(to, from, bytes, Stream::new(0, PER_THREAD))
    }
    fn cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync_v2_ptsz(to: u64, from: u64, bytes: usize, stream: u64) {
        linear(to, from, bytes, Stream::new(stream, PER_THREAD))
    }
    fn cuMemcpyPeer, cuMemcpyPeer_ptds(to: u64, to_context: u64, from: u64, from_context: u64, bytes: usize) {
        let _ = (to_context, from_context);
        linear(to, from, bytes, Stream::new(0, PER_THREAD))
    }
    fn cuMemcpyPeerAsync, cuMemcpyPeerAsync_ptsz(
        to: u64, to_context: u64, from: u64, from_context: u64, bytes: usize, stream: u64
    ) {
        let _ = (to_context, from_context);
        linear(to, from, bytes, Stream::new(stream, PER_THREAD))
    }

    fn cuMemcpyAtoA_v2, cuMemcpyAtoA_v2_ptds(to: u64, to_offset: usize, from: u64, from_offset: usize, bytes: usize) {
        array_to(in_array(to, to_offset), in_array(from, from_offset), bytes, Stream::new(0, PER_THREAD))
    }
    fn cuMemcpyAtoD_v2, cuMemcpyAtoD_v2_ptds(to: u64, from: u64, offset: usize, bytes: usize) {
        array_to(Place::plain(to), in_array(from, offset), bytes, Stream::new(0, PER_THREAD))
    }
    fn cuMemcpyDtoA_v2, cuMemcpyDtoA_v2_ptds(to: u64, offset: usize, from: u64, bytes: usize) {
        array_to(in_array(to, offset), Place::plain(from), bytes, Stream::new(0, PER_THREAD))
    }
    fn cuMemcpyAtoH_v2, cuMemcpyAtoH_v2_ptds(to: u64, from: u64, offset: usize, bytes: usize) {
        array_now(Place::plain(to), in_array(from, offset), bytes, Stream::new(0, PER_THREAD))
    }
    fn cuMemcpyAtoHAsync_v2, cuMemcpyAtoHAsync_v2_ptsz(to: u64, from: u64, offset: usize, bytes: usize, stream: u64) {
        array_to(Place::plain(to), in_array(from, offset), bytes, Stream::new(stream, PER_THREAD))
    }
    fn cuMemcpyHtoA_v2, cuMemcpyHtoA_v2_ptds(to: u64, offset: usize, from: u64, bytes: usize) {
        array_now(in_array(to, offset), Place::plain(from), bytes, Stream::new(0, PER_THREAD))
    }
    fn cuMemcpyHtoAAsync_v2, cuMemcpyHtoAAsync_v2_ptsz(to: u64, offset: usize, from: u64, bytes: usize, stream: u64) {
        array_to(in_array(to, offset), Place::plain(from), bytes, Stream::new(stream, PER_THREAD))
    }

    fn cuMemcpy2D_v2, cuMemcpy2D_v2_ptds, cuMemcpy2DUnaligned_v2, cuMemcpy2DUnaligned_v2_ptds(copy: In<Copy2d>) {
        boxed_now(copy.get()?.into(), Stream::new(0, PER_THREAD))
    }
    fn cuMemcpy2DAsync_v2, cuMemcpy2DAsync_v2_ptsz(copy: In<Copy2d>, stream: u64) {
        boxed(copy.get()?.into(), Stream::new(stream, PER_THREAD))
    }
    fn cuMemcpy3D_v2, cuMemcpy3D_v2_ptds, cuMemcpy3DPeer, cuMemcpy3DPeer_ptds(copy: In<Copy3d>) {
        boxed_now(copy.get()?, Stream::new(0, PER_THREAD))
    }
    fn cuMemcpy3DAsync_v2, cuMemcpy3DAsync_v2_ptsz, cuMemcpy3DPeerAsync, cuMemcpy3DPeerAsync_ptsz(
        copy: In<Copy3d>, stream: u64
    ) {
        boxed(copy.get()?, Stream::new(stream, PER_THREAD))
    }

    fn cuMemsetD8_v2, cuMemsetD8_v2_ptds(address: u64, value: u8, count: usize) {
        fill(address, 0, value.into(), 1, (count, 1), Stream::new(0, PER_THREAD))
    }
    fn cuMemsetD16_v2, cuMemsetD16_v2_ptds(address: u64, value: u16, count: usize) {
        fill(address, 0, value.into(), 2, (count, 1), Stream::new(0, PER_THREAD))
    }
    fn cuMemsetD32_v2, cuMemsetD32_v2_ptds(address: u64, value: u32, count: usize) {
        fill(address, 0, value, 4, (count, 1), Stream::new(0, PER_THREAD))
    }
    fn cuMemsetD8Async, cuMemsetD8Async_ptsz(address: u64, value: u8, count: usize, stream: u64) {
        fill(address, 0, value.into(), 1, (count, 1), Stream::new(stream, PER_THREAD))
    }
    fn cuMemsetD16Async, cuMemsetD16Async_ptsz(address: u64, value: u16, count: usize, stream: u64) {
        fill(address, 0, value.into(), 2, (count, 1), Stream::new(stream, PER_THREAD))
    }
    fn cuMemsetD32Async, cuMemsetD32Async_ptsz(address: u64, value: u32, count: usize, stream: u64) {
        fill(address, 0, value, 4, (count, 1), Stream::new(stream, PER_THREAD))
    }
    fn cuMemsetD2D8_v2, cuMemsetD2D8_v2_ptds(address: u64, pitch: usize, value: u8, width: usize, height: usize) {
        fill(address, pitch, value.into(), 1, (width, height), Stream::new(0, PER_THREAD))
    }
    fn cuMemsetD2D16_v2, cuMemsetD2D16_v2_ptds(address: u64, pitch: usize, value: u16, width: usize, height: usize) {
        fill(address, pitch, value.into(), 2, (width, height), Stream::new(0, PER_THREAD))
    }
    fn cuMemsetD2D32_v2, cuMemsetD2D32_v2_ptds(address: u64, pitch: usize, value: u32, width: usize, height: usize) {
        fill(address, pitch, value, 4, (width, height), Stream::new(0, PER_THREAD))
    }
    fn cuMemsetD2D8Async, cuMemsetD2D8Async_ptsz(
        address: u64, pitch: usize, value: u8, width: usize, height: usize, stream: u64
    ) {
        fill(address, pitch, value.into(), 1, (width, height), Stream::new(stream, PER_THREAD))
    }
    fn cuMemsetD2D16Async, cuMemsetD2D16Async_ptsz(
        address: u64, pitch: usize, value: u16, width: usize, height: usize, stream: u64
    ) {
        fill(address, pitch, value.into(), 2, (width, height), Stream::new(stream, PER_THREAD))
    }
    fn cuMemsetD2D32Async, cuMemsetD2D32Async_ptsz(
        address: u64, pitch: usize, value: u32, width: usize, height: usize, stream: u64
    ) {
        fill(address, pitch, value, 4, (width, height), Stream::new(stream, PER_THREAD))
    }
}
