#!/usr/bin/env bash
# A SLURM cluster of several nodes on one Linux machine, for tests: apt-get install slurm-wlm munge iproute2.
#   slurm_cluster.sh start DIR [NODES] [CPUS_PER_NODE]
#   slurm_cluster.sh exec DIR [-n NODE] [-u USER] COMMAND...    run a command on the login node, or on NODE
#   slurm_cluster.sh crash DIR NODE                             kill a node and all its processes
#   slurm_cluster.sh boot DIR NODE                              boot it again
#   slurm_cluster.sh kill-slurmd DIR NODE                       kill the slurmd of a node; its jobs' processes continue
#   slurm_cluster.sh pause-controller DIR                       stop slurmctld, so that it does not respond
#   slurm_cluster.sh resume-controller DIR                      continue slurmctld
#   slurm_cluster.sh stop DIR
# Each node has its own network, UTS, PID and mount namespace, and a veth pair to a bridge in the network namespace of
# the login node. The network, /etc and cgroups of the host are not changed, and killing the first process of a PID
# namespace kills the whole node. The script calls itself with sudo; commands run as the calling user, or as USER.
# Folders in SLURM_CLUSTER_VISIBLE, separated by colons, are readable for all users on the nodes, like a shared disk.
set -euo pipefail
self=$(readlink -f "$0")
[ "$(id -u)" = 0 ] || exec sudo -n --preserve-env=PATH,SLURM_CLUSTER_SUBNET,SLURM_CLUSTER_VISIBLE "$self" "$@"
command=${1:?start, exec, crash, boot, kill-slurmd, pause-controller, resume-controller or stop} dir=$(readlink -m "${2:?folder of the cluster}")
shift 2
subnet=${SLURM_CLUSTER_SUBNET:-10.213.7}
conf=$dir/etc/slurm.conf

die() { echo "slurm_cluster: $*" >&2; exit 1; }
wait_for() { # SECONDS COMMAND...
    local tries=$(($1 * 20))
    shift
    for ((; tries; tries--)); do "$@" >/dev/null 2>&1 && return 0; sleep 0.05; done
    return 1
}
# A file contains "PID START"; the start time tells whether the PID was reused by another process.
started() { # PID -> start time in clock ticks; fails if the process has ended
    local stat
    stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
    set -- ${stat##*) }
    [ "$1" != Z ] && echo "${20}"
}
ended() { ! started "$1" >/dev/null; }
outer() { # NODE -> PID of unshare, which created its namespaces
    local pid start
    read -r pid start 2>/dev/null <"$dir/run/$1.pid" && [ "$(started "$pid")" = "$start" ] && echo "$pid"
}
first() { # NODE -> PID of its first process, on the host
    local pid child
    pid=$(outer "$1") && child=$(cat "/proc/$pid/task/$pid/children") && [ -n "$child" ] && echo "${child%% *}"
}
inside() { # NODE COMMAND...
    local pid
    pid=$(first "$1") || die "$1 is not running"
    shift
    nsenter -t "$pid" --net --uts --pid --mount -- "$@"
}
boot() { # NODE ADDRESS: create its namespaces, then its network interface
    local node=$1 pid hub
    rm -f "$dir/run/$node.connected"
    setsid unshare --net --uts --mount --pid --fork --mount-proc --kill-child=KILL \
        bash "$self" node "$dir" "$node" </dev/null >>"$dir/log/$node.log" 2>&1 &
    echo "$! $(started $!)" >"$dir/run/$node.pid"
    disown
    wait_for 10 first "$node" || die "$node has no namespaces: $(tail -n 1 "$dir/log/$node.log")"
    readlink "/proc/$(first "$node")/ns/net" >>"$dir/run/networks"
    [ "$node" != login ] || return 0
    pid=$(first "$node") hub=$(first login)
    nsenter -t "$hub" --net ip link del "to-$node" 2>/dev/null || true # left by a crash
    nsenter -t "$hub" --net ip link add "to-$node" type veth peer name eth0 netns "$pid"
    nsenter -t "$hub" --net ip link set "to-$node" master slurm-bridge up
    nsenter -t "$pid" --net sh -c "ip addr add $2/24 dev eth0 && ip link set lo up && ip link set eth0 up"
    : >"$dir/run/$node.connected"
}
crash() { # NODE: the kernel kills all processes of a PID namespace together with the first
    local pid holder
    holder=$(outer "$1") || return 0
    pid=$(first "$1") && kill -9 "$pid" && { wait_for 10 ended "$pid" || die "$1 does not end"; }
    wait_for 10 ended "$holder" || die "$1 does not end"
    rm -f "$dir/run/$1.pid"
}
mount_visible() { # FOLDERS: mount an empty folder over a parent that others cannot enter, and the folders into it
    local folder top mounts=() at
    IFS=: read -ra folders <<<"$1"
    for folder in "${folders[@]}"; do
        at=$dir/run/mount.$HOSTNAME.${#mounts[@]}
        mkdir "$at"
        mount --bind "$folder" "$at"
        mounts+=("$at")
    done
    for folder in "${folders[@]}"; do
        top=/$(cut -d/ -f2 <<<"$folder")
        mountpoint -q "$top" || [ $(($(stat -c 0%a "$top") & 1)) = 1 ] || mount -t tmpfs -o mode=755 visible "$top"
    done
    for at in "${!mounts[@]}"; do
        mkdir -p "${folders[at]}"
        mount --move "${mounts[at]}" "${folders[at]}"
        rmdir "${mounts[at]}"
    done
}
node_address() { echo "$subnet.$((10 + ${1#node}))"; }
leftovers() { # processes in a network namespace of the cluster, and its mounts and interfaces on the host
    readlink /proc/[0-9]*/ns/net 2>/dev/null | grep -Fxf "$dir/run/networks" || true
    grep -F "$dir" /proc/self/mountinfo || true
    ip -o link | grep -E "to-node|slurm-bridge" || true
}
all_gone() { [ -z "$(leftovers)" ]; }
idle() { [ "$(inside login env SLURM_CONF="$conf" sinfo -h -N -t idle -o %N | sort -u | wc -l)" = "$1" ]; }
configure() { # NODES CPUS
    local i
    head -c 1024 /dev/urandom >"$dir/etc/munge.key"
    chmod 400 "$dir/etc/munge.key"
    {
        echo "127.0.0.1 localhost"
        echo "$subnet.1 login"
        for ((i = 1; i <= $1; i++)); do echo "$(node_address "node$i") node$i"; done
    } >"$dir/etc/hosts"
    cat >"$conf" <<CONF
ClusterName=test
SlurmctldHost=login($subnet.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits until its credential has expired, by default for two minutes; the minimum is 5.
AuthInfo=socket=$dir/run/munge.sock,cred_expire=5
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/run/slurmctld
SlurmdPidFile=$dir/run/%n.slurmd
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/%n.slurmd.log
ProctrackType=proctrack/linuxproc
PropagateResourceLimits=NONE
# As many CPUs as the test requests, regardless of the machine.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=100000,bf_interval=1
# Timeouts for tests: a dead node is detected within seconds, and used again after it has booted.
ReturnToService=2
SlurmdTimeout=6
MessageTimeout=5
InactiveLimit=0
KillWait=10
MinJobAge=3600
NodeName=node[1-$1] CPUs=$2 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=10 State=UP
CONF
    : >"$dir/etc/cgroup.conf"
    case $(slurmd -V) in *" 2"[0-2].*) ;; *) echo "CgroupPlugin=disabled" >"$dir/etc/cgroup.conf" ;; esac
}

case $command in
start)
    for tool in slurmctld slurmd munged ip unshare nsenter; do
        command -v $tool >/dev/null || die "$tool is missing; apt-get install slurm-wlm munge iproute2"
    done
    ! outer login >/dev/null || die "already running in $dir"
    unshare --net --uts --mount --pid --fork --mount-proc true || die "this machine allows no namespaces"
    rm -rf "$dir"
    mkdir -p "$dir"/{etc,log,run,state,spool}
    chmod 755 "$dir" "$dir"/*
    configure "${1:-3}" "${2:-4}"
    trap 'bash "$self" stop "$dir"' EXIT # if it fails
    boot login
    wait_for 20 test -S "$dir/run/munge.sock" || die "munged does not start: $(tail -n 1 "$dir/log/munged.log")"
    for ((i = 1; i <= ${1:-3}; i++)); do boot "node$i" "$(node_address "node$i")"; done
    wait_for 60 idle "${1:-3}" || { tail -n 5 "$dir"/log/*.log >&2; die "its nodes do not become idle"; }
    trap - EXIT
    ;;
node) # the first process of a node
    hostname "$1"
    HOSTNAME=$1
    mount --bind "$dir/etc/hosts" /etc/hosts
    [ -z "${SLURM_CLUSTER_VISIBLE:-}" ] || mount_visible "$SLURM_CLUSTER_VISIBLE"
    export SLURM_CONF=$conf
    if [ "$1" = login ]; then
        ip link set lo up
        ip link add slurm-bridge type bridge
        ip addr add "$subnet.1/24" dev slurm-bridge
        ip link set slurm-bridge up
        munged --foreground --force --socket="$dir/run/munge.sock" --key-file="$dir/etc/munge.key" --num-threads=4 \
            --log-file="$dir/log/munged.log" --pid-file="$dir/run/munged.lock" --seed-file="$dir/run/munge.seed" &
        wait_for 10 test -S "$dir/run/munge.sock"
        slurmctld -D -i &
    else
        wait_for 20 test -e "$dir/run/$1.connected"
        slurmd -D -N "$1" &
    fi
    while :; do sleep 1000000 & wait || true; done # and reap orphaned processes
    ;;
exec)
    node=login user=${SUDO_USER:-root}
    while getopts "+n:u:" option; do
        case $option in n) node=$OPTARG ;; u) user=$OPTARG ;; *) exit 2 ;; esac
    done
    shift $((OPTIND - 1))
    # sudo has cleared the environment; commands receive variables by env.
    inside "$node" env SLURM_CONF="$conf" \
        setpriv --reuid "$user" --regid "$(id -g "$user")" --init-groups env --chdir="$PWD" "$@"
    ;;
crash)
    outer "$1" >/dev/null || die "$1 is not running"
    crash "$1"
    ;;
boot)
    ! outer "$1" >/dev/null || die "$1 is running"
    boot "$1" "$(node_address "$1")"
    ;;
kill-slurmd) inside "$1" kill -KILL "$(cat "$dir/run/$1.slurmd")" ;;
pause-controller) inside login kill -STOP "$(cat "$dir/run/slurmctld")" ;;
resume-controller) inside login kill -CONT "$(cat "$dir/run/slurmctld")" ;;
stop)
    for file in "$dir"/run/node*.pid "$dir/run/login.pid"; do
        name=${file##*/}
        crash "${name%.pid}"
    done
    wait_for 30 all_gone || die "left over: $(leftovers)"
    ;;
*) die "no such command: $command" ;;
esac
