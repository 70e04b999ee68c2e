# Runs "$@" in the root $ROOT as a node with vcuda does: each of our files mounted where the guard mounts it, the
# driver's links and the loader's cache by the hook itself. Everything is in the caller's own mount namespace, the root
# below an overlay, so nothing stays. Without $SHIM it is a container with the driver alone.
#
# WORK: an empty folder. LIBRARIES: the driver's folder in the container. CUDA, NVML: the driver's files. TOOLS: what is
# put at /proof. AS: user and group, or nothing.
set -e
mount -t tmpfs none "$WORK"
mkdir "$WORK/upper" "$WORK/index" "$WORK/root"
root=$WORK/root
mount -t overlay overlay -o "lowerdir=$ROOT,upperdir=$WORK/upper,workdir=$WORK/index" "$root"

put() {
    mkdir -p "${2%/*}"
    if [ -d "$1" ]; then mkdir -p "$2"; else [ -e "$2" ] || : >"$2"; fi
    mount --bind "$1" "$2"
    [ -z "$3" ] || mount -o remount,bind,"$3" "$2"
}
put /proc "$root/proc"
put "$TOOLS" "$root/proof"

version=${CUDA##*/libcuda.so.}
if [ -n "$SHIM" ]; then
    put "$SHIM" "$WORK/shim"
    mkdir -p "$root/usr/local/vcuda"
    mount -t tmpfs none "$root/usr/local/vcuda"
    put "$WORK/shim" "$root$AT_SHIM" ro
    put "$WORK/shim" "$root$LIBRARIES/libcuda.so.$version" ro
    put "$WORK/shim" "$root$LIBRARIES/libnvidia-ml.so.$version" ro
    put "$CUDA" "$root$AT_CUDA" ro
    put "$NVML" "$root$AT_NVML" ro
    put "$LIMITS" "$root$AT_LIMITS" ro
    put "$USAGE" "$root$AT_USAGE"
    put "$PRELOAD" "$root/etc/ld.so.preload" ro
    mount -o remount,ro "$root/usr/local/vcuda"
else
    put "$CUDA" "$root$LIBRARIES/libcuda.so.$version" ro
    put "$NVML" "$root$LIBRARIES/libnvidia-ml.so.$version" ro
fi

echo '{"root":{"path":"root"}}' >"$WORK/config.json"
hook() { echo "{\"id\":\"c1\",\"status\":\"creating\",\"bundle\":\"$WORK\"}" | "$HOOK" "$@"; }
hook links --link "libcuda.so.$version::$LIBRARIES/libcuda.so.1" \
    --link "libnvidia-ml.so.$version::$LIBRARIES/libnvidia-ml.so.1"
hook ldcache --library "$LIBRARIES/libcuda.so.1" --library "$LIBRARIES/libnvidia-ml.so.1"

# This machine's chroot is started with the container's environment: what LD_PRELOAD names must be here, too.
if [ -n "$SHIM" ]; then
    mount -t tmpfs none /usr/local
    put "$WORK/shim" "$AT_SHIM"
fi
# shellcheck disable=SC2086 # both are several words, or none
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin MODEL_STATE=/proof/state $ENVIRONMENT \
    chroot ${AS:+--userspec=$AS} "$root" "$@"
