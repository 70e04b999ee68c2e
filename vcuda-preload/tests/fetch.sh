#!/usr/bin/env bash
# Fetches the real parts that the door tests compare the shim with, into the cache of the tests: the driver's libcuda
# and NVML 535, 550 and 555 from Debian non-free (they load without a GPU), nvidia-smi 550, and the CUDA runtimes 11.8,
# 12.9 and 13.x from PyPI. Nothing is installed. Quick when all is there.
#
#   vcuda-preload/tests/fetch.sh            # fill the cache, print its folder
#   vcuda-preload/tests/fetch.sh programs   # CUDA programs from PyPI too (1 GB): NVIDIA's bindings, Numba, CuPy
#
# VCUDA_CACHE names another cache folder than ~/.cache/vcuda.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/../../integration/usage.sh"
usage "programs" "$@"

shared=${VCUDA_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/vcuda}
cache=$shared/real
apt=$(dirname "$(readlink -f "$0")")/../../integration/apt.sh
say() { styled 2 "fetch: $*" >&2; }
die() { printf 'fetch: %s\n' "$*" >&2; exit 1; }
mkdir -p "$cache"
exec 9>"$cache/.lock"
flock 9

# driver MAJOR RELEASE PACKAGE...: the driver's libraries in $cache/driver-MAJOR, beside each other.
driver() {
    local folder=$cache/driver-$1 release=$2
    shift 2
    [ -e "$folder/.complete" ] && return
    say "unpacking $* of $release"
    rm -rf "$folder" "$folder.part"
    mkdir -p "$folder.part/tree"
    VCUDA_CACHE=$shared "$apt" unpack "$folder.part/tree" "$release" "$@" || exit 1
    # Not what is only named alike, below usr/share.
    find "$folder.part/tree" -path '*/share/*' -prune -o -type f \
        \( -name 'libcuda.so.*.*' -o -name 'libnvidia-ml.so.*.*' -o -name nvidia-smi \) -exec cp -a -t "$folder.part" {} + ||
        die "the driver's libraries of $release cannot be copied to $folder.part"
    rm -rf "$folder.part/tree"
    touch "$folder.part/.complete"
    mv "$folder.part" "$folder"
}

# runtime VERSION PACKAGE: libcudart in $cache/cudart-VERSION.
runtime() {
    local folder=$cache/cudart-$1
    [ -e "$folder/.complete" ] && return
    say "unpacking $2"
    rm -rf "$folder" "$folder.part"
    mkdir -p "$folder.part"
    python3 -m pip download -q --disable-pip-version-check --no-deps -d "$folder.part" "$2" >&2 ||
        die "$2 cannot be fetched from PyPI"
    python3 -c 'import glob, sys, zipfile
for wheel in glob.glob(sys.argv[1] + "/*.whl"):
    zipfile.ZipFile(wheel).extractall(sys.argv[1])' "$folder.part"
    find "$folder.part" -name 'libcudart*' -exec mv -t "$folder.part" {} +
    find "$folder.part" -type d -name include -prune -exec mv -t "$folder.part" {} +
    rm -rf "$folder.part"/nvidia* "$folder.part"/*.whl
    touch "$folder.part/.complete"
    mv "$folder.part" "$folder"
}

# programs PACKAGE...: Python packages in a virtual environment, $cache/programs.
programs() {
    local folder=$cache/programs
    [ -e "$folder/.complete" ] && return
    say "installing $*"
    rm -rf "$folder"
    python3 -m venv "$folder" || die "no virtual environment; install python3-venv"
    "$folder/bin/pip" install -q --disable-pip-version-check "$@" >&2 || die "$* cannot be fetched from PyPI"
    touch "$folder/.complete"
}

driver 535 bookworm libcuda1 libnvidia-ml1
driver 550 trixie libcuda1 libnvidia-ml1 nvidia-smi
driver 555 experimental libcuda1 libnvidia-ml1
runtime 11.8 nvidia-cuda-runtime-cu11==11.8.89
runtime 12.9 nvidia-cuda-runtime-cu12==12.9.79
runtime 13 'nvidia-cuda-runtime>=13,<14'
[ "${1-}" != programs ] || programs 'numba-cuda[cu12]==0.30.4' cuda-bindings==12.9.10 cupy-cuda12x==14.2.0
say "all there: $cache"
echo "$cache"
