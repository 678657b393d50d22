"""
What only shows on a GPU: how often the host waits for it, and on which device a tensor is. A library that gives the
CPU build of torch devices named `cuda:0`, …, in `shared` next to the checkout, stands in for one.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import environment


pytestmark = pytest.mark.device

TESTS = Path(__file__).parent


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def found(request, shared, tiny_model, tmp_path_factory) -> dict:
    run = shared / "tools" / "fakecuda" / "run.sh"
    if not run.exists() or shutil.which("g++") is None:
        pytest.skip("needs tools/fakecuda in ../shared or OPO_TRL_SHARED, and g++")
    folder, n = tmp_path_factory.mktemp("device"), str(request.param)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", n] if request.param > 1 else []
    done = subprocess.run(
        [str(run), "-n", n, sys.executable, *launch, str(TESTS / "on_device.py"), tiny_model, str(folder)],
        env=environment(PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="0,1"),  # other tests hide all devices
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("setting", ["plain", "two passes", "replay"])
def test_an_optimizer_step_waits_and_gathers_no_more_often_than_grpo(found, setting):
    counts = found[setting]
    assert counts["GRPOTrainer"]["waits"] > 20  # the count sees something
    for kind, number in counts["OPOTrainer"].items():
        assert number <= counts["GRPOTrainer"][kind], counts


def test_entry_that_a_subclass_leaves_on_the_host_is_replayed_after_resuming(found):
    assert found["resumed"]
