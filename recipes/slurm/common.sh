# Shared by colocate.sbatch and vllm_server.sbatch, which source it without changing their arguments. Sets hosts, gpus
# (per node), logs (a folder), fields (for training), output_dir, server_port, server_arguments.
# Arguments after `--` stay in the positional parameters.
# shellcheck shell=bash disable=SC2016,SC2034

fail() { # MESSAGE [STATUS]
    echo "error: $1" >&2
    exit "${2:-1}"
}

[ -f "${1:-}" ] || fail "no recipe '${1:-}' in $PWD: the first argument is the path of one"
recipe=$1
shift
fields=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    fields+=("$1")
    shift
done
[ $# -eq 0 ] || shift

names=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
mapfile -t hosts <<<"$names"
gpus=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:?is not set here: set GPUS_PER_NODE}}
port=$((20000 + SLURM_JOB_ID % 10000)) # differs between jobs on the same nodes; below the ports that Linux assigns
logs=${LOG_DIR:-runs/slurm}/$SLURM_JOB_ID
mkdir -p "$logs"

settings=$(python recipes/slurm/settings.py "$recipe" "${fields[@]}")
mapfile -t server_arguments <<<"$settings"
output_dir=${server_arguments[0]} server_port=${server_arguments[1]}
server_arguments=("${server_arguments[@]:2}")

# A run that has a checkpoint resumes. One that this job started, and that has none yet, starts again.
newest_checkpoint() { # trainer_state.json is written last
    find "$output_dir" -maxdepth 2 -path '*/checkpoint-*/trainer_state.json' 2>/dev/null | sort -V | tail -n 1 || true
}
started_from=$(newest_checkpoint)
if [ -n "$started_from" ]; then
    echo "Continuing from ${started_from%/*}"
    fields=(--resume_from_checkpoint last "${fields[@]}")
elif [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
    fields=(--resume_from_checkpoint auto "${fields[@]}")
fi

# Near the time limit (sbatch's --signal): training saves and ends, and the job is requeued, unless the next attempt
# would only repeat this one.
requeue() {
    local step=${server:+1} second # the server is the job's step 0, if there is one
    scancel --signal=TERM "$SLURM_JOB_ID.${step:-0}" || true
    for ((second = 0; second < ${SAVE_TIMEOUT:-240}; second++)); do
        kill -0 "$training" 2>/dev/null || break
        sleep 1
    done
    [ "$(newest_checkpoint)" != "$started_from" ] ||
        fail "out of time without a new checkpoint, so not requeued: raise --time"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}
trap requeue USR1
training='' server=''
trap 'kill $training $server 2>/dev/null || true' EXIT # still running

start_training() { # HOST…: one launcher on each; the first is the main one
    echo "Training on $*, $gpus processes each, logs in $logs/train-*.log"
    srun --nodes=$# --ntasks=$# --ntasks-per-node=1 --nodelist="$(IFS=, && echo "$*")" --cpu-bind=none \
        --kill-on-bad-exit=1 --output="$logs/train-%t.log" --open-mode=append \
        bash -c 'exec opo-trl train --machine_rank "$SLURM_NODEID" "$@"' bash \
        --num_machines $# --num_processes $(($# * gpus)) --main_process_ip "$1" --main_process_port "$port" \
        --config "$recipe" "${fields[@]}" &
    training=$!
}

await_server() { # HOST
    until curl --silent --fail --max-time 5 --output /dev/null "http://$1:$server_port/health"; do
        kill -0 "$server" 2>/dev/null || fail "the vLLM server ended before it was ready: see $logs/server.log"
        [ $SECONDS -lt "${SERVER_TIMEOUT:-1800}" ] ||
            fail "the vLLM server is not ready after $SECONDS s (SERVER_TIMEOUT): see $logs/server.log"
        sleep 2
    done
}

train_with_server() { # HOST…
    start_training "$@"
    wait -n || true # for the first of the two to end
    kill -0 "$training" 2>/dev/null && fail "the vLLM server ended during training: see $logs/server.log"
    end_with_training
}

end_with_training() {
    local status=0
    wait "$training" || status=$?
    [ $status -eq 0 ] || fail "training ended with status $status: see $logs/train-*.log" "$status"
}
