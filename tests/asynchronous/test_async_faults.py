"""A worker or reward that fails, in the worker's own process, and a server that is gone or answers wrongly."""

import asyncio
import json
import math
import multiprocessing
import os
import queue
import signal
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from multiprocessing import forkserver
from types import SimpleNamespace

import aiohttp
import faulty
import psutil
import pytest
import scripted
from helpers import free_port, wait_until
from invariance.launch import SERVER, prepare
from transformers import AutoTokenizer
from trl.experimental.async_grpo import async_rollout_worker

from opo_trl.asynchronous import worker as worker_module
from opo_trl.asynchronous.worker import OPORolloutLoop, OPORolloutWorker
from opo_trl.objective import OPO
from opo_trl.rewards.errors import RewardError
from opo_trl.rewards.scoring import IsolatedReward
from opo_trl.rollout import vllm_server


PLAIN = {"defaults": {"role": "assistant"}, "fields": {"content": {"content": "text"}}}
LIMIT = 120.0  # seconds, most of which the worker's process takes to import its libraries


class LocalWorker(OPORolloutWorker):
    _loop_cls = faulty.LocalLoop


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
def working(monkeypatch, tiny_model, tmp_path, url, reward, *, tokens=4, start="forkserver"):
    """The worker, running, with a loop that needs no server; forked with all imports, or spawned. It ends in time."""
    prepare()
    context = multiprocessing.get_context(start)
    monkeypatch.setattr(async_rollout_worker, "mp", SimpleNamespace(get_context=lambda method: context))
    monkeypatch.setattr(forkserver, "connect_to_new_process", SERVER.connect_to_new_process)
    for name in ("is_vllm_available", "is_aiohttp_available"):
        monkeypatch.setattr(async_rollout_worker, name, lambda: True)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.response_template = PLAIN
    worker = LocalWorker(
        model_name=tiny_model,
        dataset=scripted.DATA,
        reward_funcs=[reward],
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        num_generations=scripted.G,
        max_inflight_tasks=2 * scripted.G,
        max_tokens=tokens,
        vllm_server_url=url,
        opo=OPO(scripted.config(tmp_path).objective_fields),
    )
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
        (faulty.scores_nothing, r"No completion of the last 100 groups has a score.*Check .*\(scores_nothing\)"),
    ],
)
def test_reward_that_fails_ends_the_run(monkeypatch, tiny_model, tmp_path, healthy, reward, message):
    with (
        working(monkeypatch, tiny_model, tmp_path, healthy, reward) as worker,
        pytest.raises(RewardError, match=rf"The rollout worker has failed: RewardError: {message}"),
    ):
        take_samples(worker)


def test_worker_has_isolated_rewards_and_outlives_a_scheduler(monkeypatch, tiny_model, tmp_path, healthy):
    """Whose signal reaches this process, too; the trainer needs completions until it has saved."""
    isolated = IsolatedReward(faulty.fine, workers=1)
    with working(monkeypatch, tiny_model, tmp_path, healthy, isolated, start="spawn") as worker:
        for _ in range(2):
            assert worker.rollout_buffer.get(timeout=LIMIT).metrics["reward"] == 0.0
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(worker._process.pid, number)
            for _ in range(4 * scripted.G - 1):  # more than are on their way
                worker.rollout_buffer.get(timeout=LIMIT)
        worker.check_health(stale_after_s=60.0)


def test_worker_that_is_killed_inside_a_sample_ends_the_run(monkeypatch, tiny_model, tmp_path, healthy):
    with working(monkeypatch, tiny_model, tmp_path, healthy, faulty.fine, tokens=20_000) as worker:
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
        worker_module._end_with_parent()
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


def test_silent_server_ends_the_run(monkeypatch, tiny_model, tmp_path):
    monkeypatch.setattr(vllm_server, "PATIENCE", 1.0)
    url = f"http://127.0.0.1:{free_port()}"
    with (
        working(monkeypatch, tiny_model, tmp_path, url, faulty.fine) as worker,
        pytest.raises(RuntimeError, match=rf"The vLLM server at {url} no longer answers"),
    ):
        worker.check_health(stale_after_s=60.0)


# Answers


CHOICE = {"token_ids": [10, 258], "logprobs": {"token_logprobs": [-1.0, -0.5]}}


def completion(**entries) -> dict:
    return {"choices": [{**CHOICE, **entries}]}


@pytest.fixture
def server():
    """An HTTP server that does what its `answer` says: a status with a body, or an address."""

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = made.answer
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
    made.daemon_threads, made.block_on_close = True, False
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def loop_for(server, model, tmp_path):
    """The loop of the worker's process, with real requests."""
    url, opo = f"http://me:secret@127.0.0.1:{server.server_port}", OPO(scripted.config(tmp_path))
    return faulty.loop_here(OPORolloutLoop, model, vllm_server_url=url, opo=opo, vocab_size=259, max_inflight_tasks=2)


FAILS = r"The vLLM server at http://\*\*\*@127\.0\.0\.1:\d+ fails: "


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((404, {}), "ClientResponseError: 404"),
        ((302, "/login"), "TooManyRedirects"),
        ((200, "<html>Log in</html>"), r"ContentTypeError: 200, .*text/html"),
        ((200, {"choices": []}), r"ValueError: it returns no tokens, but \{'choices': \[\]\}"),
        ((200, completion(logprobs=None)), "ValueError: it returns no tokens, but .*'logprobs': None"),
        ((200, completion(logprobs={"token_logprobs": [-1.0, math.nan]})), "returns 1 finite .* of 2 tokens"),
        ((200, completion(logprobs={"token_logprobs": [None, -1.0]})), "returns 1 finite .* of 2 tokens"),
        ((200, completion(token_ids=[10, 259])), r"token 259, and the model has 259\. It serves another"),
    ],
)
def test_server_that_fails_is_named(tiny_model, tmp_path, server, answer, said):
    """With its status and without its password; not a tool or an environment."""
    server.answer = answer
    loop = loop_for(server, tiny_model, tmp_path)
    with pytest.raises(RuntimeError, match=FAILS + f".*{said}") as raised:
        asyncio.run(asyncio.wait_for(loop._run_loops(asyncio.Event()), LIMIT))
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("status", [500, 429])
def test_server_that_may_recover_is_named_and_asked_again(tiny_model, tmp_path, server, status):
    server.answer = (status, {})
    loop = loop_for(server, tiny_model, tmp_path)

    async def once():
        async with aiohttp.ClientSession() as loop.session:
            await loop._post("/v1/completions", {"model": "policy", "prompt": [1], "max_tokens": 2}, 5)

    with pytest.raises(ConnectionResetError, match=FAILS + f"ClientResponseError: {status}"):  # TRL asks again
        asyncio.run(once())
