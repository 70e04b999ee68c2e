#!/usr/bin/env bash
# Debian packages of several releases, unpacked and never installed, for all that fetches real parts for tests. They are
# signed, come from the mirror that this machine's own apt uses, and are looked up in lists of their own, so that the
# system's are left alone.
#
#   integration/apt.sh unpack FOLDER RELEASE PACKAGE...   # lay the packages' files into FOLDER; no script of theirs runs
#   integration/apt.sh mirror                             # print the mirror
#
# The lists are below VCUDA_CACHE, or ~/.cache/vcuda. They are read again for a release that they lack, and where the mirror has
# replaced what they name, as it does all the time in the releases that are not stable yet.
set -euo pipefail

die() { printf 'apt: %s\n' "$*" >&2; exit 1; }
misused() { printf '%s: %s; see %s --help\n' "${0##*/}" "$*" "$0" >&2; exit 2; }

root=${VCUDA_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/vcuda}/apt
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
options=(
    -o "Dir::Etc=$root/etc" -o "Dir::State=$root/state" -o "Dir::State::status=$root/state/status"
    -o "Dir::Cache=$root/cache" -o Acquire::Languages=none -o Acquire::Retries=3
    -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false -o APT::Sandbox::User=root
)

mirror() {
    local found
    sources() { apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian' | sed -n 1p; }
    found=$(sources)
    if [ -z "$found" ]; then
        apt-get update -qq >/dev/null || die "apt-get update fails; see to this machine's apt sources"
        found=$(sources)
    fi
    [ -n "$found" ] || die "this machine's apt sources name no Debian mirror; add one"
    echo "$found"
}

# Reads the lists that hold RELEASE, if there are none of it yet.
update() {
    local release=$1 line mirror
    grep -qsx "$release" "$root/updated" && return
    [ -e "$keyring" ] || die "$keyring is missing; install debian-archive-keyring"
    mirror=$(mirror)
    mkdir -p "$root"/{etc/{apt.conf.d,preferences.d},state/lists/partial,cache/archives/partial}
    : >"$root/state/status"
    line="deb [arch=amd64 signed-by=$keyring] $mirror $release main non-free"
    grep -qsxF "$line" "$root/etc/sources.list" || echo "$line" >>"$root/etc/sources.list"
    apt-get "${options[@]}" update -qq >&2 || die "the package lists cannot be read from the Debian mirror; is the network there?"
    echo "$release" >>"$root/updated"
}

unpack() {
    local folder=$1 release=$2
    shift 2
    mkdir -p "$root"
    exec 8>"$root/.lock"
    flock 8
    update "$release"
    archives=$(mktemp -d "$folder/.archives.XXXXXX")
    trap 'rm -rf "$archives"' EXIT
    download() { (cd "$archives" && apt-get "${options[@]}" download -qq "${@/%//$release}") >&2; }
    download "$@" || { rm -rf "$root"/{updated,state/lists} && update "$release" && download "$@"; } ||
        die "$* of $release cannot be fetched; run it again"
    for archive in "$archives"/*.deb; do dpkg-deb -x "$archive" "$folder"; done
}

case ${1-} in
-h | --help) . "$(dirname "$0")/usage.sh"; usage "" "$1" ;;
mirror) mirror ;;
unpack) [ $# -ge 4 ] || misused "unpack needs a folder, a release and packages"; unpack "${@:2}" ;;
"") misused "a command is missing" ;;
*) misused "$1 is not known here" ;;
esac
