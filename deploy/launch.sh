#!/bin/sh
# Starts a run on several hosts with nothing but ssh and a shell: the buffer and the learner on the
# first host, a generator on each. StreamRL is installed on the hosts, not necessarily here.
#
#   deploy/launch.sh [-n] [-r] [-f FOLDER] [-a ADDRESS] [-s STREAMRL] [-c PATH]... CONFIG
#                    [USER@]HOST...
#
#   -n, --dry-run   print the commands and start nothing
#   -r              go on from the newest checkpoint; without it the learner refuses a run that is there
#   -f FOLDER       working folder on the hosts, relative to their home folder (streamrl-run)
#   -a ADDRESS      address of the first host for the others (its HOST)
#   -s STREAMRL     the command on the hosts (streamrl), where their PATH lacks it
#   -c PATH         a file or folder that the configuration names, to be copied to every host
#
# Keys are made once on the first host and handed to the others over ssh, without server.secret.
# Logs come to logs/NAME.log here. Nothing is started again: `streamrl launch --hosts` does that.
# Ctrl-C, or the end of the learner, ends everything: the generators, then the buffer. If this script
# or a connection dies the hosts end what they run, since its input ends there.
set -eu

usage() {
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | sed '$d' >&2
    exit 2
}

dry='' resume='' folder=streamrl-run address='' streamrl=streamrl copies=''
while [ $# -gt 0 ]; do
    case $1 in
    -n | --dry-run) dry=1 ;;
    -r) resume=--resume ;;
    -f | -a | -s | -c)
        [ $# -gt 1 ] || usage
        case $1 in
        -f) folder=$2 ;;
        -a) address=$2 ;;
        -s) streamrl=$2 ;;
        -c) copies="$copies
$2" ;;
        esac
        shift
        ;;
    -*) usage ;;
    *) break ;;
    esac
    shift
done
[ $# -ge 2 ] || usage
config=$1
shift
[ -r "$config" ] || { echo "launch.sh: cannot read $config" >&2; exit 2; }
first=$1
address=${address:-${first##*@}}

# One word of a remote command line.
quoted() { printf "'%s'" "$(printf %s "$1" | sed "s/'/'\\\\''/g")"; }
at=$(quoted "$folder")
command=$(quoted "$streamrl")
settings="STREAMRL__BUFFER__CURVE=keys STREAMRL__BUFFER__URL=zmq://$address:29600"
settings="$settings STREAMRL__WEIGHTS__ADDRESS=tcp://$address:29601"

# Run on HOST: connect HOST SCRIPT. What the script gets is this function's input.
connect() {
    if [ -n "$dry" ]; then
        printf 'ssh %s %s\n' "$1" "$(quoted "$2")"
    else
        ssh -o BatchMode=yes -o ServerAliveInterval=10 -o ServerAliveCountMax=12 -- "$1" "$2"
    fi
}

# The process gets SIGTERM when the input ends, and SIGKILL 20 s later.
# shellcheck disable=SC2016  # for the shell of the host
guard='exec 3<&0; "$@" </dev/null 3<&- & child=$!
{ cat <&3; kill $child; i=0; while [ $i -lt 20 ] && kill -0 $child; do sleep 1; i=$((i+1)); done
kill -9 $child; } >/dev/null 2>&1 & guard=$!
exec 3<&-; wait $child; code=$?; kill $guard 2>/dev/null; exit $code'

start() { # start HOST ROLE [ARGUMENT]...
    host=$1
    shift
    connect "$host" "cd $at && exec env $settings sh -c $(quoted "$guard") sh $command $* --config run.yaml"
}

for host in "$@"; do
    connect "$host" "mkdir -p $at && cat > $at/run.yaml" <"$config"
    [ -z "$copies" ] || printf '%s\n' "$copies" | sed 1d | while IFS= read -r path; do
        if [ -n "$dry" ]; then
            echo "tar -c -- $path | ssh $host tar -x -C $at"
        else
            tar -c -- "$path" | connect "$host" "tar -x -C $at"
        fi
    done
done
connect "$first" "cd $at && { [ -e keys/server.secret ] || $command keys new keys; }" </dev/null
for host in "$@"; do
    [ "$host" = "$first" ] || if [ -n "$dry" ]; then
        echo "ssh $first tar -c -C $at --exclude=server.secret keys | ssh $host tar -x -p -C $at"
    else
        connect "$first" "tar -c -C $at --exclude=server.secret keys" </dev/null |
            connect "$host" "tar -x -p -C $at"
    fi
done

if [ -n "$dry" ]; then
    start "$first" buffer
    # shellcheck disable=SC2086  # nothing, where it is empty
    start "$first" learner $resume
    number=0
    for host in "$@"; do
        start "$host" generator --id "generator-$number"
        number=$((number + 1))
    done
    exit 0
fi

# What is started reads from a pipe that this shell holds open, and nobody after it.
pipes=$(mktemp -d)
mkfifo "$pipes/buffer" "$pipes/others"
exec 8<>"$pipes/buffer" 9<>"$pipes/others"
mkdir -p logs
others=''

# shellcheck disable=SC2329  # called by the trap
finish() {
    trap '' INT TERM HUP
    exec 9>&-
    # shellcheck disable=SC2086  # several process ids
    [ -z "$others" ] || wait $others || true
    exec 8>&-
    wait || true
    rm -rf "$pipes"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

(exec 8>&- 9>&- && start "$first" buffer) <"$pipes/buffer" >>logs/buffer.log 2>&1 &
number=0
for host in "$@"; do
    (exec 8>&- 9>&- && start "$host" generator --id "generator-$number") \
        <"$pipes/others" >>"logs/generator-$number.log" 2>&1 &
    others="$others $!"
    number=$((number + 1))
done
# shellcheck disable=SC2086  # nothing, where it is empty
(exec 8>&- 9>&- && start "$first" learner $resume) <"$pipes/others" >>logs/learner.log 2>&1 &
learner=$!
others="$others $learner"
echo "started: $number generators, logs in logs/; Ctrl-C ends the run"
code=0
wait "$learner" || code=$?
[ "$code" = 0 ] || echo "launch.sh: the learner ended with exit code $code, see logs/learner.log" >&2
exit "$code"
