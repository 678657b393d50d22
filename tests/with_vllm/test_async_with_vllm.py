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
def test_filter_of_the_models_configuration_spoils_log_ratios(run, full_server):
    """`AsyncGRPOTrainer` leaves `min_p` out of its requests, so that the server takes the model's."""
    config = {"max_steps": 1, "temperature": 0.7}
    result = run("train", script=SCRIPT, synchronized=True, config=config, requests={"min_p": None}, **full_server)
    assert result["log"][0]["opo/log_ratio/absmax"] > 0.1


@pytest.mark.vllm
def test_without_synchronization_the_server_does_not(run, full_server):
    result = run("train", script=SCRIPT, synchronized=False, config=FAST, **full_server)
    assert result["gap"] > OTHER
    assert result["gap_of_base"] < SAME
    first, last = result["log"][0], result["log"][-1]
    assert first["opo/log_ratio/absmax"] < 1e-3 < 0.1 < last["opo/log_ratio/absmax"]


@pytest.mark.vllm
@pytest.mark.parametrize("synchronized", [True, False])
def test_adapter_reaches_the_server(run, adapter_server, synchronized):
    result = run("train", script=SCRIPT, synchronized=synchronized, config=FAST_ADAPTER, **adapter_server)
    assert result["adapter"]
    gaps = result["gap"], result["gap_of_base"]
    same, other = gaps if synchronized else reversed(gaps)
    assert same < SAME
    assert other > OTHER


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


@pytest.mark.vllm
def test_log_probabilities_of_another_temperature_are_refused(run, adapter_server):
    result = run("refused", script=SCRIPT, config={"temperature": 0.7, "max_steps": 1}, **adapter_server)
    assert "runs with `--logprobs-mode raw_logprobs`, so with temperature=0.7 it does not" in result["error"]
    assert "Start it with `--logprobs-mode processed_logprobs`." in result["error"]


# Faults; the last two end the servers


def ended(run, server: dict, what: str, config: dict | None = None, **options) -> dict:
    """How a run has ended that had 40 steps to go when something failed."""
    config = FAST | {"max_steps": 43} | (config or {})
    result = run("fault", script=SCRIPT, what=what, patience=10.0, config=config, **options, **server)
    assert result["status"] == 1
    return result


@pytest.mark.vllm
@pytest.mark.parametrize("processes", [1, 2])
def test_worker_that_is_killed_ends_the_training(run, full_server, processes):
    two = {"config": {"ddp_backend": "gloo", "per_device_train_batch_size": 24}, "torchrun": TORCHRUN}
    result = ended(run, full_server, "worker killed", **(two if processes == 2 else {}))
    assert "The process of the rollout worker has ended with exit code -9" in result["output"]
    assert result["seconds"] < 90


@pytest.mark.vllm
@pytest.mark.parametrize("kind", ["full_server", "adapter_server"])
def test_server_that_hangs_ends_the_training(run, request, kind):
    server = request.getfixturevalue(kind)
    result = ended(run, server, "server hung")
    assert re.search(
        rf"server at http://127.0.0.1:{server['port']} no longer|port={server['port']}\): Read", result["output"]
    )
    assert result["seconds"] < 400  # TRL's limit, if weights are due


@pytest.mark.vllm
def test_server_that_is_killed_ends_the_training(run, full_server):
    result = ended(run, full_server, "server killed")
    assert str(full_server["port"]) in result["output"].splitlines()[-1]
    assert result["seconds"] < 90
