# shellcheck shell=bash
# Userlands of other suites, for the bash scripts that source this file: tests/packages and tests/engines-of.
#
# A userland is made by debootstrap once on a machine. A run changes an overlay of it, in mount, process and network
# namespaces of its own: all that it mounted and started goes with them.
# CGPU_USERLANDS is the folder of the userlands; CGPU_MIRROR and CGPU_UBUNTU_MIRROR are the mirrors.

userlands=${CGPU_USERLANDS:-${CGPU_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/cgpu}/userlands}

# userland NAME SUITE PACKAGE...: prints the folder of the suite's userland with these packages; makes it if it is missing
# or has other packages.
userland() {
    local tree=$userlands/$1 suite=$2 packages="${*:3}" from
    # Ubuntu has some of the packages in `universe`; one script serves all its suites, whose newest names an old
    # debootstrap lacks. Debian's newest suites are made as sid is.
    case $suite in
        jammy | noble)
            from=(--components=main,universe "$suite" "$tree" "${CGPU_UBUNTU_MIRROR:-http://archive.ubuntu.com/ubuntu}" gutsy)
            ;;
        *)
            from=("$suite" "$tree" "${CGPU_MIRROR:-http://deb.debian.org/debian}")
            [ -e "/usr/share/debootstrap/scripts/$suite" ] || from+=(sid)
            ;;
    esac
    mkdir -p "$userlands"
    (
        flock 9
        [ "$(cat "$tree.complete" 2>/dev/null)" != "$packages" ] || exit 0
        rm -rf "$tree" "$tree.complete"
        mkdir "$tree"
        echo "making a userland of $suite in $tree: once, two minutes" >&2
        unshare --mount debootstrap --variant=minbase "${from[@]}" >"$tree.log" 2>&1 \
            || { echo "debootstrap of $suite failed: $tree.log" >&2; exit 1; }
        cp -L /etc/resolv.conf "$tree/etc/resolv.conf"
        # No service starts there.
        printf '#!/bin/sh\nexit 101\n' > "$tree/usr/sbin/policy-rc.d"
        chmod 0755 "$tree/usr/sbin/policy-rc.d"
        # A mirror may have a list that has expired; debootstrap does not ask for its date either.
        # shellcheck disable=SC2016 # for the shell of the userland
        DEBIAN_FRONTEND=noninteractive unshare --mount chroot "$tree" sh -ec \
            'apt-get -qq -o Acquire::Check-Valid-Until=false update
             apt-get -qq install -y --no-install-recommends "$@"; apt-get clean' sh "${@:3}" >>"$tree.log" 2>&1 \
            || { echo "the packages of $suite can't be installed: $tree.log" >&2; exit 1; }
        echo "$packages" > "$tree.complete"
    ) 9>"$tree.lock" || return 1
    echo "$tree"
}

# in_userland TREE WORK [FROM:TO...] -- COMMAND...: runs the command in an overlay of the tree, as process 1. WORK is an
# empty folder for what it writes; FROM is seen as TO there.
in_userland() {
    mkdir "$2"/{upper,overlay,root}
    unshare --mount --pid --net --fork --kill-child --propagation private bash -ec '
        tree=$1 work=$2 root=$2/root
        shift 2
        mount -t overlay -o "lowerdir=$tree,upperdir=$work/upper,workdir=$work/overlay" none "$root"
        mount -t proc proc "$root/proc"
        mount --rbind /sys "$root/sys"
        mount -t tmpfs none "$root/run"
        mount -t tmpfs -o mode=755 none "$root/dev"
        # Nodes of its own: what happens to one there, a chown say, does not reach this machine.
        for node in null zero full random urandom tty fuse; do
            cp --archive --no-preserve=ownership "/dev/$node" "$root/dev/"
        done
        mkdir "$root/dev/pts" "$root/dev/shm"
        mount -t tmpfs -o mode=1777 none "$root/dev/shm"
        mount -t devpts -o newinstance,ptmxmode=0666 none "$root/dev/pts"
        ln -s pts/ptmx "$root/dev/ptmx"
        ln -s /proc/self/fd "$root/dev/fd"
        while [ "$1" != -- ]; do
            mkdir -p "$root${1#*:}"
            mount --bind "${1%%:*}" "$root${1#*:}"
            shift
        done
        shift
        # No chroot: in one, the kernel makes no user namespaces.
        cd "$root"
        pivot_root . mnt
        cd /
        umount -l /mnt
        busybox ip link set lo up
        exec /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 "$@"
    ' -- "$@"
}
