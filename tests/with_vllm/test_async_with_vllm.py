"""AsyncOPOTrainer with a real vLLM server that generates meanwhile."""

import statistics
import sys

import pytest


# Mean difference of log-probabilities, in float32.
SAME, OTHER = 1e-4, 0.01

SCRIPT = "async_run.py"
FAST = {"max_steps": 8, "learning_rate": 2e-3}  # so fast that old weights are revealed
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.vllm
def test_policy_learns_and_the_server_has_its_weights(run, full_server):
    config = {"max_steps": 40, "learning_rate": 2e-4, "temperature": 0.7}
    result = run("train", script=SCRIPT, config=config, **full_server)
    assert not result["adapter"]
    assert result["gap"] < SAME
    assert result["gap_of_base"] > OTHER  # what the server has been sent
    log = result["log"]
    assert len(log) == 40
    rewards = [entry["reward"] for entry in log]
    assert statistics.fmean(rewards[-10:]) > statistics.fmean(rewards[:10]) + 0.1
    # Generation does not wait for training, nor is a completion older than allowed.
    assert 1 <= max(entry["opo/off_policy_steps"] for entry in log) <= 5
    # What the model's generation_config.json says was overruled: sampled was what is trained.
    assert log[0]["opo/log_ratio/absmax"] < 1e-3


@pytest.mark.vllm
def test_adapter_reaches_the_server(run, adapter_server):
    result = run("train", script=SCRIPT, config={**FAST, "learning_rate": 1e-2}, **adapter_server)
    assert result["adapter"]
    assert result["gap"] < SAME
    assert result["gap_of_base"] > OTHER


@pytest.mark.vllm
def test_two_processes_train_with_one_server(run, full_server):
    config = {**FAST, "ddp_backend": "gloo", "per_device_train_batch_size": 24}
    result = run("train", (sys.executable, *TORCHRUN), script=SCRIPT, config=config, **full_server)
    assert result["processes"] == 2
    assert result["gap"] < SAME
    assert result["gap_of_base"] > OTHER


@pytest.mark.vllm
def test_server_that_is_killed_ends_the_training(run, full_server):
    """The last test of this server."""
    result = run("fault", script=SCRIPT, config={**FAST, "max_steps": 43}, **full_server)
    assert result["status"] == 1
    assert str(full_server["port"]) in result["output"].splitlines()[-1]
    assert result["seconds"] < 90
