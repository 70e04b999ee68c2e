#!/usr/bin/env bash
# Fetches what the demo and the node tests need and this machine lacks: containerd of two lines, runc, etcd,
# a static busybox, C libraries of three Debian releases, and a linker with a chosen glibc floor.
#
# Real parts come as signed Debian packages, from the mirror that this machine's own apt uses, and are unpacked
# into a cache folder: no service is installed, started or changed. Only what builds and tests need (compilers,
# python3-venv, debootstrap) is installed with apt-get, as root, where it is missing. Quick when all is there.
#
#   integration/setup.sh            # fill the cache
#   integration/setup.sh --where    # print the cache folder, fetch nothing
#
# VCUDA_CACHE names another cache folder than ~/.cache/vcuda.
set -euo pipefail
. "$(dirname "$(readlink -f "$0")")/usage.sh"
usage "--where" "$@"

cache=${VCUDA_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/vcuda}
if [ "${1-}" = --where ]; then
    echo "$cache"
    exit 0
fi

say() { styled 2 "setup: $*" >&2; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

[ "$(uname -m)" = x86_64 ] || die "this machine is $(uname -m); only x86_64 is supported so far"
[ "$(id -u)" = 0 ] || die "containers need root; run it as root"
. /etc/os-release
[ "${ID-}" = debian ] || die "this is ${PRETTY_NAME:-no Debian}; the tests take containerd and C libraries from Debian's packages, run them on Debian 12 or newer"

# --- what building needs, installed for good ---------------------------------------------------------------

missing=()
command -v cc >/dev/null || missing+=(gcc libc6-dev)
# NVIDIA's static runtime is C++; roots of other releases are made by debootstrap.
command -v c++ >/dev/null || missing+=(g++)
command -v debootstrap >/dev/null || missing+=(debootstrap)
command -v openssl >/dev/null || missing+=(openssl)
[ -e /etc/ssl/certs/ca-certificates.crt ] || missing+=(ca-certificates)
/usr/bin/python3 -c 'import venv, ensurepip' 2>/dev/null || missing+=(python3 python3-venv)
if ! command -v cargo >/dev/null && [ ! -x "$HOME/.cargo/bin/cargo" ]; then missing+=(rustup); fi
if [ ${#missing[@]} -gt 0 ]; then
    say "installing ${missing[*]}"
    apt-get update -qq >/dev/null
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null ||
        die "apt-get could not install ${missing[*]}; install them by hand (Rust 1.95 by rustup where this release has no rustup package)"
fi
export PATH="$PATH:$HOME/.cargo/bin"
cargo --version >/dev/null 2>&1 || rustup default stable >&2 ||
    die "there is no Rust toolchain; install Rust 1.95 or newer"

# --- Debian packages, unpacked into the cache --------------------------------------------------------------

mkdir -p "$cache"
exec 9>"$cache/.lock"
flock 9

# The C library of the machine itself, and runc for it: runc of a newer release needs a newer C library.
host=${VERSION_CODENAME:?}
apt=$(dirname "$(readlink -f "$0")")/apt.sh

# unpack FOLDER RELEASE PACKAGE...: the packages of that release, laid into $cache/FOLDER.
unpack() {
    local folder="$cache/$1" release=$2
    shift 2
    [ -e "$folder/.complete" ] && [ "$(cat "$folder/.complete")" = "$*" ] && return
    say "unpacking $* of $release"
    rm -rf "$folder" "$folder.part"
    mkdir -p "$folder.part"
    VCUDA_CACHE=$cache "$apt" unpack "$folder.part" "$release" "$@" || exit 1
    echo "$*" >"$folder.part/.complete"
    mv "$folder.part" "$folder"
}

# A root file system with one release's C library and a shell that is linked against it.
unpack_root() {
    local folder="$cache/root-$1"
    [ -e "$folder/.complete" ] && return
    unpack "root-$1.new" "$1" libc6 libc-bin libgcc-s1 dash
    local root="$cache/root-$1.new"
    # Debian's merged /usr, as base-files lays it.
    for dir in bin sbin lib lib64; do
        [ -d "$root/$dir" ] && [ ! -L "$root/$dir" ] && {
            mkdir -p "$root/usr/$dir"
            cp -a "$root/$dir/." "$root/usr/$dir/"
            rm -rf "${root:?}/$dir"
        }
        mkdir -p "$root/usr/$dir"
        ln -sfn "usr/$dir" "$root/$dir"
    done
    ln -sfn dash "$root/usr/bin/sh"
    mkdir -p "$root"/{dev,etc,proc,root,run,sys,tmp,var}
    chmod 1777 "$root/tmp"
    rm -rf "$root"/usr/share "$root"/usr/lib/x86_64-linux-gnu/gconv
    mv "$root" "$folder"
}

unpack containerd-2.1 forky containerd
unpack containerd-1.7 trixie containerd
unpack runc "$host" runc
unpack busybox "$host" busybox-static
unpack etcd trixie etcd-server
unpack kubectl forky kubectl
for release in bullseye bookworm trixie; do unpack_root "$release"; done

"${apt%/*}/zig.sh" >/dev/null || exit 1

say "all there: $cache"
