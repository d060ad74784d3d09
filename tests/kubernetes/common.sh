# shellcheck shell=bash
# A node of eight simulated GPUs, and the words in which the scripts here say what they see. They source this file, with the
# directory of the programs as the first argument; `cluster start` and `started=1` are theirs to say.
#
# Root, /dev/fuse. KUBERNETES_BIN names a folder of another release's programs. KEEP=1 leaves the cluster there.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
packaging=$(cd "$here/../../packaging" && pwd)
programs=$(realpath "${1:?usage: $0 DIRECTORY-OF-THE-PROGRAMS}")
[ "$(id -u)" = 0 ] || { echo "tests/kubernetes: containers need root" >&2; exit 1; }
BIN=$("$here/build")
HELM=$("$here/helm")
work=$(mktemp -d /tmp/cgpu-kubernetes.XXXXXX)
# Pods mount below it.
chmod 0755 "$work"
# A cgroup of its own: two runs at once don't take each other's away.
export BIN W=$work/cluster CG=${work##*/} CLEARED=$work/state CGPU_CONFIG=$work/config.toml SCHED_CONFIG=$work/scheduler.yaml
sim_pid= started=

cluster() { "$here/cluster" "$@"; }
kubectl() { cluster kubectl "$@"; }
passed=0
ok() { passed=$((passed + 1)); printf 'ok %2d  %s\n' "$passed" "$*"; }
fail() {
    printf 'tests/kubernetes: %s\n' "$*" >&2
    {
        kubectl get pods -A -o wide
        kubectl get events -A --sort-by=.lastTimestamp | tail -n 15
        tail -n 20 "$work/cgpu.log"
        kubectl -n kube-system logs -l app.kubernetes.io/name=cgpu --all-containers --prefix --tail=15
    } >&2 || true
    exit 1
}
# soon WHAT COMMAND...: waits until it succeeds, generously: the machine may be busy.
soon() {
    local what=$1 until=$((SECONDS + ${SOON:-300})); shift
    while [ "$SECONDS" -lt "$until" ]; do "$@" >/dev/null 2>&1 && return; sleep 0.2; done
    fail "$what"
}
# is WHAT WANTED GIVEN
is() { [ "$2" = "$3" ] && ok "$1" || fail "$1: wanted \"$2\", got \"$3\""; }
has() { case $3 in *"$2"*) ok "$1" ;; *) fail "$1: \"$2\" isn't in \"$3\"" ;; esac; }
phase() { [ "$(kubectl get pod "$1" -o 'jsonpath={.status.phase}')" = "$2" ]; }
node() { kubectl get node node1 -o "jsonpath={$1}"; }
has_units() { [ "$(node '.status.allocatable.aliyun\.com/gpu-mem')" = "$1" ]; }
annotation() { kubectl get pod "$1" -o "jsonpath={.metadata.annotations.$2}"; }
annotated() { [ "$(annotation "$1" ALIYUN_COM_GPU_MEM_ASSIGNED)" = true ]; }
variable() { kubectl exec "$1" -- env | sed -n "s/^$2=//p"; }
cgpu() { cluster in env CGPU_CONFIG="$CGPU_CONFIG" "$programs/cgpu" "$@"; }
registered() { cgpu ps | grep -cF "$1" || true; }
# The pods of a Deployment, to the API server and on the node: each counts what they have.
are_gone() { [ -z "$(kubectl get pods -l "app=$1" -o name)" ] && [ "$(registered "default/$1")" = 0 ]; }
is_ready() { [ "$(kubectl -n kube-system get "$1" -o 'jsonpath={.status.numberReady}{.status.readyReplicas}')" = "$2" ]; }
# Deletes pods, and waits until they are gone: their names come again.
delete() {
    kubectl delete pods "$@" --ignore-not-found --grace-period=1 --wait=false >/dev/null
    soon "pods $* are not gone" eval "[ -z \"\$(kubectl get pods $* --ignore-not-found -o name)\" ]"
}
inspect() { cluster in "$programs/kubectl-inspect-gpushare" --kubeconfig "$W/admin.conf" "$@"; }
extender() { cluster in busybox wget -q -O - "http://127.0.0.1:32766/$1"; }

finish() {
    local status=$?
    set +e
    touch "$work/turn-has-ended"
    if [ -n "${KEEP:-}" ]; then echo "W=$W BIN=$BIN $here/cluster kubectl get pods; cluster stop ends it" >&2; exit "$status"; fi
    [ -z "$started" ] || { kubectl delete daemonsets,deployments,statefulsets,pods --all -A --grace-period=1 --timeout=60s; cluster stop; } >/dev/null 2>&1
    if [ -n "$sim_pid" ]; then
        kill "$sim_pid" 2>/dev/null
        for _ in $(seq 50); do kill -0 "$sim_pid" 2>/dev/null || break; sleep 0.1; done
        kill -9 "$sim_pid" 2>/dev/null
    fi
    grep " $work/" /proc/self/mountinfo | awk '{print $5}' | sort -r | xargs -r umount -l
    rm -rf "$work"
    [ "$status" = 0 ] && echo "$passed checks passed on $("$BIN/kubelet" --version)"
    exit "$status"
}
trap finish EXIT

# A node of eight GPUs of two sizes.
mkdir -p "$work/gpu" "$work/bin"
"$programs/cgpu-sim" --dir "$work/gpu" --gpu 15GiB --gpu 15GiB --gpu 15GiB --gpu 15GiB --gpu 15GiB --gpu 15GiB --gpu 24GiB --gpu 24GiB \
    --driver 535.161.08 >"$work/sim.log" 2>&1 &
sim_pid=$!
soon "the simulated GPUs don't come" grep -q ready "$work/sim.log"
# Of its own, so that a GPU can be replaced there.
cp "$work/gpu/inventory.json" "$work/inventory.json"
cat > "$CGPU_CONFIG" <<TOML
state_dir = "$work/state"
log = "$work/cgpu.log"
[inventory]
source = "file"
path = "$work/inventory.json"
[driver]
root = "$work/gpu"
proc_root = "$work/gpu/proc"
[kubernetes]
grants = "$work/grants"
TOML
cp "$programs/rmtool" "$work/bin/"

minor=$("$BIN/kubelet" --version | sed -n 's/^Kubernetes v1\.\([0-9]*\).*/\1/p')
