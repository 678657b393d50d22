#!/usr/bin/env bash
# Every benchmark that needs a GPU, within ten minutes on one of 80 GB:
#   benchmarks/gpu/run.sh OUT [WHEELS]
# OUT: folder for results and logs. WHEELS: folder of wheels to install without a network (README.md says how to fill
# it). Called again with the same OUT, it resumes. LIMIT_SECONDS: another limit. PARTS: others, "checks" too.
# MODEL: folder of SmolLM2-135M-Instruct, if it is there already. TINY=1: smallest sizes, also on a CPU.
set -uo pipefail

[ $# -ge 1 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 2; }
mkdir -p "$1"
out=$(realpath "$1")
wheels=${2:+$(realpath "$2")}
cd "$(dirname "$0")/../.." || exit 1
packages=$out/packages
out=$(realpath --relative-to=. "$out")  # results hold the command, which should name no folder of this machine
# FAKE_CUDA: of a pretend GPU, beside which there must be what it lacks.
export PYTHONPATH=$PWD${FAKE_CUDA:+:$PWD/tests/pretend}${PYTHONPATH:+:$PYTHONPATH}
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
python=${PYTHON:-python3}

if [ -n "$wheels" ] && [ "$wheels" -nt "$packages/ready" ]; then
    "$python" -m pip install --quiet --no-index --no-deps --upgrade --target "$packages" "$wheels"/*.whl || exit 1
    touch "$packages/ready"
fi
# Before the image's own packages, whose PyTorch is used unless the folder has one.
[ ! -e "$packages/ready" ] || PYTHONPATH+=:$packages

limit=${LIMIT_SECONDS:-570}
failed=0
part() {  # $1: its name; $2: its limit in seconds; the rest: what Python runs
    local name=$1 began=$SECONDS left=$((limit - SECONDS))
    left=$((left < $2 ? left : $2))
    shift 2
    [ "$left" -gt 0 ] || { echo "== $name: no time left, the same command resumes"; return 75; }
    [ "$name" = checks ] || set -- "$@" --limit_seconds "$left"
    # A benchmark ends before the limit by itself, unless something takes far longer than the longest before it.
    timeout --foreground --kill-after 10 $((left + 20)) "$python" -m "$@" 2>&1 | tee -a "$out/$name.log"
    local status=${PIPESTATUS[0]}
    echo "== $name: exit status $status after $((SECONDS - began)) s"
    [ "$status" -eq 0 ] || failed=1
    return "$status"
}

# Once, whether trainers on this device do what they do on a CPU.
checks() {
    if ! "$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())'; then
        echo "== checks: no GPU"
    elif ! "$python" -c 'import peft, pytest'; then
        echo "== checks: left out, they need PEFT and pytest"
    elif [ ! -e "$out/checks.status" ]; then
        local tests=(tests/test_parity.py)
        [ -n "${TINY:-}" ] || tests+=(tests/test_{trainer,trainer_options,anchors,lora}.py)
        part checks 300 pytest --on-device -q -p no:cacheprovider -o faulthandler_timeout=120 "${tests[@]}"
        local status=$?
        [ "$status" -eq 75 ] || echo "$status" > "$out/checks.status"
    else
        [ "$(cat "$out/checks.status")" -eq 0 ] || { echo "== checks: failed before, see checks.log"; failed=1; }
    fi
}

model=${MODEL:-$out/smollm2}
weights() {  # whether there is the model; at tiny size, there need not be
    [ -e "$model/config.json" ] || "$python" -m benchmarks.smollm2 --output "$model" || [ -n "${TINY:-}" ]
}

for name in ${PARTS:-update_phase online recorded}; do
    case $name in
    checks) checks ;;
    update_phase) part update_phase 100 benchmarks.gpu.update_phase --output "$out/update_phase.json" ${TINY:+--tiny} ;;
    online | recorded)
        weights || { echo "== $name: no model"; failed=1; continue; }
        of_model=()
        [ ! -e "$model/config.json" ] || of_model=(--model "$model")
        if [ "$name" = online ]; then
            part online 110 benchmarks.gpu.online --output "$out/online" "${of_model[@]}" ${TINY:+--tiny}
        else
            part recorded 360 benchmarks.gpu.recorded --output "$out/recorded" "${of_model[@]}" \
                ${TINY:+--size tiny --jobs 1}
        fi
        ;;
    *) echo "== $name: there is no such part"; failed=1 ;;
    esac
done
exit $failed
