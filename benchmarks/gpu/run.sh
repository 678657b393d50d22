#!/usr/bin/env bash
# Every benchmark that needs a GPU, within 30 minutes on one H200:
#   benchmarks/gpu/run.sh OUT [WHEELS]
# OUT: folder for results and logs. WHEELS: folder of wheels to install without a network (README.md says how to fill
# it). Called again with the same OUT, it resumes. LIMIT_SECONDS: another limit. TINY=1: on a CPU.
set -uo pipefail

[ $# -ge 1 ] || { sed -n '2,5s/^# \{0,1\}//p' "$0"; exit 2; }
mkdir -p "$1"
out=$(realpath "$1")
wheels=${2:+$(realpath "$2")}
cd "$(dirname "$0")/../.." || exit 1
out=$(realpath --relative-to=. "$out")  # results hold the command, which should name no folder of this machine
export PYTHONPATH=$PWD TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
python=${PYTHON:-python3}

if [ -n "$wheels" ]; then
    # Before the image's own packages, whose PyTorch is used unless the folder has one.
    if [ ! -e "$out/packages/ready" ]; then
        "$python" -m pip install --quiet --no-index --no-deps --upgrade --target "$out/packages" "$wheels"/*.whl || exit 1
        touch "$out/packages/ready"
    fi
    PYTHONPATH+=:$out/packages
fi

tiny=${TINY:+--tiny}
failed=0
part() {  # $1: a module of benchmarks.gpu; $2: what it writes or resumes
    local name=$1 output=$2 began=$SECONDS
    shift 2
    "$python" -m "benchmarks.gpu.$name" --output "$output" --limit_seconds $((${LIMIT_SECONDS:-1680} - SECONDS)) "$@" \
        2>&1 | tee -a "$out/$name.log"
    local status=${PIPESTATUS[0]}
    echo "== $name: exit status $status after $((SECONDS - began)) s"
    [ "$status" -eq 0 ] || failed=1
}

# The short ones first: what is left of the limit, 30 minutes less 2 to spare, is for the runs of the four methods.
[ -n "$tiny" ] || part memory "$out/memory.json"
part update_phase "$out/update_phase.json" $tiny
part word_arithmetic "$out/word_arithmetic" $tiny
exit $failed
