//! Arrays and mipmapped arrays: rows of cells that programs reach through textures and surfaces. They take room by their
//! true size.

use std::ffi::c_int;

use crate::{
    context::{Context, current},
    driver::{Driver, Registry, Tables, charge, driver, tables},
    ffi::{INVALID_HANDLE, INVALID_VALUE, In, OUT_OF_MEMORY, Out, Outcome, api},
    memory::Contents,
};

/// Flags of `CUDA_ARRAY3D_DESCRIPTOR` under which an array takes no memory of its own: sparse, and mapped later.
const WITHOUT_MEMORY: u32 = 0x40 | 0x80;

/// What an array's memory is aligned to.
const ALIGNMENT: u64 = 64 << 10;

/// `CUDA_ARRAY_DESCRIPTOR`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Shape2d {
    width: usize,
    height: usize,
    format: u32,
    channels: u32,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Shape {
    width: usize,
    height: usize,
    depth: usize,
    format: u32,
    channels: u32,
    flags: u32,
}

/// `CUDA_ARRAY_MEMORY_REQUIREMENTS`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Requirements {
    size: usize,
    alignment: usize,
    reserved: [u32; 4],
}

/// An array, or a level of a mipmapped one.
pub(crate) struct Array {
    shape: Shape,
    context: &'static Context,
    /// Bytes that it takes of its GPU; a level takes none by itself.
    taken: u64,
    /// The mipmapped array that it is a level of.
    level_of: Option<u64>,
    contents: Contents,
}

struct Mipmapped {
    shape: Shape,
    levels: Vec<Option<u64>>,
    context: &'static Context,
    taken: u64,
}

/// The process's arrays.
#[derive(Default)]
pub(crate) struct Arrays {
    plain: Registry<Array>,
    mipmapped: Registry<Mipmapped>,
}

impl Shape {
    /// Cells in each direction; compressed formats store blocks of 4 by 4.
    fn cells(&self) -> [u64; 3] {
        let cells = [self.width as u64, self.height.max(1) as u64, self.depth.max(1) as u64];
        if (0x91..=0x9e).contains(&self.format) {
            [cells[0].div_ceil(4), cells[1].div_ceil(4), cells[2]]
        } else {
            cells
        }
    }

    /// Bytes of a cell (`CUarray_format`).
    fn cell(&self) -> Outcome<u64> {
        let channels = u64::from(self.channels);
        Ok(match self.format {
            0x01 | 0x08 => channels,
            0x02 | 0x09 | 0x10 => 2 * channels,
            0x03 | 0x0a | 0x20 => 4 * channels,
            // Block-compressed: BC1 and BC4 have 8 bytes a block, the others 16.
            0x91 | 0x92 | 0x96 | 0x97 => 8,
            0x93..=0x95 | 0x98..=0x9e => 16,
            // Normalised, with the channels in the name: 8 bit, then 16 bit, each unsigned and signed.
            0xc0 | 0xc6 => 1,
            0xc1 | 0xc3 | 0xc7 | 0xc9 => 2,
            0xc2 | 0xc4 | 0xc8 | 0xca => 4,
            0xc5 | 0xcb => 8,
            // 10, 10, 10 and 2 bits.
            0x50 => 4,
            _ => return Err(INVALID_VALUE),
        })
    }

    fn row(&self) -> Outcome<u64> {
        self.cell()?.checked_mul(self.cells()[0]).ok_or(INVALID_VALUE)
    }

    fn bytes(&self) -> Outcome<u64> {
        let [_, rows, slices] = self.cells();
        self.row()?.checked_mul(rows).and_then(|slice| slice.checked_mul(slices)).ok_or(INVALID_VALUE)
    }

    fn valid(&self) -> Outcome {
        if self.width == 0 || !matches!(self.channels, 1 | 2 | 4) {
            return Err(INVALID_VALUE);
        }
        self.bytes().map(drop)
    }

    /// The shape of a level of a mipmapped array of this shape. Layers are not halved.
    fn level(&self, level: u32) -> Self {
        const LAYERED: u32 = 1;
        let half = |length: usize| if length == 0 { 0 } else { (length >> level).max(1) };
        let depth = if self.flags & LAYERED != 0 { self.depth } else { half(self.depth) };
        Self { width: half(self.width), height: half(self.height), depth, ..*self }
    }

    fn with_memory(&self) -> bool {
        self.flags & WITHOUT_MEMORY == 0
    }
}

impl Tables {
    /// Reads bytes of a row.
    pub(crate) fn read_array(&mut self, handle: u64, at: [u64; 3], to: &mut [u8]) -> Outcome {
        let (array, offset, _) = self.cell(handle, at, to.len())?;
        array.contents.read(offset, to);
        Ok(())
    }

    /// Writes bytes of a row.
    pub(crate) fn write_array(&mut self, handle: u64, at: [u64; 3], from: &[u8]) -> Outcome {
        let (array, offset, length) = self.cell(handle, at, from.len())?;
        array.contents.write(length, offset, from);
        Ok(())
    }

    /// Where the byte `at[0]` of row `at[1]` in slice `at[2]` is, and how long the array is.
    fn cell(&mut self, handle: u64, at: [u64; 3], length: usize) -> Outcome<(&mut Array, u64, u64)> {
        let array = self.arrays.plain.get(handle, INVALID_HANDLE)?;
        let (row, [_, rows, slices]) = (array.shape.row()?, array.shape.cells());
        if at[0] + length as u64 > row || at[1] >= rows || at[2] >= slices {
            return Err(INVALID_VALUE);
        }
        let bytes = array.shape.bytes()?;
        Ok((array, (at[2] * rows + at[1]) * row + at[0], bytes))
    }

    fn new_array(&mut self, driver: &Driver, shape: Shape) -> Outcome<u64> {
        let context = current()?;
        shape.valid()?;
        let taken = if shape.with_memory() { driver.rounded(context.gpu, shape.bytes()?)? } else { 0 };
        charge(driver, self, context.gpu, taken)?;
        let contents = Contents::default();
        Ok(self.arrays.plain.add(Array { shape, context, taken, level_of: None, contents }))
    }

    /// Forgets the arrays of a context.
    pub(crate) fn release_arrays_of(&mut self, driver: &Driver, context: &'static Context) {
        let mipmapped =
            self.arrays.mipmapped.iter().filter(|(_, array)| std::ptr::eq(array.context, context));
        let mipmapped: Vec<u64> = mipmapped.map(|(handle, _)| handle).collect();
        for handle in mipmapped {
            let _ = self.destroy_mipmapped(driver, handle);
        }
        let plain = self.arrays.plain.iter().filter(|(_, array)| std::ptr::eq(array.context, context));
        let plain: Vec<u64> = plain.map(|(handle, _)| handle).collect();
        for handle in plain {
            let _ = self.destroy_array(driver, handle);
        }
    }

    fn destroy_array(&mut self, driver: &Driver, handle: u64) -> Outcome {
        if self.arrays.plain.get(handle, INVALID_HANDLE)?.level_of.is_some() {
            return Err(INVALID_HANDLE);
        }
        let array = self.arrays.plain.remove(handle, INVALID_HANDLE)?;
        driver.discharge(array.context.gpu, array.taken);
        Ok(())
    }

    fn destroy_mipmapped(&mut self, driver: &Driver, handle: u64) -> Outcome {
        let array = self.arrays.mipmapped.remove(handle, INVALID_HANDLE)?;
        for level in array.levels.into_iter().flatten() {
            let _ = self.arrays.plain.remove(level, INVALID_HANDLE);
        }
        driver.discharge(array.context.gpu, array.taken);
        Ok(())
    }
}

fn requirements(bytes: u64) -> Outcome<Requirements> {
    let size = bytes.checked_next_multiple_of(ALIGNMENT).and_then(|size| usize::try_from(size).ok());
    let alignment = usize::try_from(ALIGNMENT).unwrap_or(0);
    Ok(Requirements { size: size.ok_or(OUT_OF_MEMORY)?, alignment, reserved: [0; 4] })
}

fn total(shape: &Shape, levels: u32) -> Outcome<u64> {
    (0..levels)
        .try_fold(0_u64, |sum, level| sum.checked_add(shape.level(level).bytes()?).ok_or(INVALID_VALUE))
}

api! {
    fn cuArrayCreate_v2(handle: Out<u64>, shape: In<Shape2d>) {
        let driver = driver()?;
        handle.wanted()?;
        let Shape2d { width, height, format, channels } = shape.get()?;
        let shape = Shape { width, height, depth: 0, format, channels, flags: 0 };
        let new = driver.tables().new_array(driver, shape)?;
        handle.put(new)
    }

    fn cuArray3DCreate_v2(handle: Out<u64>, shape: In<Shape>) {
        let driver = driver()?;
        handle.wanted()?;
        let new = driver.tables().new_array(driver, shape.get()?)?;
        handle.put(new)
    }

    fn cuArrayGetDescriptor_v2(to: Out<Shape2d>, handle: u64) {
        let mut tables = tables()?;
        let Shape { width, height, format, channels, .. } = tables.arrays.plain.get(handle, INVALID_HANDLE)?.shape;
        to.put(Shape2d { width, height, format, channels })
    }

    fn cuArray3DGetDescriptor_v2(to: Out<Shape>, handle: u64) {
        to.put(tables()?.arrays.plain.get(handle, INVALID_HANDLE)?.shape)
    }

    fn cuArrayDestroy(handle: u64) {
        let driver = driver()?;
        driver.tables().destroy_array(driver, handle)
    }

    fn cuArrayGetMemoryRequirements(to: Out<Requirements>, handle: u64, device: c_int) {
        driver()?.gpu(device)?;
        let bytes = tables()?.arrays.plain.get(handle, INVALID_HANDLE)?.shape.bytes()?;
        to.put(requirements(bytes)?)
    }

    fn cuMipmappedArrayCreate(handle: Out<u64>, shape: In<Shape>, levels: u32) {
        let driver = driver()?;
        let context = current()?;
        handle.wanted()?;
        let shape = shape.get()?;
        shape.valid()?;
        let longest = shape.width.max(shape.height).max(shape.depth);
        if levels == 0 || levels > longest.ilog2() + 1 {
            return Err(INVALID_VALUE);
        }
        let bytes = if shape.with_memory() { total(&shape, levels)? } else { 0 };
        let taken = driver.rounded(context.gpu, bytes)?;
        let mut tables = driver.tables();
        charge(driver, &mut tables, context.gpu, taken)?;
        let levels = vec![None; levels as usize];
        handle.put(tables.arrays.mipmapped.add(Mipmapped { shape, levels, context, taken }))
    }

    fn cuMipmappedArrayGetLevel(to: Out<u64>, handle: u64, level: u32) {
        to.wanted()?;
        let mut tables = tables()?;
        let array = tables.arrays.mipmapped.get(handle, INVALID_HANDLE)?;
        let known = *array.levels.get(level as usize).ok_or(INVALID_VALUE)?;
        if let Some(known) = known {
            return to.put(known);
        }
        let (shape, context) = (array.shape.level(level), array.context);
        let contents = Contents::default();
        let new = tables.arrays.plain.add(Array { shape, context, taken: 0, level_of: Some(handle), contents });
        tables.arrays.mipmapped.get(handle, INVALID_HANDLE)?.levels[level as usize] = Some(new);
        to.put(new)
    }

    fn cuMipmappedArrayDestroy(handle: u64) {
        let driver = driver()?;
        driver.tables().destroy_mipmapped(driver, handle)
    }

    fn cuMipmappedArrayGetMemoryRequirements(to: Out<Requirements>, handle: u64, device: c_int) {
        driver()?.gpu(device)?;
        let mut tables = tables()?;
        let array = tables.arrays.mipmapped.get(handle, INVALID_HANDLE)?;
        let levels = u32::try_from(array.levels.len()).unwrap_or(0);
        to.put(requirements(total(&array.shape, levels)?)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(width: usize, height: usize, depth: usize, format: u32, channels: u32) -> Shape {
        Shape { width, height, depth, format, channels, flags: 0 }
    }

    #[test]
    fn arrays_are_as_large_as_their_cells() {
        assert_eq!(shape(100, 0, 0, 0x20, 1).bytes(), Ok(400));
        assert_eq!(shape(100, 10, 0, 0x02, 4).bytes(), Ok(8000));
        assert_eq!(shape(3, 5, 7, 0x08, 2).bytes(), Ok(210));
        assert_eq!(shape(5, 5, 0, 0x91, 4).bytes(), Ok(2 * 2 * 8));
        assert_eq!(shape(1, 1, 1, 0x77, 1).bytes(), Err(INVALID_VALUE));
        assert_eq!(shape(usize::MAX, usize::MAX, 2, 0x20, 4).bytes(), Err(INVALID_VALUE));
    }

    #[test]
    fn mipmaps_add_their_levels_up() {
        assert_eq!(total(&shape(8, 8, 0, 0x01, 1), 4), Ok(64 + 16 + 4 + 1));
        assert_eq!(total(&shape(8, 2, 0, 0x01, 1), 4), Ok(16 + 4 + 2 + 1));
        // Layers stay as many.
        let layered = Shape { flags: 1, ..shape(4, 4, 6, 0x01, 1) };
        assert_eq!(total(&layered, 3), Ok(6 * (16 + 4 + 1)));
    }
}
