#!/usr/bin/env bash
# Builds the shim alone, as it is shipped: for glibc 2.17 or newer, so that it loads into the images of ten years. Prints
# the path of the library. integration/build.sh builds all that is installed, the shim with it, and needs more.
#
# The linker with a chosen glibc floor is integration/zig.sh's. CARGO_TARGET_DIR is honoured.
set -euo pipefail
. "$(dirname "$0")/../integration/usage.sh"
usage "" "$@"
cd "$(dirname "$0")/.."

triple=x86_64-unknown-linux-gnu
target=${CARGO_TARGET_DIR:-$PWD/target}
zig=$(integration/zig.sh)
export PATH="$zig:$PATH"
export ZIG_GLOBAL_CACHE_DIR="${zig%/*/*}/zig" CARGO_ZIGBUILD_CACHE_DIR="${zig%/*/*}/cargo-zigbuild"
cargo zigbuild --release -p vcuda-preload --target "$triple.2.17" >&2
echo "$target/$triple/release/libvcuda_preload.so"
