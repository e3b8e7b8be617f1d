#!/bin/sh
# Runs StreamRL by Ray on the machines that a file lists; this machine needs only ssh. The script starts a
# Ray cluster on them, runs `streamrl launch run.yaml --ray` on the first one, shows its output, and ends
# with its exit code.
#
#   deploy/multi_node.sh [-c PATH]... HOSTFILE run.yaml [OPTION OF streamrl launch]...
#
#   HOSTFILE   a line for each machine, the head of the cluster first: [USER@]HOST [ADDRESS]
#              ADDRESS is where the other machines reach it, by default the address that ssh connects
#              to. # begins a comment.
#   -c PATH    a file or folder below this folder that the run needs: data, a reward, a model
#
#   STREAMRL_SSH="ssh -p 2222"    the command that connects, with its options
#   STREAMRL_BIN=/opt/streamrl    where the machines have `streamrl` and `ray`, if not on their PATH
#   STREAMRL_FOLDER=streamrl-run  the folder of the run on the first machine, below the home folder
#   RAY_PORT=6379                 the port of the head
#   RAY_START="--num-gpus=4"      options of `ray start`, on every machine
#
# If a machine is lost or cannot be reached, its generators are missing, and the others go on. Ctrl-C lets
# the run finish its step and save; a second Ctrl-C does not wait. In both cases everything that this
# script has started ends. It also ends when the script or a connection dies, because its standard input
# then ends. Other Ray clusters are not touched.
set -eu

fail() {
    echo "multi_node.sh: $*" >&2
    exit 2
}

quoted() { printf "'%s' " "$(printf %s "$1" | sed "s/'/'\\\\''/g")"; }

copies=''
while [ "${1-}" = -c ]; do
    [ -e "${2-}" ] || fail "-c: there is no ${2-file}"
    copies="$copies$(quoted "$2")"
    shift 2
done
[ $# -ge 2 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | sed '$d' >&2; exit 2; }
[ -r "$1" ] || fail "cannot read $1"
[ -r "$2" ] || fail "cannot read $2"
hosts=$(tr -d '\r' <"$1" | sed 's/#.*//' | awk 'NF { print $1 "," $2 }')
[ -n "$hosts" ] || fail "$1 names no machine"
config=$2
shift 2
ssh=${STREAMRL_SSH:-ssh} folder=${STREAMRL_FOLDER:-streamrl-run} port=${RAY_PORT:-6379}
# Nobody can use this Ray without the token.
setup="export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=\"\$HOME/$folder/ray.token\";"
setup="$setup ${STREAMRL_BIN:+PATH=$STREAMRL_BIN:\$PATH; export PATH;}"
token=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')

on() { # on HOST SCRIPT: run SCRIPT on HOST, with this function's standard input
    # shellcheck disable=SC2086  # a command with options
    $ssh -o BatchMode=yes -o ServerAliveInterval=10 -o ServerAliveCountMax=12 "$1" \
        "exec sh -c $(quoted "$setup $2")"
}

# Runs "$@" on a machine. A line on standard input sends it SIGTERM, and the end of the input SIGKILL. If
# the input ends without a line, it gets SIGTERM, and SIGKILL $wait seconds later.
# shellcheck disable=SC2016  # for the remote shell
guard='guarded() { exec 3<&0; "$@" </dev/null 3<&- & child=$!
    { asked=; read -r asked <&3; kill $child
        while [ -z "$asked" ] && [ $wait -gt 0 ] && kill -0 $child; do sleep 1; wait=$((wait - 1)); done
        cat <&3; kill -9 $child; } >/dev/null 2>&1 & guard=$!
    exec 3<&-; wait $child; code=$?; kill $guard 2>/dev/null; exit $code; }'

# The processes that this script starts read from pipes that only this shell holds open: 8 for the run, 9
# for the cluster.
pipes=$(mktemp -d)
mkfifo "$pipes/run" "$pipes/cluster"
exec 8<>"$pipes/run" 9<>"$pipes/cluster"
mkdir -p logs

# shellcheck disable=SC2317,SC2329  # called by a trap
finish() {
    trap '' INT TERM HUP
    rm -rf "$pipes"
    exec 8>&- 9>&-
    wait || true
}
# shellcheck disable=SC2317,SC2329  # called by a trap
stop() {
    stopped=$1
    trap 'exit $stopped' INT TERM HUP
    echo stop >&8
}
stopped=''
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

start_ray() { # start_ray HOST ADDRESS OPTION...: in the background; the log is logs/ray-HOST.log
    # shellcheck disable=SC2016  # SSH_CONNECTION is for the remote shell
    script="$guard; set -- \$SSH_CONNECTION; address=${2:-\$3}; wait=60
guarded ray start --block --disable-usage-stats --node-ip-address=\"\$address\" $3 ${RAY_START-}"
    log=logs/ray-${1##*@}.log
    (exec 8>&- 9>&-
        { printf %s "$token" | on "$1" "umask 077; mkdir -p '$folder'; cat >'$folder'/ray.token" &&
            on "$1" "$script" <"$pipes/cluster"; } >"$log" 2>&1 ||
            [ ! -e "$pipes" ] || echo "multi_node.sh: no Ray on $1: see $log" >&2) &
}

head=$(echo "$hosts" | head -n 1)
first=${head%,*} address=${head#*,}
# shellcheck disable=SC2016  # for the remote shell
address=${address:-$(on "$first" 'set -- $SSH_CONNECTION; echo $3' </dev/null)}
start_ray "$first" "$address" "--head --port=$port"
ray=$!
until on "$first" "ray health-check --address=$address:$port" </dev/null >/dev/null 2>&1; do
    kill -0 $ray 2>/dev/null || exit 2
    sleep 1
done
for host in $(echo "$hosts" | tail -n +2); do
    start_ray "${host%,*}" "${host#*,}" "--address=$address:$port"
done

options=$(for word in "$config" "$@"; do quoted "$word"; done)
eval "set -- $copies"
{ tar -c -- "$config" "$@" || : >"$pipes/incomplete"; } |
    on "$first" "mkdir -p '$folder' && tar -x -C '$folder'"
[ ! -e "$pipes/incomplete" ] || exit 2
echo "multi_node.sh: Ray on $address:$port; the run's folder is in $first:$folder; Ctrl-C ends the run"
trap 'stop 130' INT
trap 'stop 143' TERM HUP
(exec 8>&- 9>&- && on "$first" "$guard; cd '$folder'; wait=900
guarded streamrl launch $options --ray $address:$port") <"$pipes/run" &
run=$! code=0
wait "$run" || code=$?
[ -z "$stopped" ] || { wait "$run" || true; code=$stopped; }
exit "$code"
