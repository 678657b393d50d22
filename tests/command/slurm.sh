#!/usr/bin/env bash
# Stand-ins on one machine for what the Slurm scripts call, by the name under which this file is started: Slurm's own
# commands, Python, and a server and a training that pretend. A node is an address of the loopback network, and is listed in
# $HOSTS. Each call is a line of the file $CALLS. $SERVER and $TRAINING set how the server and training behave.
name=${0##*/} argv=("$@") folder=$(dirname "$CALLS")
case $name in
sleep) exec "$(command -pv sleep)" 0.2 ;;
python) # settings.py imports PyTorch: its output is kept in $KNOWN by its arguments
    known=$KNOWN/$(printf '%s\0' "$@" | cksum | tr ' ' -)
    [ -f "$known" ] || { "$PYTHON" "$@" >"$known.part" && mv "$known.part" "$known"; } && cat "$known"
    exit
    ;;
esac
line=$(printf '%s\t' "$name" "${SLURM_NODEID-}" "$@")
printf '%s\n' "$line" >>"$CALLS"

value() { # OPTION: its value; the last one counts, as in every parser concerned
    printf '%s\n' "${argv[@]}" | grep -xF -A1 -e "$1" | tail -n 1
}

case $name in
srun) # starts a command once per node, each with its log
    while [[ $1 == --* ]]; do
        case $1 in --nodelist=* | --nodes=* | --ntasks=* | --output=*) declare "${1#--}" ;; esac
        shift
    done
    node=0 status=0
    for host in ${nodelist//,/ }; do
        SLURM_NODEID=$node SLURMD_NODENAME=$host "$@" >>"${output/\%t/$node}" 2>&1 &
        tasks+=($!) node=$((node + 1))
    done
    [ "$node" = "$nodes" ] && [ "$node" = "$ntasks" ] || status=1
    trap 'kill "${tasks[@]}"' TERM
    echo "${tasks[@]}" >"$folder/step-$(find "$folder" -name 'step-*' | wc -l)"
    for task in "${tasks[@]}"; do wait "$task" || status=$?; done
    exit $status
    ;;
scancel) # signals a step of the job
    kill "-${1#--signal=}" $(cat "$folder/step-${2#"$SLURM_JOB_ID".}")
    ;;
scontrol)
    [ "$1" != show ] || printf '%s\n' $HOSTS
    ;;
trl) # a server that is healthy once it has started
    [ "$SERVER" != "fails in training" ] || { until [ -e "$folder/trains" ]; do sleep 0.1; done; kill $$; } &
    touch "$folder/health"
    exec "$PYTHON" -m http.server "$(value --port)" --bind "$SLURMD_NODENAME" --directory "$folder"
    ;;
opo-trl) # training that needs the server: without `no_proxy`, $http_proxy would be asked for it
    host=$(value --vllm_server_host) port=$(value --vllm_server_port)
    [ -z "$host" ] || curl --silent --fail --output /dev/null "http://$host:$port/health" || exit 9
    if [ "$TRAINING" = saves ]; then
        mkdir -p "$(value --output_dir)/checkpoint-100"
        touch "$(value --output_dir)/checkpoint-100/trainer_state.json"
    fi
    [ "$TRAINING" != ends ] || exit 0
    touch "$folder/trains"
    exec tail -f /dev/null
    ;;
esac
