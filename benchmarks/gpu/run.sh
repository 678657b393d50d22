#!/usr/bin/env bash
# Every benchmark that needs a GPU, within 30 minutes on one H200:
#   benchmarks/gpu/run.sh OUT [WHEELS]
# OUT: folder for results and logs. WHEELS: folder of wheels to install without a network (README.md says how to fill
# it). Called again with the same OUT, it resumes. LIMIT_SECONDS: another limit. TINY=1: smallest sizes, also on a CPU.
set -uo pipefail

[ $# -ge 1 ] || { sed -n '2,5s/^# \{0,1\}//p' "$0"; exit 2; }
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

limit=${LIMIT_SECONDS:-1680}
failed=0
part() {  # $1: its name; the rest: what Python runs
    local name=$1 began=$SECONDS left=$((limit - SECONDS))
    shift
    [ "$left" -gt 0 ] || { echo "== $name: no time left, the same command resumes"; return 75; }
    # A benchmark ends before the limit by itself, unless something takes far longer than the longest before it.
    timeout --foreground --kill-after 10 $((left + 20)) "$python" -m "$@" 2>&1 | tee -a "$out/$name.log"
    local status=${PIPESTATUS[0]}
    echo "== $name: exit status $status after $((SECONDS - began)) s"
    [ "$status" -eq 0 ] || failed=1
    return "$status"
}
benchmark() {  # $1: a module of benchmarks.gpu; $2: what it writes or resumes
    part "$1" "benchmarks.gpu.$1" --output "$2" --limit_seconds $((limit - SECONDS)) ${TINY:+--tiny}
}

# Once, for five minutes at most, whether trainers on this device do what they do on a CPU.
checks() {
    local limit=$((SECONDS + 300 < limit ? SECONDS + 300 : limit)) tests=(tests/test_parity.py)
    [ -n "${TINY:-}" ] || tests+=(tests/test_{trainer,trainer_options,anchors,lora}.py)
    part checks pytest --on-device -q -p no:cacheprovider -o faulthandler_timeout=120 "${tests[@]}"
    local status=$?
    [ "$status" -eq 75 ] || echo "$status" > "$out/checks.status"
}
if ! "$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())'; then
    echo "== checks: no GPU"
elif ! "$python" -c 'import peft, pytest'; then
    echo "== checks: left out, they need PEFT and pytest"
elif [ ! -e "$out/checks.status" ]; then
    checks
else
    [ "$(cat "$out/checks.status")" -eq 0 ] || { echo "== checks: failed before, see checks.log"; failed=1; }
fi

# The short ones first: what is left of the limit, 30 minutes less 2 to spare, is for the runs of the four methods.
benchmark memory "$out/memory.json"
benchmark update_phase "$out/update_phase.json"
benchmark word_arithmetic "$out/word_arithmetic"
exit $failed
