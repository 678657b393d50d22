"""A worker or reward that fails, in the worker's own process, and a server that rejects or is silent."""

import asyncio
import json
import math
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
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
    faults.guard(worker, SimpleNamespace(server_url=url), limit, vocab_size=259)
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


CHOICE = {"token_ids": [10, 258], "logprobs": {"token_logprobs": [-1.0, -0.5]}}


def completion(**entries) -> dict:
    return {"choices": [{**CHOICE, **entries}]}


@pytest.fixture
def server():
    """An HTTP server that does what its `answer` says: a status with a body or an address, or nothing."""

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            made.asked += 1
            status, body = made.answer
            if status is None:  # the connection is closed, at once or late
                return time.sleep(body)
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", body)
            text = body if isinstance(body, str) else json.dumps(body)
            self.send_header("Content-Type", "text/html" if isinstance(body, str) else "application/json")
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST

        def log_message(self, *args):
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    made.daemon_threads, made.block_on_close, made.asked = True, False, 0
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def loop_for(server, model, limit):
    """The guarded loop of the worker's process, with real requests."""
    limits = {"request_timeout": limit, "reward_limit": limit, "max_inflight_tasks": 2}
    url = f"http://me:secret@127.0.0.1:{server.server_port}"
    return faulty.loop_here(faults.GuardedLoop, model, vllm_server_url=url, vocab_size=259, **limits)


FAILS = r"The vLLM server at http://\*\*\*@127\.0\.0\.1:\d+ fails: "


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((500, {}), rf"For 2 s, no request was answered.*: {FAILS}ClientResponseError: 500, message='Internal Server"),
        ((429, {}), rf"For 2 s, no request was answered.*: {FAILS}ClientResponseError: 429"),
        ((None, 0), rf"For 2 s, no request was answered.*: {FAILS}ServerDisconnectedError"),
        ((None, 60), r"The vLLM server at http://\*\*\*@.* (does not answer\.|has not answered any request for)"),
        ((404, {}), r"server at http://\*\*\*@127.* rejects a request for 'policy-v3' and \d+ \+ 32 tokens: 404"),
        ((302, "/v1/completions"), FAILS + "TooManyRedirects"),
        ((302, "/login"), FAILS + "TooManyRedirects"),
        ((200, "<html>Log in</html>"), FAILS + r"ContentTypeError: 200, .*text/html"),
        ((200, []), FAILS + r"ValueError: it returns no tokens, but \{\}"),
        ((200, {"choices": []}), FAILS + r"ValueError: it returns no tokens, but \{'choices': \[\]\}"),
        ((200, completion(logprobs=None)), FAILS + "ValueError: it returns no tokens, but .*'logprobs': None"),
        (
            (200, completion(logprobs={"token_logprobs": [-1.0, math.nan]})),
            FAILS + "ValueError: it returns 1 finite log-probabilities of 2 tokens",
        ),
        (
            (200, completion(logprobs={"token_logprobs": [None, -math.inf]})),
            FAILS + "ValueError: it returns 0 finite log-probabilities of 2 tokens",
        ),
        (
            (200, completion(logprobs={"token_logprobs": [-1.0] * 3})),
            FAILS + "ValueError: it returns 3 finite log-probabilities of 2 tokens",
        ),
        (
            (200, completion(token_ids=[10, 259])),
            FAILS + r"ValueError: it returns token 259, and the model has 259\. It serves another model\.",
        ),
    ],
)
def test_server_that_fails_is_named(tiny_model, server, answer, message):
    """With its status and without its password; not a tool or an environment."""
    server.answer, may_pass = answer, answer[0] in (500, 429, None)
    loop = loop_for(server, tiny_model, limit=2.0 if may_pass else 60.0)
    with pytest.raises(RuntimeError, match=message) as raised:
        asyncio.run(asyncio.wait_for(loop._run_loops(asyncio.Event()), LIMIT))
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("body", ["<html>Log in</html>", {"vllm_config": {}}])
def test_server_that_is_not_in_development_mode_is_named(server, body):
    server.answer = (200, body)
    url = f"http://127.0.0.1:{server.server_port}"
    with pytest.raises(RuntimeError, match=f"at {url} does not report its .*Error: .*`VLLM_SERVER_DEV_MODE=1`"):
        faults.check_logprobs(VLLMClient(url), 1.0)


def test_server_that_fails_for_a_moment_is_asked_again(tiny_model, server):
    loop = loop_for(server, tiny_model, limit=30.0)
    server.answer = (503, {})

    async def until_a_sample() -> None:
        stop, deadline = asyncio.Event(), time.monotonic() + LIMIT
        running = asyncio.ensure_future(loop._run_loops(stop))
        while loop.rollout_buffer.empty() and not running.done() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
            server.answer = (200, completion()) if server.asked > 2 else server.answer
        stop.set()
        await running

    asyncio.run(until_a_sample())
    assert loop.rollout_buffer.get_nowait().old_log_probs[-2:].tolist() == [-1.0, -0.5]


# Tools and environments


class Loop(faults.GuardedLoop):
    def __init__(self):
        self._answered = self._returned = time.monotonic()
        self.request_timeout, self.reward_limit, self._unanswered = 0.4, 0.2, ""


@pytest.mark.parametrize("held_up", ["by nothing", "by a full queue", "by a slow tool"])
def test_conversations_that_do_not_get_ahead_end_the_run(held_up):
    loop, stop = Loop(), asyncio.Event()
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
