"""AsyncOPOTrainer with a real vLLM server that generates meanwhile."""

import re
import statistics
import sys

import pytest


# Mean difference of log-probabilities, in float32.
SAME, OTHER = 1e-4, 0.01

SCRIPT = "async_run.py"
FAST = {"max_steps": 8, "learning_rate": 2e-3}  # so fast that old weights are revealed
FAST_ADAPTER = {"max_steps": 8, "learning_rate": 1e-2}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def mean_reward(log: list[dict]) -> float:
    return statistics.fmean(entry["reward"] for entry in log)


@pytest.mark.vllm
def test_policy_learns_and_the_server_has_its_weights(run, full_server):
    config = {"max_steps": 40, "learning_rate": 2e-4, "temperature": 0.7}
    result = run("train", script=SCRIPT, synchronized=True, config=config, **full_server)
    assert not result["adapter"]
    assert result["gap"] < SAME
    assert result["gap_of_base"] > OTHER  # what the server has been sent
    log = result["log"]
    assert len(log) == 40
    assert mean_reward(log[-10:]) > mean_reward(log[:10]) + 0.1
    # Generation does not wait for training, nor is a completion older than allowed.
    assert 1 <= max(entry["opo/off_policy_steps"] for entry in log) <= 5
    # What the model's generation_config.json says was overruled: sampled was what is trained.
    assert log[0]["opo/log_ratio/absmax"] < 1e-3


@pytest.mark.vllm
def test_without_synchronization_the_server_does_not(run, full_server):
    result = run("train", script=SCRIPT, synchronized=False, config=FAST, **full_server)
    assert result["gap"] > OTHER
    assert result["gap_of_base"] < SAME
    first, last = result["log"][0], result["log"][-1]
    assert first["opo/log_ratio/absmax"] < 1e-3 < 0.1 < last["opo/log_ratio/absmax"]


@pytest.mark.vllm
def test_adapter_reaches_the_server(run, adapter_server):
    result = run("train", script=SCRIPT, synchronized=True, config=FAST_ADAPTER, **adapter_server)
    assert result["adapter"]
    assert result["gap"] < SAME
    assert result["gap_of_base"] > OTHER


@pytest.mark.vllm
@pytest.mark.parametrize("kind", ["full_server", "adapter_server"])
def test_two_processes_train_with_one_server(run, request, kind):
    server = request.getfixturevalue(kind)
    config = {**(FAST_ADAPTER if server["adapter"] else FAST), "ddp_backend": "gloo"}
    config |= {"per_device_train_batch_size": 24}
    result = run("train", (sys.executable, *TORCHRUN), script=SCRIPT, synchronized=True, config=config, **server)
    assert result["processes"] == 2
    assert result["adapter"] == server["adapter"]
    assert result["gap"] < SAME
    assert result["gap_of_base"] > OTHER


# Faults; the last two end the servers


def ended(run, server: dict, what: str) -> dict:
    """How a run has ended that had 40 steps to go when something failed."""
    result = run("fault", script=SCRIPT, what=what, patience=10.0, config={**FAST, "max_steps": 43}, **server)
    assert result["status"] == 1
    return result


@pytest.mark.vllm
def test_worker_that_is_killed_ends_the_training(run, full_server):
    result = ended(run, full_server, "worker killed")
    assert "The rollout worker has been killed" in result["output"]
    assert result["seconds"] < 90


@pytest.mark.vllm
def test_server_that_hangs_ends_the_training(run, adapter_server):
    result, port = ended(run, adapter_server, "server hung"), adapter_server["port"]
    assert re.search(rf"server at http://127.0.0.1:{port} no longer|port={port}\): Read", result["output"])
    assert result["seconds"] < 400  # TRL's limit, if weights are due


@pytest.mark.vllm
def test_server_that_is_killed_ends_the_training(run, full_server):
    result = ended(run, full_server, "server killed")
    assert str(full_server["port"]) in result["output"].splitlines()[-1]
    assert result["seconds"] < 90
