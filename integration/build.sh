#!/usr/bin/env bash
# Builds what goes onto a node, and what the tests put beside it, into target/node:
#
#   bin/ lib/   installed files: device plugin, NRI plugin, static hook, tools, shim
#   sim/        the simulated driver
#   test/       programs for the tests' containers
#
# What is installed, and what runs inside other people's images, is linked for glibc 2.17 or newer, by zig.
# VCUDA_DIST names another folder than target/node; VCUDA_PROFILE another cargo profile than release.
set -euo pipefail
. "$(dirname "$0")/usage.sh"
usage "" "$@"
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-$PWD/target}
out=${VCUDA_DIST:-$PWD/target/node}
profile=${VCUDA_PROFILE:-release}
built=$profile
[ "$profile" = dev ] && built=debug
zig=$(integration/zig.sh)
export PATH="$zig:$PATH:$HOME/.cargo/bin"
export ZIG_GLOBAL_CACHE_DIR="${zig%/*/*}/zig" CARGO_ZIGBUILD_CACHE_DIR="${zig%/*/*}/cargo-zigbuild"
triple=x86_64-unknown-linux-gnu

say() { styled 2 "build: $*" >&2; }

# step N WHAT COMMAND...: cargo with those arguments; on a terminal it draws how far it is.
step() {
    local what="$1 of 3, $2" cargo=(cargo "$3" --profile "$profile" "${@:4}")
    say "$what"
    if [ -t 2 ]; then "${cargo[@]}"; else working "build: $what" "${cargo[@]}" -q; fi
}

step 1 "demo and simulated driver's daemon" build --bins -p sim-gpud -p integration

# A hook that is not static would take LD_PRELOAD and the loader's configuration from the image it is run for.
RUSTFLAGS="-C target-feature=+crt-static" step 2 "static hook" build -p oci-hooks --bin vcuda-hook \
    --target $triple --target-dir "$target/static"

step 3 "daemons, tools, shim, simulated driver, test programs" zigbuild --target $triple.2.17 --target-dir "$target/floor" \
    -p device-plugin -p scheduler -p nri-plugin -p cdi-generator -p oci-hooks \
    -p vcuda-preload -p sim-cuda -p sim-nvml -p cuda-probe

mkdir -p "$out"/{bin,lib,sim,test}
put() { install -m 0755 -C "$1" "$2"; }
for program in vcuda-device-plugin vcuda-scheduler vcuda-nri-plugin vcuda-cdi vcuda-check; do
    put "$target/floor/$triple/$built/$program" "$out/bin/$program"
done
put "$target/static/$triple/$built/vcuda-hook" "$out/bin/vcuda-hook"
put "$target/floor/$triple/$built/libvcuda_preload.so" "$out/lib/libvcuda_preload.so"
put "$target/$built/sim-gpud" "$out/sim/sim-gpud"
put "$target/floor/$triple/$built/libsim_cuda.so" "$out/sim/libcuda.so"
put "$target/floor/$triple/$built/libsim_nvml.so" "$out/sim/libnvidia-ml.so"
put "$target/floor/$triple/$built/cuda-probe" "$out/test/cuda-probe"
for program in vcuda-demo vcuda-bench; do put "$target/$built/$program" "$out/test/$program"; done
say "all there: $out"
