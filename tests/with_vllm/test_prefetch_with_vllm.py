"""`prefetch_rollouts` with a real vLLM server: which policy has sampled what, and what ends and resumes a run."""

import re
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file
from serving import result_of, vllm_server
from started_programs import wait_until


pytestmark = pytest.mark.vllm

# Largest difference between two log-probabilities of a token: server and trainer compute in float32.
SAME = 1e-3
OTHER = 0.1

ARGUMENTS = ("--max_model_len", "128", "--dtype", "float32")


@pytest.fixture(scope="module")
def server(environment: dict[str, str], tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    with vllm_server(tiny_model, environment, log, *ARGUMENTS) as options:
        yield {"mode": "server", **options}


@pytest.fixture
def train(start: Callable, server: dict, tmp_path: Path) -> Callable[..., dict]:
    def result(**options) -> dict:
        return result_of(start("run_prefetch.py", "train", tmp_path, **server, **options), tmp_path)

    return result


def requests_at(port: int) -> float:
    """Number of requests that a vLLM server is working on, or has in its queue."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        metrics = answer.read().decode()
    numbers = re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", metrics, re.MULTILINE)
    assert len(numbers) == 2, metrics
    return sum(map(float, numbers))


def test_each_rollout_is_one_rollout_old(train, server):
    result = train()
    first, *later = result["to_policy"]
    assert first < SAME  # nobody has asked for it in advance
    assert min(later) > OTHER
    assert max(result["to_policy_before"]) < SAME
    assert result["ages"] == [0, 2, 2, 2]
    assert result["prefetching"] == []
    assert requests_at(server["port"]) == 0


def test_without_prefetching_each_rollout_is_the_policys(train):
    result = train(without="prefetch")
    assert max(result["to_policy"]) < SAME
    assert min(result["to_policy_before"][1:]) > OTHER


def test_without_synchronization_the_server_does_not_follow_the_policy(train):
    result = train(without="sync")
    assert min(result["to_policy_before"][2:]) > OTHER


def test_a_killed_run_resumes_with_the_same_server(start, server, tmp_path):
    killed = start("run_prefetch.py", "train", tmp_path, killed_after=5, **server)
    assert killed.returncode == -signal.SIGKILL
    assert "in flight: ['prefetch']" in killed.stdout
    wait_until(lambda: requests_at(server["port"]) == 0, limit=30)  # it does not write for nobody
    end_of_rollout = tmp_path / "checkpoint-4" / "model.safetensors"
    weights = load_file(end_of_rollout)
    checkpoint = str(tmp_path / "checkpoint-3")  # inside the second rollout
    resumed = start("run_prefetch.py", "train", tmp_path, resume_from_checkpoint=checkpoint, **server)
    result = result_of(resumed, tmp_path)
    for name, weight in load_file(end_of_rollout).items():
        assert weight.equal(weights[name]), name
    assert result["ages"] == [0, 2, 0, 2]  # what was in flight is generated again
    assert max(result["to_policy_before"]) < SAME


def test_a_server_that_is_killed_meanwhile_ends_the_run_which_resumes(start, environment, tiny_model, tmp_path):
    kill = {"killed_after": 3, "mode": "server"}
    with vllm_server(tiny_model, environment, tmp_path / "first.log", *ARGUMENTS) as first:
        ended = start("run_prefetch.py", "train", tmp_path, server_group=first["pid"], **kill, **first)
    assert ended.returncode == 1
    assert "in flight: ['prefetch']" in ended.stdout
    assert f"The vLLM server at http://127.0.0.1:{first['port']} no longer answers" in ended.stderr
    # TRL's client has tried for a minute, once: with the request for completions, and not again with weights.
    assert "Max retries exceeded with url: /v1/completions" in ended.stderr
    assert "start_weight_update" not in ended.stderr
    log = tmp_path / "second.log"
    with vllm_server(tiny_model, environment, log, *ARGUMENTS, port=first["port"]) as second:
        checkpoint = str(tmp_path / "checkpoint-4")
        saved = {"resume_from_checkpoint": checkpoint}
        resumed = start("run_prefetch.py", "train", tmp_path, mode="server", **saved, **second)
        result = result_of(resumed, tmp_path)
    assert max(result["to_policy_before"]) < SAME
