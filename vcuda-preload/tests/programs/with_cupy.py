"""CuPy, whose CUDA runtime makes sure that a genuine driver is there: on a simulated one it ends with that."""

import cupy

print("driver", cupy.cuda.runtime.driverGetVersion())
try:
    print("devices", cupy.cuda.runtime.getDeviceCount())
except Exception as error:
    print("devices", repr(error))
