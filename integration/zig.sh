#!/usr/bin/env bash
# A linker with a chosen glibc floor, for what runs inside other people's images: zig, through cargo-zigbuild, from PyPI,
# in a virtual environment in the cache. Prints the folder that belongs at the front of PATH, since cargo-zigbuild asks the
# first python3 that it finds for zig. Quick when it is there; needs python3-venv and no root.
#
# VCUDA_CACHE names another cache folder than ~/.cache/vcuda. Who builds with it keeps what zig and cargo-zigbuild cache
# there too, by ZIG_GLOBAL_CACHE_DIR and CARGO_ZIGBUILD_CACHE_DIR.
set -euo pipefail
. "$(dirname "$0")/usage.sh"
usage "" "$@"

venv=${VCUDA_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/vcuda}/venv
mkdir -p "${venv%/*}"
exec 8>"$venv.lock"
flock 8
if [ ! -x "$venv/bin/cargo-zigbuild" ]; then
    styled 2 "zig: installing zig and cargo-zigbuild" >&2
    rm -rf "$venv"
    { python3 -m venv "$venv" || /usr/bin/python3 -m venv "$venv"; } >&2 || {
        echo "zig: no virtual environment can be made; install python3-venv" >&2
        exit 1
    }
    "$venv/bin/pip" install -q --disable-pip-version-check ziglang==0.17.1 cargo-zigbuild==0.24.1 >&2 || {
        echo "zig: zig cannot be installed from PyPI; is the network there?" >&2
        exit 1
    }
fi
echo "$venv/bin"
