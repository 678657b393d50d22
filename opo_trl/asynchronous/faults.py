"""
A server, worker process or reward that fails or hangs ends the run, in bounded time and with a message.

TRL alone retries requests to a dead server for minutes, notices a dead worker process only when its last heartbeat is
`heartbeat_stale_after_s` old, waits for a reward without limit, and then hangs when it tells a dead process to stop.
"""

import asyncio
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import current_process, parent_process
from typing import Any

from accelerate import Accelerator, DistributedType
from trl.experimental.async_grpo.async_rollout_worker import (
    AsyncRolloutWorker,
    RolloutGroup,
    RolloutSample,
    _AsyncRolloutLoop,
)
from trl.experimental.async_grpo.vllm_client import VLLMClient
from trl.experimental.async_grpo.weight_transfer import WeightTransferClient

from ..checks.secrets import mask_text
from ..checks.text import quoted
from ..rewards.checked import checked_reward
from ..rewards.errors import RewardError, told
from ..rollout.vllm_server import wait_until_it_answers, watched
from .config import AsyncOPOConfig


_STOP_LIMIT = 25.0  # seconds; TRL gives its process 20

MOST_LOST = 100  # groups in a row of which no sample is trained, after which the run ends

_MAY_PASS = (408, 425, 429)  # answers with which a server asks for another try


# In the trainer's process


def check_logprobs(client: VLLMClient, temperature: float) -> None:
    """
    Check that a server reports the log-probabilities of what it samples from. If it does not answer within
    `vllm_server_timeout`, this raises a `TimeoutError`.
    """
    client.wait_for_server_ready()
    try:
        mode = client.get_server_info()["model_config"]["logprobs_mode"]
    except Exception as error:
        raise RuntimeError(
            f"The vLLM server at {mask_text(client.server_url)} does not report its `--logprobs-mode`: "
            f"{told(error)}. Start `vllm serve` there with `VLLM_SERVER_DEV_MODE=1` in its environment."
        ) from error
    if mode != "processed_logprobs" and (mode, temperature) != ("raw_logprobs", 1.0):
        raise ValueError(
            f"The vLLM server at {mask_text(client.server_url)} runs with `--logprobs-mode {mode}`, so with "
            f"temperature={temperature} it does not report the log-probabilities that it samples from. Start it with "
            "`--logprobs-mode processed_logprobs`."
        )


def check_sharding(accelerator: Accelerator) -> None:
    """Check that TRL can send the parameters to a server: it does not gather those of DeepSpeed ZeRO-3 and FSDP 1."""
    deepspeed = accelerator.state.deepspeed_plugin
    zero3 = deepspeed is not None and deepspeed.zero_stage == 3
    fsdp1 = accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2
    if zero3 or fsdp1:
        raise ValueError(
            f"{'DeepSpeed ZeRO-3' if zero3 else 'FSDP 1'} shards parameters in a way that TRL's asynchronous trainer "
            "cannot send to a server. Use FSDP2 (`fsdp_version: 2`), or DeepSpeed with a `zero_stage` of at most 2."
        )


def guard(worker: AsyncRolloutWorker, client: VLLMClient, limit: float, vocab_size: int) -> None:
    """
    Let TRL's worker, which has not started yet, notice that its process or the server has ended, that a reward takes
    more than `limit` seconds for a group, or that the server has another vocabulary.
    """
    start, check_health, stop = worker.start, worker.check_health, worker.stop
    take = worker.rollout_buffer.get
    worker._loop_kwargs |= {"reward_limit": limit, "vocab_size": vocab_size}

    def guarded_start():
        start()
        # This process's end for writing. While it is open, what reads a sample that a process has left half written
        # waits for the rest.
        worker.rollout_buffer._writer.close()

    def guarded_take(block: bool = True, timeout: float | None = None):
        process: Any = worker._process
        try:
            return take(block, timeout)
        except (EOFError, OSError):
            process.join(5)
            guarded_check(math.inf)
            raise

    def guarded_check(stale_after_s: float):
        process: Any = worker._process
        if not process.is_alive() and not worker._failed_event.is_set():
            raise RuntimeError(
                f"The process of the rollout worker has ended with exit code {process.exitcode}; -9 is a kill, by a "
                "user or because the machine ran out of memory. Resume from the last checkpoint."
            )
        if worker._failed_event.is_set():
            process.join(5)  # the reason is on its way
        try:
            check_health(stale_after_s)
        except RuntimeError as error:
            reason = str(error.__cause__ or error).partition("\n")[0]
            kind = RewardError if reason.startswith(RewardError.__name__) else RuntimeError
            raise kind(
                f"The rollout worker has failed: {reason} Fix this, then resume from the last checkpoint."
            ) from error
        wait_until_it_answers(client.server_url)

    def guarded_stop():
        process: Any = worker._process
        if process is None:
            return
        # TRL asks the process to stop by an event, and that hangs if the process is gone or stands still.
        if process.is_alive() and not worker._failed_event.is_set():
            stopping = threading.Thread(target=stop, daemon=True)
            stopping.start()
            stopping.join(_STOP_LIMIT)
        process.kill()
        process.join()
        worker._process = None

    replaced: Any = worker  # mypy rejects assignments to methods
    replaced.start, replaced.check_health, replaced.stop = guarded_start, guarded_check, guarded_stop
    replaced.rollout_buffer.get = guarded_take


class Samples:
    """
    The queue that TRL takes samples from, which ends the run if TRL drops all of them: it would wait forever.

    Samples that were on the way when the first one was dropped may be as old as that. So the run ends after all those,
    and as many more as [`MOST_LOST`] groups have. `queue` is the rollout worker's; `version` returns the policy's.
    """

    def __init__(self, queue: Any, args: AsyncOPOConfig, version: Callable[[], int]):
        self._queue, self._args, self._version = queue, args, version
        self._dropped: Counter[str] = Counter()  # in a row, by reason
        self._limit = 0
        self.qsize = queue.qsize

    def get(self, block: bool = True, timeout: float | None = None) -> RolloutSample:
        sample, args = self._queue.get(block, timeout), self._args
        if self._version() - sample.model_version > args.max_staleness:
            reason = f"are more than max_staleness={args.max_staleness} versions old"
        elif args.token_budget and len(sample.input_ids) > args.token_budget:
            reason = f"have more than token_budget={args.token_budget} tokens"
        else:
            self._dropped.clear()
            return sample
        if not self._dropped:
            self._limit = self.qsize() + args.max_inflight_tasks + MOST_LOST * args.num_generations
        self._dropped[reason] += 1
        if self._dropped.total() > self._limit:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self._dropped.items())
            raise RuntimeError(
                f"None of the last {self._dropped.total()} samples can be trained: {reasons}. Raise the limit named "
                "here, or send weights less often (`weight_sync_steps`), and resume from the last checkpoint."
            )
        return sample


@contextmanager
def synchronizing(trainer: Any) -> Iterator[None]:
    """Watch the server while it is sent weights: a `RuntimeError` if it does not answer, or does not take them."""
    to_server = trainer._lora_sync or isinstance(trainer.weight_transfer, WeightTransferClient)
    if not to_server or not trainer.accelerator.is_main_process:
        yield
        return
    url = trainer.args.vllm_server_base_url
    with watched(url):
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            raise RuntimeError(
                f"The vLLM server at {mask_text(url)} did not accept the weights: {error} Start it anew, and "
                "resume the run from its last checkpoint."
            ) from error


# In the worker's process


def end_with_parent() -> None:
    """End this process when the one that started it ends, even by SIGKILL; TRL's worker would wait for it forever."""

    def wait() -> None:
        parent.join()
        os._exit(1)

    if (parent := parent_process()) is not None:
        threading.Thread(target=wait, daemon=True).start()


def check_completion(answer: Any, vocab_size: float) -> None:
    """Check that a server has returned tokens of the vocabulary, each with its log-probability; or a `ValueError`."""
    try:
        choice = answer["choices"][0]
        ids, logps = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        largest, finite = max(ids, default=0), [x for x in logps if x is not None and math.isfinite(x)]
    except (LookupError, TypeError):
        raise ValueError(f"it returns no tokens, but {quoted(answer)}") from None
    if largest >= vocab_size:
        raise ValueError(f"it returns token {largest:,}, and the model has {vocab_size:,}. It serves another model")
    if not len(finite) == len(logps) == len(ids):
        raise ValueError(f"it returns {len(finite)} finite log-probabilities of {len(ids)} tokens")


class GuardedLoop(_AsyncRolloutLoop):
    """
    TRL's rollout loop, which ends if the server, a reward or a tool does not answer, and if the server rejects a
    request or returns what cannot be trained. `reward_limit` is how many seconds the rewards of a group may take.
    """

    def __init__(self, *, reward_limit: float | None = None, vocab_size: float = math.inf, **named):
        super().__init__(**named)
        self.reward_limit, self.vocab_size = reward_limit, vocab_size
        self._unanswered = ""  # what is wrong with the server, if the last request has no answer
        self._answered = self._returned = time.monotonic()  # a request; a tool or a reward
        # The names of environments follow those of the functions.
        self.reward_funcs = [*map(checked_reward, self.reward_funcs, self.reward_func_names)]

    def run(self) -> None:
        end_with_parent()
        # TRL starts this process as a daemon, which may not start any; `IsolatedReward` does, and ends them itself.
        current_process().daemon = False
        # Otherwise this process waits at its end until the trainer has taken all of these, which it no longer does.
        self.rollout_buffer.cancel_join_thread()
        self._metrics_queue.cancel_join_thread()
        super().run()

    async def _run_loops(self, stop_event: asyncio.Event) -> None:
        await asyncio.gather(super()._run_loops(stop_event), self._watch(stop_event))

    async def _watch(self, stop_event: asyncio.Event) -> None:
        """Raise if no conversation gets ahead. TRL gives tools, and the `reset` of an environment, any time."""
        limit, ahead = max(self.request_timeout, self.reward_limit or 0.0), time.monotonic()
        while not stop_event.is_set():
            await asyncio.sleep(min(1.0, limit / 4))
            held_up = self.rollout_buffer.full()  # until the trainer takes samples
            ahead = time.monotonic() if held_up else max(ahead, self._answered, self._returned)
            if time.monotonic() - ahead > limit:
                hung = (
                    "a tool or the `reset` of an environment hangs. Give them a time limit, or set `request_timeout` "
                    "to what they take."
                )
                raise RuntimeError(
                    f"For {limit:g} s, no request was answered, and no tool and no reward has returned: "
                    f"{self._unanswered or hung}"
                )

    async def _execute_tool_calls(self, tool_calls, tool_dict):
        try:
            return await super()._execute_tool_calls(tool_calls, tool_dict)
        finally:
            self._returned = time.monotonic()

    async def _post(self, path: str, payload: dict, timeout: float, max_retries: int = 3) -> dict:
        server = f"The vLLM server at {mask_text(self.vllm_server_url)}"
        self._unanswered = f"{server} does not answer."
        try:
            answer = await super()._post(path, payload, timeout, max_retries=1)  # the caller repeats it
            check_completion(answer, self.vocab_size)
        except TimeoutError as error:
            if time.monotonic() - self._answered >= timeout:
                raise RuntimeError(
                    f"{server} has not answered any request for request_timeout={timeout} s. If it is healthy, set "
                    "`request_timeout` to what the longest completion takes."
                ) from error
            raise
        except Exception as error:
            self._unanswered = f"{server} fails: {told(error)}. Its own log says why."
            status = getattr(error, "status", 500)  # of an `aiohttp.ClientResponseError`; aiohttp comes with vLLM
            if 400 <= status < 500 and status not in _MAY_PASS:
                raise RuntimeError(
                    f"{server} rejects a request for {payload['model']!r} and {len(payload['prompt'])} + "
                    f"{payload['max_tokens']} tokens: {error}. Its own log says why. It may have been restarted, so "
                    "that it lacks the adapter, or its `--max-model-len` may be too small."
                ) from error
            lasts = status < 400 or isinstance(error, ValueError)  # a redirect, a page, or no completion
            raise (RuntimeError if lasts else ConnectionResetError)(self._unanswered) from error
        self._answered, self._unanswered = time.monotonic(), ""
        return answer

    async def _score_group(self, group: RolloutGroup) -> list[RolloutSample]:
        scoring = asyncio.ensure_future(super()._score_group(group))
        await asyncio.wait([scoring], timeout=self.reward_limit)
        if not scoring.done():
            raise RewardError(
                f"Rewards ({', '.join(self.reward_func_names)}) have not returned for "
                f"heartbeat_stale_after_s={self.reward_limit:g} s. Give them a time limit, or set "
                "`heartbeat_stale_after_s` to what they take."
            )
        self._returned = time.monotonic()
        return scoring.result()
