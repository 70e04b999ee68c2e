"""Numba: a kernel compiled here by NVIDIA's compiler, loaded, linked and launched."""

import warnings

import numpy
from numba import cuda

MIB = 1 << 20
warnings.simplefilter("ignore")


@cuda.jit
def add_one(numbers):
    at = cuda.grid(1)
    if at < numbers.size:
        numbers[at] += 1


free, total = cuda.current_context().get_memory_info()
print("total", total // MIB)
there = cuda.to_device(numpy.arange(16 * MIB, dtype=numpy.float32))
print("used by 64 MiB", (free - cuda.current_context().get_memory_info()[0]) // MIB)
print("copied", bool((there[:MIB].copy_to_host() == numpy.arange(MIB)).all()))
try:
    cuda.device_array(total + MIB, dtype=numpy.uint8)
    print("too much", "CUDA_SUCCESS")
except Exception as error:
    print("too much", "CUDA_ERROR_OUT_OF_MEMORY" if "OUT_OF_MEMORY" in str(error).upper() else error)
for _ in range(100):
    add_one[64, 256](there)
cuda.synchronize()
print("launched")
