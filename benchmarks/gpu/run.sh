#!/usr/bin/env bash
# Every benchmark that needs a GPU, within 30 minutes on one H200:
#   benchmarks/gpu/run.sh OUT [WHEELS]
# OUT: folder for results and logs. WHEELS: folder of wheels to install, where there is no network (README.md says how
# to fill it). Called again with the same OUT, it goes on where it stopped. LIMIT_SECONDS: another limit. TINY=1: on a CPU.
set -uo pipefail

[ $# -ge 1 ] || { sed -n '2,5s/^# \{0,1\}//p' "$0"; exit 2; }
mkdir -p "$1"
out=$(realpath "$1")
wheels=${2:+$(realpath "$2")}
cd "$(dirname "$0")/../.." || exit 1
out=$(realpath --relative-to=. "$out")  # results hold the command, and no machine's folders
export PYTHONPATH=$PWD TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
python=${PYTHON:-python3}

if [ -n "$wheels" ]; then
    # Before the image's own packages, whose PyTorch stays in use unless the folder brings another one.
    if [ ! -e "$out/packages/ready" ]; then
        "$python" -m pip install --quiet --no-index --no-deps --upgrade --target "$out/packages" "$wheels"/*.whl || exit 1
        touch "$out/packages/ready"
    fi
    PYTHONPATH+=:$out/packages
fi

failed=0
part() {  # $1: name; the rest: arguments of its python
    local name=$1 began=$SECONDS
    shift
    echo "== $name: $*"
    "$python" "$@" 2>&1 | tee -a "$out/$name.log"
    local status=${PIPESTATUS[0]}
    echo "== $name: exit status $status after $((SECONDS - began)) s"
    [ "$status" -eq 0 ] || failed=1
    return "$status"
}

tiny=${TINY:+--tiny}
# The short ones first: what is left of the limit, 30 minutes less 2 to spare, is for the runs of the four methods.
[ -e "$out/update_phase.done" ] ||
    { part update_phase -m benchmarks.gpu.update_phase --output "$out/update_phase.json" $tiny &&
        touch "$out/update_phase.done"; }
[ -n "$tiny" ] || [ -e "$out/gpu_memory.json" ] ||
    { part memory benchmarks/gpu/memory.py && cp benchmarks/results/gpu_memory.json "$out/"; }
part word_arithmetic -m benchmarks.gpu.word_arithmetic --output "$out/word_arithmetic" \
    --limit_seconds $((${LIMIT_SECONDS:-1680} - SECONDS)) $tiny
exit $failed
