"""OPOTrainer with a real vLLM: it has the trained weights, and changes nothing else."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml


ROOT = Path(__file__).parents[2]

# Mean difference of log-probabilities: 0.005 was measured with vLLM's bfloat16, 0.6 to 1.2 with old weights.
SAME, OTHER = 0.02, 0.1


@pytest.mark.vllm
def test_vllm_has_the_trained_weights(run, place):
    result = run("sync", synchronized=True, **place)
    assert result["gap"] < SAME
    assert max(result["sampling_gap"]) < SAME
    assert result["changed"]


@pytest.mark.vllm
def test_without_synchronization_it_does_not(run, place):
    result = run("sync", synchronized=False, **place)
    assert result["gap"] > OTHER
    assert result["sampling_gap"][0] < SAME  # before the first step there is nothing to synchronize
    assert min(result["sampling_gap"][1:]) > OTHER
    assert not result["changed"]


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: pip install 'opo_trl[deepspeed]'")
@pytest.mark.parametrize("synchronized", [True, False])
def test_vllm_next_to_four_processes_under_zero3(run, tmp_path, synchronized):
    config = yaml.safe_load((ROOT / "recipes" / "accelerate" / "zero3.yaml").read_text()) | {"mixed_precision": "no"}
    (tmp_path / "zero3.yaml").write_text(yaml.safe_dump(config))
    launcher = (sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "zero3.yaml"))
    result = run("sync", launcher, mode="colocate", zero3=True, synchronized=synchronized)
    assert (result["processes"], result["distributed"]) == (4, "DEEPSPEED")
    assert result["gap"] < SAME if synchronized else result["gap"] > OTHER


@pytest.mark.vllm
def test_run_with_vllm_is_determined_by_its_completions_and_weights(run, place):
    result = run("replay", **place)
    assert result["rollouts"] == 3
    # The same numbers are added in the same order, so the results are bitwise the same.
    assert result["with_weights"] == {"gradient_norm": 0.0, "parameters": 0.0}
    # The weights differ from 1 by the error of the sampler's log-probabilities; gradients may differ by as much.
    assert 0 < result["without_weights"]["gradient_norm"] < result["weight_error"] < 0.5
    assert 0 < result["without_weights"]["parameters"] < result["weight_error"]


@pytest.mark.vllm
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapter_is_synchronized_and_leaves_the_base_alone(run, dtype):
    result = run("lora", mode="colocate", trainer="opo", dtype=dtype)
    assert result["gap"] < SAME
    assert result["base"] > 20
    assert (result["moved"], result["drift"]) == (0, 0.0)
    assert result["logits"] == 0.0  # of the saved adapter on the base model


@pytest.mark.vllm
def test_in_trl_the_base_drifts(run):
    """Without this the tests above would prove nothing."""
    result = run("lora", mode="colocate", trainer="grpo", dtype="bfloat16")
    assert result["moved"] == 14  # the layers with an adapter
    assert result["drift"] > 1e-3
    assert result["logits"] > 1e-3


@pytest.mark.vllm
@pytest.mark.parametrize("place", ["server"], indirect=True)
def test_server_that_is_killed_ends_the_run(run, place):
    result = run("killed", **place)
    assert result["step"] == 1
    assert f"The vLLM server at http://127.0.0.1:{place['port']} no longer answers" in result["error"]
    assert result["seconds"] < 120


@pytest.mark.vllm
def test_without_vllm_the_package_trains(tiny_model, tmp_path):
    script = f"""
import sys
sys.modules["vllm"] = None  # its import fails
from helpers import trained
assert trained({tiny_model!r}, {str(tmp_path)!r}).state.global_step == 1
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
