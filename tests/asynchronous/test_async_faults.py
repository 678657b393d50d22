"""A worker or reward that fails, in the worker's own process, and a server that rejects or is silent."""

import asyncio
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing import forkserver
from types import SimpleNamespace

import faulty
import psutil
import pytest
import scripted
from helpers import free_port, wait_until
from invariance.launch import SERVER, prepare
from transformers import AutoTokenizer
from trl.experimental.async_grpo import async_rollout_worker
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker
from trl.experimental.async_grpo.vllm_client import VLLMClient

from opo_trl.asynchronous import faults
from opo_trl.asynchronous.targets import make_targets
from opo_trl.objective import OPO
from opo_trl.rewards.errors import RewardError
from opo_trl.rewards.scoring import IsolatedReward
from opo_trl.rollout import vllm_server


PLAIN = {"defaults": {"role": "assistant"}, "fields": {"content": {"content": "text"}}}
LIMIT = 120.0  # seconds, most of which the worker's process takes to import its libraries


@pytest.fixture
def healthy():
    """Address of a server that answers every request with status 200."""

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Healthy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@contextmanager
def working(monkeypatch, tiny_model, tmp_path, url, reward, *, tokens=4, start="forkserver", limit=1.0):
    """TRL's worker, guarded and running, with a loop that needs no server; forked with all imports, or spawned."""
    prepare()
    context = multiprocessing.get_context(start)
    monkeypatch.setattr(async_rollout_worker, "mp", SimpleNamespace(get_context=lambda method: context))
    monkeypatch.setattr(forkserver, "connect_to_new_process", SERVER.connect_to_new_process)
    for name in ("is_vllm_available", "is_aiohttp_available"):
        monkeypatch.setattr(async_rollout_worker, name, lambda: True)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.response_template = PLAIN
    worker = AsyncRolloutWorker(
        model_name=tiny_model,
        dataset=scripted.DATA,
        reward_funcs=[reward],
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        num_generations=scripted.G,
        max_inflight_tasks=2 * scripted.G,
        max_tokens=tokens,
    )
    make_targets(worker, OPO(scripted.config(tmp_path)))
    worker._loop_cls = faulty.LocalLoop
    faults.guard(worker, SimpleNamespace(server_url=url), limit=limit)
    worker.start()
    try:
        yield worker
    finally:
        began = time.monotonic()
        worker.stop()
        assert time.monotonic() - began < 14  # TRL waits for 15 s while samples are on their way


def take_samples(worker):
    """What the trainer's dataset does, until something is raised."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        try:
            worker.rollout_buffer.get(timeout=0.5)
        except queue.Empty:
            worker.check_health(stale_after_s=60.0)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (faulty.exits, "The reward function exits has raised SystemExit: 0"),
        (
            faulty.hangs,
            r"Rewards \(hangs\) have not returned for heartbeat_stale_after_s=1 s\. Give them a time limit",
        ),
        (faulty.scores_nothing, r"No completion of the last 100 groups has a score.*Check .*\(scores_nothing\)"),
    ],
)
def test_reward_that_fails_ends_the_run(monkeypatch, tiny_model, tmp_path, healthy, reward, message):
    with (
        working(monkeypatch, tiny_model, tmp_path, healthy, reward) as worker,
        pytest.raises(RewardError, match=rf"The rollout worker has failed: RewardError: {message}"),
    ):
        take_samples(worker)


def test_reward_may_have_workers_of_its_own(monkeypatch, tiny_model, tmp_path, healthy):
    isolated = IsolatedReward(faulty.fine, workers=1)
    with working(monkeypatch, tiny_model, tmp_path, healthy, isolated, start="spawn", limit=60.0) as worker:
        deadline = time.monotonic() + LIMIT
        while worker.rollout_buffer.empty() and time.monotonic() < deadline:
            worker.check_health(stale_after_s=60.0)
            time.sleep(0.5)
        assert worker.rollout_buffer.get(timeout=1).metrics["reward"] == 0.0


# With many tokens, the worker is killed inside a sample.
@pytest.mark.parametrize(("tokens", "start"), [(4, "spawn"), (20_000, "forkserver")])
def test_worker_that_is_killed_ends_the_run(monkeypatch, tiny_model, tmp_path, healthy, tokens, start):
    with working(monkeypatch, tiny_model, tmp_path, healthy, faulty.fine, tokens=tokens, start=start) as worker:
        worker.rollout_buffer.get(timeout=LIMIT)
        time.sleep(1)  # the pipe is full
        os.kill(worker._process.pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"has ended with exit code -9.*Resume from the last checkpoint"):
            take_samples(worker)
        assert time.monotonic() - began < 20


def test_worker_ends_with_a_killed_trainer():
    forked = multiprocessing.get_context("fork")
    pids = forked.SimpleQueue()

    def work():
        faults.end_with_parent()
        pids.put(os.getpid())
        time.sleep(600)

    def train():
        forked.Process(target=work).start()
        time.sleep(600)

    trainer = forked.Process(target=train)
    trainer.start()
    worker = pids.get()
    trainer.kill()
    trainer.join()
    wait_until(lambda: not psutil.pid_exists(worker) or psutil.Process(worker).status() == "zombie", 20)


def test_silent_server_ends_the_run(monkeypatch, healthy):
    monkeypatch.setattr(vllm_server, "PATIENCE", 1.0)
    vllm_server.wait_until_it_answers(healthy)
    with pytest.raises(RuntimeError, match="no longer answers"):
        vllm_server.wait_until_it_answers(f"http://127.0.0.1:{free_port()}")


def test_synchronization_that_fails_names_the_server():
    url = f"http://127.0.0.1:{free_port()}"
    trainer = SimpleNamespace(
        _lora_sync=True,
        accelerator=SimpleNamespace(is_main_process=True),
        args=SimpleNamespace(vllm_server_base_url=url),
    )
    with (
        pytest.raises(RuntimeError, match=f"The vLLM server at {url} no longer answers"),
        faults.synchronizing(trainer),
    ):
        VLLMClient(url).pause()
    with pytest.raises(RuntimeError, match=f"at {url} did not accept the weights: Request failed: 400, full"):  # noqa: SIM117
        with faults.synchronizing(trainer):
            raise Exception("Request failed: 400, full")  # what TRL's client raises
    # A transfer that has nothing to do with a server keeps its errors.
    trainer._lora_sync, trainer.weight_transfer = False, None
    with pytest.raises(KeyError), faults.synchronizing(trainer):
        raise KeyError


# Requests


class ResponseError(Exception):
    """With what an `aiohttp.ClientResponseError` has."""

    def __init__(self, status):
        super().__init__(f"{status}, message='gone'")
        self.status = status


class Loop(faults.GuardedLoop):
    def __init__(self, waited):
        self._answered = self._returned = time.monotonic() - waited
        self.request_timeout, self.reward_limit = 0.4, 0.2


@pytest.mark.parametrize(
    ("error", "waited", "raised", "message"),
    [
        (
            404,
            0,
            RuntimeError,
            r"rejects a request for 'policy-v3' and 2 \+ 8 tokens: 404, message='gone'\. .*restarted",
        ),
        (503, 0, ResponseError, ""),  # which TRL tries again
        (429, 0, ResponseError, ""),
        (None, 0, TimeoutError, ""),
        (None, 60, RuntimeError, r"not answered any request for request_timeout=30 s"),
    ],
)
def test_request_that_cannot_succeed_is_not_repeated(monkeypatch, error, waited, raised, message):
    async def fail(self, *args, **named):
        raise TimeoutError if error is None else ResponseError(error)

    monkeypatch.setattr(faults._AsyncRolloutLoop, "_post", fail)
    payload = {"model": "policy-v3", "prompt": [1, 2], "max_tokens": 8}

    with pytest.raises(raised, match=message):
        asyncio.run(Loop(waited)._post("/v1/completions", payload, 30))


# Tools and environments


@pytest.mark.parametrize("held_up", ["by nothing", "by a full queue", "by a slow tool"])
def test_conversations_that_do_not_get_ahead_end_the_run(held_up):
    loop, stop = Loop(0), asyncio.Event()
    loop.rollout_buffer = SimpleNamespace(full=lambda: held_up == "by a full queue")
    loop.tokenizer = loop._tool_pool = None
    loop._counters, loop._rates = defaultdict(float), defaultdict(lambda: [0.0, 0.0])

    async def slow():
        await asyncio.sleep(0.25)

    async def wait() -> None:
        for _ in range(4):
            called = [{"function": {"name": "slow", "arguments": {}}}] if held_up == "by a slow tool" else []
            await (loop._execute_tool_calls(called, {"slow": slow}) if called else slow())
        stop.set()

    async def both() -> None:
        await asyncio.gather(loop._watch(stop), wait())

    with (
        pytest.raises(RuntimeError, match=r"For 0\.4 s, no request.*hangs")
        if held_up == "by nothing"
        else nullcontext()
    ):
        asyncio.run(both())
