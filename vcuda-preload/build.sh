#!/usr/bin/env bash
# Builds the shim as it is shipped: for glibc 2.17 or newer, so that it loads into the images of ten years. Prints the
# path of the library.
#
# The linker with a chosen glibc floor is zig, through cargo-zigbuild; where they are not on PATH, they come from PyPI
# into a virtual environment in the target folder. CARGO_TARGET_DIR is honoured.
set -euo pipefail
cd "$(dirname "$0")/.."

triple=x86_64-unknown-linux-gnu
target=${CARGO_TARGET_DIR:-$PWD/target}
if ! { command -v cargo-zigbuild && python3 -c 'import ziglang'; } >/dev/null 2>&1; then
    venv=$target/zig
    if [ ! -x "$venv/bin/cargo-zigbuild" ]; then
        rm -rf "$venv"
        python3 -m venv "$venv" || {
            echo "build.sh: no virtual environment for zig; install python3-venv" >&2
            exit 1
        }
        "$venv/bin/pip" install -q --disable-pip-version-check ziglang==0.17.1 cargo-zigbuild==0.24.1 >&2
    fi
    export PATH="$venv/bin:$PATH"
fi
cargo zigbuild --release -p vcuda-preload --target "$triple.2.17" >&2
echo "$target/$triple/release/libvcuda_preload.so"
