"""NVIDIA's own bindings of the driver (cuda-bindings): devices, memory, copies, a module, a launch, a graph."""

from cuda.bindings import driver

MIB = 1 << 20


def must(answer):
    assert answer[0] == 0, answer
    return answer[1] if len(answer) == 2 else answer[1:]


must(driver.cuInit(0))
device = must(driver.cuDeviceGet(0))
context = must(driver.cuDevicePrimaryCtxRetain(device))
must(driver.cuCtxSetCurrent(context))
free, total = must(driver.cuMemGetInfo())
assert total == must(driver.cuDeviceTotalMem(device))
print("total", total // MIB)

block = must(driver.cuMemAlloc(64 * MIB))
print("used by 64 MiB", (free - must(driver.cuMemGetInfo())[0]) // MIB)
text = bytes(range(256)) * 16
must(driver.cuMemcpyHtoD(block, text, len(text)))
back = bytearray(len(text))
must(driver.cuMemcpyDtoH(back, block, len(back)))
print("copied", bytes(back) == text)
must(driver.cuMemFree(block))
print("too much", driver.cuMemAlloc(total + MIB)[0].name)

image = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry work() { // sim: time 5us
    ret;
}
"""
module = must(driver.cuModuleLoadData(image + b"\0"))
function = must(driver.cuModuleGetFunction(module, b"work"))
stream = must(driver.cuStreamCreate(0))
for _ in range(100):
    must(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0))
must(driver.cuStreamSynchronize(stream))
mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
must(driver.cuStreamBeginCapture(stream, mode))
must(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0))
graph = must(driver.cuStreamEndCapture(stream))
runs = must(driver.cuGraphInstantiate(graph, 0))
for _ in range(10):
    must(driver.cuGraphLaunch(runs, stream))
must(driver.cuStreamSynchronize(stream))
print("launched")
