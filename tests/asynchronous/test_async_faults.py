"""A worker or reward that fails, in the worker's own process, and a server that is gone."""

import asyncio
import math
import multiprocessing
import os
import queue
import re
import signal
import time
from contextlib import contextmanager
from multiprocessing import forkserver
from types import SimpleNamespace

import psutil
import pytest
import scorers
import scripted
from helpers import answering, free_port, wait_until
from invariance.launch import SERVER, prepare
from trl.experimental.async_grpo import async_rollout_worker

from opo_trl.asynchronous import worker as worker_module
from opo_trl.asynchronous.worker import OPORolloutLoop, OPORolloutWorker
from opo_trl.objective import OPO
from opo_trl.rewards.scoring import IsolatedReward
from opo_trl.rollout import vllm_server


LIMIT = 120.0  # seconds, most of which the worker's process takes to import its libraries


class LocalLoop(OPORolloutLoop):
    """Every completion has the same many tokens, and no session of aiohttp is needed."""

    async def _run_loops(self, stop_event):
        await asyncio.gather(self._generate_loop(stop_event=stop_event), self._score_loop(stop_event=stop_event))

    async def _generate_one_turn(self, prompt_ids):
        await asyncio.sleep(0.01)
        return [10] * self.max_tokens + [self.tokenizer.eos_token_id], [-1.0] * (self.max_tokens + 1)


class LocalWorker(OPORolloutWorker):
    _loop_cls = LocalLoop


def exits(completions, **named):
    raise SystemExit(0)


def scores_nothing(completions, **named):
    return [None] * len(completions)


@pytest.fixture
def healthy():
    with answering() as url:
        yield url


@contextmanager
def working(monkeypatch, tiny_model, tmp_path, url, reward, *, tokens=4):
    """The worker, running, forked with all imports, with a loop that needs no server. It ends in time."""
    prepare()
    context = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(async_rollout_worker, "mp", SimpleNamespace(get_context=lambda method: context))
    monkeypatch.setattr(forkserver, "connect_to_new_process", SERVER.connect_to_new_process)
    for name in ("is_vllm_available", "is_aiohttp_available"):
        monkeypatch.setattr(async_rollout_worker, name, lambda: True)
    tokenizer = scripted.tokenizer_of(tiny_model)
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
        opo=OPO(scripted.config(tmp_path)),
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
        (exits, "The reward function exits has raised SystemExit: 0"),
        (
            scores_nothing,
            r"No completion of the last 100 groups has.*Check .*\(scores_nothing\)",
        ),
    ],
)
def test_reward_that_fails_ends_the_run(monkeypatch, tiny_model, tmp_path, healthy, reward, message):
    with (
        working(monkeypatch, tiny_model, tmp_path, healthy, reward) as worker,
        pytest.raises(RuntimeError, match="worker child has failed") as raised,
    ):
        take_samples(worker)
    assert re.search(message, str(raised.value.__cause__))


@pytest.mark.parametrize(("ids", "logps"), [([10, 11], [-1.0, None]), ([10], [math.nan]), ([64], [-1.0])])
def test_server_that_would_train_nothing_is_named(ids, logps):
    """TRL makes NaN of null."""

    async def answered(*_, **__):
        return {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logps}}]}

    loop = object.__new__(OPORolloutLoop)
    sampling = [
        "model_name",
        "lora_name",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "repetition_penalty",
        "min_p",
    ]
    vars(loop).update(dict.fromkeys(sampling), _retry=answered, vocab_size=64)
    loop.vllm_server_url = "http://me:secret@server"
    with pytest.raises(RuntimeError, match=r"http://<secret>@server returns a log-probability that is not finite, or"):
        asyncio.run(loop._generate_one_turn([1]))


def test_worker_has_isolated_rewards_and_outlives_a_scheduler(monkeypatch, tiny_model, tmp_path, healthy):
    """Whose signal reaches this process, too; the trainer needs completions until it has saved."""
    isolated = IsolatedReward(scorers.zero, workers=1)
    with working(monkeypatch, tiny_model, tmp_path, healthy, isolated) as worker:
        for _ in range(2):
            assert worker.rollout_buffer.get(timeout=LIMIT).metrics["reward"] == 0.0
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(worker._process.pid, number)
            for _ in range(4 * scripted.G - 1):  # more than are on their way
                worker.rollout_buffer.get(timeout=LIMIT)
        worker.check_health(stale_after_s=60.0)


def test_worker_that_is_killed_inside_a_sample_ends_the_run(monkeypatch, tiny_model, tmp_path, healthy):
    with working(monkeypatch, tiny_model, tmp_path, healthy, scorers.zero, tokens=20_000) as worker:
        worker.rollout_buffer.get(timeout=LIMIT)
        time.sleep(1)  # the pipe is full
        os.kill(worker._process.pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"has been killed\. Resume from the last checkpoint"):
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
        working(monkeypatch, tiny_model, tmp_path, url, scorers.zero) as worker,
        pytest.raises(RuntimeError, match=rf"The vLLM server at {url} no longer answers"),
    ):
        worker.check_health(stale_after_s=60.0)
