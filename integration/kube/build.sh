#!/usr/bin/env bash
# Builds kubelet, kube-apiserver and kube-scheduler from the Go modules that go.mod names, into the cache, and prints
# the folder: it is what the cluster tests take as KUBE_BIN_DIR. Two to five minutes a program on two cores, once.
set -euo pipefail
. "$(dirname "$0")/../usage.sh"
usage "" "$@"
cd "$(dirname "$0")"

version=$(sed -n 's/^require k8s.io\/kubernetes v//p' go.mod)
out=$(../setup.sh --where)/kube-$version
programs="kubelet kube-scheduler kube-apiserver"

command -v go >/dev/null || { echo "kube: there is no Go here; install 1.26 or newer" >&2; exit 1; }
mkdir -p "$out"
for program in $programs; do
    [ -x "$out/$program" ] && continue
    styled 2 "kube: building $program $version" >&2
    # kubelet refuses an API server of another minor version, so the programs must say which they are.
    CGO_ENABLED=0 GOFLAGS=-mod=readonly working "kube: $program" nice go build -trimpath -buildvcs=false -o "$out/$program.part" \
        -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=v$version -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=${version:2:2}" \
        "k8s.io/kubernetes/cmd/$program" >&2
    mv "$out/$program.part" "$out/$program"
done
echo "$out"
