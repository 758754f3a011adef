#!/usr/bin/env bash
# A real SLURM cluster of two nodes on one Linux machine, to try multinode_trainer.slurm on. Needs root, and Debian's
# packages: apt-get install --no-install-recommends slurmctld slurmd slurm-client munge iproute2
#
#     scripts/local_slurm.sh up         # prints the `export SLURM_CONF=...` that sbatch, squeue and scontrol need
#     scripts/local_slurm.sh kill 2     # cut the power of node n2
#     scripts/local_slurm.sh start 2    # and switch it on again
#     scripts/local_slurm.sh down
#
# Each node, n1 and n2, is a slurmd in a network namespace of its own: it has its own address and host name, and shares
# the machine's files and cores. All state is in LOCAL_SLURM_ROOT (default: /tmp/local_slurm), all names begin with lsl.
set -euo pipefail

root=${LOCAL_SLURM_ROOT:-/tmp/local_slurm}
nodes=(1 2)
subnet=10.113.0
export SLURM_CONF=$root/slurm.conf

fail() {
    echo "$*" >&2
    exit 1
}

start_node() { # N
    ip netns exec "lsl-n$1" unshare --uts sh -c "hostname n$1; exec slurmd -N n$1 -f '$SLURM_CONF'"
}

kill_node() { # N: everything that runs on it, at once
    local pids
    pids=$(ip netns pids "lsl-n$1" 2>/dev/null) || return 0
    # shellcheck disable=SC2086  # one word per process
    [[ -z $pids ]] || kill -KILL $pids
}

network() {
    ip link add lsl0 type bridge
    ip addr add "$subnet.254/24" dev lsl0
    ip link set lsl0 up
    for n in "${nodes[@]}"; do
        ip netns add "lsl-n$n"
        ip link add "lslv$n" type veth peer name eth0 netns "lsl-n$n"
        ip link set "lslv$n" master lsl0 up
        ip -n "lsl-n$n" addr add "$subnet.$n/24" dev eth0
        ip -n "lsl-n$n" link set eth0 up
        ip -n "lsl-n$n" link set lo up
        mkdir -p "/etc/netns/lsl-n$n" # `ip netns exec` shows it as /etc
        {
            echo "127.0.0.1 localhost"
            printf "$subnet.%s n%s\n" $(for m in "${nodes[@]}"; do echo "$m $m"; done)
        } >"/etc/netns/lsl-n$n/hosts"
    done
}

configure() {
    mkdir -p "$root"/{run,log,state,spool}
    chmod 755 "$root" "$root/run"
    head -c 1024 /dev/urandom >"$root/munge.key"
    chmod 600 "$root/munge.key"
    # Short times, so that a dead node and a requeue are matters of seconds. cred_expire is what a requeue waits for.
    cat >"$SLURM_CONF" <<END
ClusterName=local
SlurmctldHost=$(hostname)($subnet.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$root/run/munge.sock,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
KillWait=10
SlurmdTimeout=15
InactiveLimit=0
GresTypes=gpu
PropagateResourceLimits=NONE
SlurmctldPidFile=$root/run/slurmctld.pid
SlurmdPidFile=$root/run/slurmd-%n.pid
SlurmctldLogFile=$root/log/slurmctld.log
SlurmdLogFile=$root/log/slurmd-%n.log
SlurmdSpoolDir=$root/spool/%n
StateSaveLocation=$root/state
$(for n in "${nodes[@]}"; do echo "NodeName=n$n NodeAddr=$subnet.$n CPUs=2 RealMemory=4000 Gres=gpu:1 State=UNKNOWN"; done)
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
    echo "Name=gpu File=/dev/zero" >"$root/gres.conf" # no GPU, but --gpus-per-node=1 can be asked for
    echo "CgroupPlugin=cgroup/v1" >"$root/cgroup.conf"
}

idle() {
    timeout 5 sinfo --noheader --Node --states=idle --format=%N 2>/dev/null | sort -u | wc -l
}

up() {
    [[ $(id -u) == 0 ]] || fail "needs root, for network namespaces"
    for program in slurmctld slurmd munged ip; do
        command -v $program >/dev/null || fail "$program is missing: see the packages at the top of this file"
    done
    down
    configure
    network
    munged --force --key-file="$root/munge.key" --socket="$root/run/munge.sock" --pid-file="$root/run/munged.pid" \
        --log-file="$root/log/munged.log" --seed-file="$root/munge.seed"
    slurmctld -f "$SLURM_CONF"
    for n in "${nodes[@]}"; do start_node "$n"; done
    for ((tries = 0; tries < 150; tries++)); do
        if [[ $(idle) == "${#nodes[@]}" ]]; then
            echo "export SLURM_CONF=$SLURM_CONF"
            return
        fi
        sleep 0.2
    done
    tail -n 20 "$root"/log/*.log >&2
    fail "the cluster did not come up"
}

down() {
    for daemon in slurmctld munged; do
        pid=$(cat "$root/run/$daemon.pid" 2>/dev/null) || continue
        # The file may be older than the machine's last start: is it still that daemon's id?
        [[ $(cat "/proc/$pid/comm" 2>/dev/null) != "$daemon" ]] || kill -KILL "$pid"
    done
    for n in "${nodes[@]}"; do
        kill_node "$n"
        ip netns del "lsl-n$n" 2>/dev/null || true
        rm -rf "/etc/netns/lsl-n$n"
    done
    ip link del lsl0 2>/dev/null || true
    rm -rf "$root"
}

case ${1:-} in
up | down) "$1" ;;
kill) kill_node "${2:?which node? 1 or 2}" ;;
start) start_node "${2:?which node? 1 or 2}" ;;
*) fail "usage: $0 up | down | kill N | start N" ;;
esac
