"""
TRL's rollout worker, with targets: its loop, which generates and scores in a process of its own, and its controller.

A worker or server that is gone ends the run. TRL alone notices a dead process only when its last heartbeat is
`heartbeat_stale_after_s` old, waits for a server that hangs without limit, and hangs when it tells a dead process to
stop.
"""

import asyncio
import math
import os
import queue
import signal
import threading
from collections.abc import Collection, Iterator
from multiprocessing import current_process, parent_process
from typing import Any

from trl.experimental.async_grpo.async_rollout_worker import (
    AsyncRolloutWorker,
    RolloutGroup,
    RolloutSample,
    _AsyncRolloutLoop,
)
from trl.experimental.async_grpo.vllm_client import VLLMClient

from ..checks.secrets import mask_text
from ..checks.text import quoted
from ..objective import Objective
from ..rewards.checked import checked_reward
from ..rewards.errors import RewardError, told
from ..rollout.vllm_server import wait_until_it_answers
from .targets import with_targets


MOST_UNSCORED = 100  # groups in a row, after which the run ends
_MAY_PASS = (408, 425, 429)  # answers with which a server asks for another try


class OPORolloutLoop(_AsyncRolloutLoop):
    """
    TRL's rollout loop, with targets by the objective `opo`, without groups that an earlier run has `trained`. Those
    after the first `epochs` are generated when these have been scored, to fill up the last optimizer step.
    """

    def __init__(
        self,
        *,
        opo: Objective,
        trained: Collection[int] = frozenset(),
        epochs: int = 0,
        vocab_size: float = math.inf,
        **named,
    ):
        super().__init__(**named)
        self.opo, self.trained, self.epochs, self.vocab_size = opo, trained, epochs, vocab_size
        self._left = epochs - sum(group < epochs for group in trained)
        self._epochs_are_scored = asyncio.Event()
        self._unscored = 0  # groups, in a row
        # The names of environments follow those of the functions.
        self.reward_funcs = [*map(checked_reward, self.reward_funcs, self.reward_func_names)]

    def run(self) -> None:
        _end_with_parent()
        # TRL starts this process as a daemon, which may not start any; `IsolatedReward` does, and ends them itself.
        current_process().daemon = False
        # Ctrl-C and a scheduler's signal reach this process, too. The trainer then finishes an optimizer step, for
        # which it may need more completions, and ends this process when it has saved.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        # Otherwise this process waits at its end until the trainer has taken all of these, which it no longer does.
        self.rollout_buffer.cancel_join_thread()
        self._metrics_queue.cancel_join_thread()
        super().run()

    def _repeat_iterator(self) -> Iterator[tuple[int, dict[str, Any]]]:
        return (work for work in super()._repeat_iterator() if work[0] not in self.trained)

    async def _generate_one(self, prompt, tool_dict, tools, group_id=0):
        if group_id >= self.epochs and self._left > 0:
            await self._epochs_are_scored.wait()
        return await super()._generate_one(prompt, tool_dict, tools, group_id)

    async def _post(self, path: str, payload: dict, timeout: float, max_retries: int = 3) -> dict:
        server = f"The vLLM server at {mask_text(self.vllm_server_url)}"
        try:
            answer = await super()._post(path, payload, timeout, max_retries=1)  # the caller repeats it
            check_completion(answer, self.vocab_size)
        except TimeoutError:
            raise
        except Exception as error:
            status = getattr(error, "status", 500)  # of an `aiohttp.ClientResponseError`; aiohttp comes with vLLM
            said = f"{server} fails: {told(error)}. Its own log may say why."
            # A redirect, a page, no completion, or a request that it rejects for good; anything else may pass.
            lasts = isinstance(error, ValueError) or status < 400 or (status < 500 and status not in _MAY_PASS)
            raise (RuntimeError if lasts else ConnectionResetError)(said) from error
        return answer

    async def _score_group(self, group: RolloutGroup) -> list[RolloutSample]:
        samples = await super()._score_group(group)
        self._left -= 1
        if not self._left:
            self._epochs_are_scored.set()
        conversations = [i for i, rows in enumerate(group.completions_sequences) for _ in rows]
        kept = with_targets(samples, conversations, self.opo) if samples else []
        self._counters["sample/unscored_total"] += len(samples) - len(kept)
        self._unscored = 0 if kept else self._unscored + 1
        if self._unscored == MOST_UNSCORED:
            raise RewardError(
                f"No completion of the last {MOST_UNSCORED} groups has a score, or a token to train. Check the "
                f"rewards ({', '.join(self.reward_func_names)}): `None` and NaN are no score."
            )
        return kept


class OPORolloutWorker(AsyncRolloutWorker):
    """TRL's controller of the process in which an [`OPORolloutLoop`] runs. For another loop, derive from both."""

    _loop_cls = OPORolloutLoop

    def start(self) -> None:
        super().start()
        buffer: Any = self.rollout_buffer
        take = buffer.get
        # This process's end for writing. While it is open, what reads a sample that a killed process has left half
        # written waits for the rest.
        buffer._writer.close()

        def get(block: bool = True, timeout: float | None = None) -> RolloutSample:
            try:
                return take(block, timeout)
            except (EOFError, OSError):
                raise queue.Empty from None  # after which the trainer calls `check_health`

        buffer.get = get

    def check_health(self, stale_after_s: float) -> None:
        process: Any = self._process
        failed = self._failed_event.is_set()
        if failed:
            process.join(5)  # the reason is on its way
        elif process.exitcode is not None:
            raise RuntimeError(
                f"The process of the rollout worker has ended with exit code {process.exitcode}; -9 is a kill, by a "
                "user or because the machine ran out of memory. Resume from the last checkpoint."
            )
        try:
            super().check_health(stale_after_s)
        except RuntimeError as error:
            reason = str(error.__cause__ or error).partition("\n")[0]
            kind = RewardError if reason.startswith(RewardError.__name__) else RuntimeError
            raise kind(
                f"The rollout worker has failed: {reason} Fix this, then resume from the last checkpoint."
            ) from error
        wait_until_it_answers(self._loop_kwargs["vllm_server_url"])

    def stop(self) -> None:
        process: Any = self._process
        # TRL asks the process to stop by an event, which hangs if the process is gone.
        if process is not None and (self._failed_event.is_set() or process.exitcode is not None):
            process.kill()
            self._process = None
        super().stop()


def check_completion(answer: Any, vocab_size: float) -> None:
    """Check that a server has returned tokens of the vocabulary, each with its log-probability; or a `ValueError`."""
    try:
        choice = answer["choices"][0]
        ids, logps = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        strange = [i for i in ids if not 0 <= i < vocab_size]
        finite = [x for x in logps if x is not None and math.isfinite(x)]
    except (LookupError, TypeError):
        raise ValueError(f"it returns no tokens, but {quoted(answer)}") from None
    if strange:
        raise ValueError(f"it returns token {strange[0]:,}, and the model has {vocab_size:,}. It serves another model")
    if not len(finite) == len(logps) == len(ids):
        raise ValueError(f"it returns {len(finite)} finite log-probabilities of {len(ids)} tokens")


def check_logprobs(client: VLLMClient, temperature: float) -> None:
    """
    Check that a server reports the log-probabilities of what it samples from. If it does not answer within
    `vllm_server_timeout`, this raises a `TimeoutError`.
    """
    client.wait_for_server_ready()
    url = mask_text(client.server_url)
    try:
        mode = client.get_server_info()["model_config"]["logprobs_mode"]
    except Exception as error:
        raise ValueError(
            f"The vLLM server at {url} does not report its `--logprobs-mode`: {told(error)}. Start `vllm serve` there "
            "with `VLLM_SERVER_DEV_MODE=1` in its environment."
        ) from error
    if mode != "processed_logprobs" and (mode, temperature) != ("raw_logprobs", 1.0):
        raise ValueError(
            f"The vLLM server at {url} runs with `--logprobs-mode {mode}`, so with temperature={temperature} it does "
            "not report the log-probabilities that it samples from. Serve with `--logprobs-mode processed_logprobs`."
        )


def _end_with_parent() -> None:
    """End this process when the one that started it ends, even by SIGKILL; TRL's worker would wait for it forever."""

    def wait() -> None:
        parent.join()
        os._exit(1)

    if (parent := parent_process()) is not None:
        threading.Thread(target=wait, daemon=True).start()
