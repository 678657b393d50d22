"""
TRL's rollout worker, with targets: its loop, which generates and scores in a process of its own, and its controller.

Targets are computed where a group is scored: only there it is complete. TRL later fills micro-batches with single
samples, so most groups are split over several, and drops samples that have become too old.
"""

import asyncio
import math
import os
import signal
import threading
from collections.abc import Collection, Iterator, Sequence
from multiprocessing import current_process, parent_process
from typing import Any, cast

import torch
from torch import Tensor
from trl.experimental.async_grpo.async_rollout_worker import (
    AsyncRolloutWorker,
    RolloutGroup,
    RolloutSample,
    _AsyncRolloutLoop,
)
from trl.experimental.async_grpo.vllm_client import VLLMClient

from ..checks.secrets import mask_text
from ..metrics.opo import rollout_metrics
from ..objective import Groups, Objective, Targets
from ..rewards.checked import checked_reward
from ..rewards.errors import RewardError
from ..rollout.vllm_server import wait_until_it_answers


MOST_UNSCORED = 100  # groups in a row, after which the run ends
OWN = "opo"  # entry of a sample's metrics with what the loss needs of it; the trainer takes it out

# Metrics of a group whose mean over the samples of many groups is that of a rollout.
MEANS = ("escort/ess", "temperature", "mu", "frac_zero_drive")


class OPORolloutLoop(_AsyncRolloutLoop):
    """
    TRL's rollout loop, with targets by the objective `opo`, without groups that an earlier run has `trained`. Those
    after the first `epochs` wait until these are scored: they fill up the last optimizer step.
    """

    def __init__(
        self, *, opo: Objective, trained: Collection[int] = frozenset(), vocab_size=math.inf, epochs=0, **named
    ):
        super().__init__(**named)
        self.epochs, self._left = epochs, epochs - sum(group < epochs for group in trained)
        self._epochs_are_scored = asyncio.Event()
        self.opo, self.trained, self.vocab_size = opo, trained, vocab_size
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

    async def _generate_one_turn(self, prompt_ids):
        ids, logps = await super()._generate_one_turn(prompt_ids)
        if not all(x is not None and math.isfinite(x) for x in logps) or max(ids, default=0) >= self.vocab_size:
            said = f"The vLLM server at {mask_text(self.vllm_server_url)} returns a log-probability that is not finite"
            raise RuntimeError(f"{said}, or a token that the model has not. Its log may say why.")
        return ids, logps

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
            said = f"No completion of the last {MOST_UNSCORED} groups has a score, or a token to train"
            raise RewardError(f"{said}. Check the rewards ({', '.join(self.reward_func_names)}).")
        return kept


@torch.no_grad()
def group_targets(rewards: Tensor, objective: Objective) -> tuple[Targets, list[float]]:
    """
    Targets of the completions of a group, from their rewards, `[G]` in float64, NaN or infinite without a score; and
    the metrics [`MEANS`], NaN where the objective has none.
    """
    valid = rewards.isfinite()
    scored = rewards[valid]
    # Not TRL's advantages, which this trainer divides by another standard deviation than `GRPOTrainer`.
    spread = scored.std() if len(scored) > 1 else scored.new_zeros(())
    advantages = torch.where(valid, (rewards - scored.mean()) / (spread + 1e-4), 0.0)
    group = Groups(advantages=advantages, rewards=rewards, valid=valid, num_generations=len(rewards))
    targets = objective.targets(group)
    metrics = {"mu": targets.mu, **rollout_metrics(targets, group)}  # the loss needs μ of any objective
    return targets, [metrics[name].item() if name in metrics else math.nan for name in MEANS]


def with_targets(
    samples: Sequence[RolloutSample], conversations: Sequence[int], objective: Objective
) -> list[RolloutSample]:
    """
    Give the samples of a group their targets, from their rewards, and leave out those without a score.

    A sample without a score has no advantage. TRL gives it one of 0. In OPO, 0 is a real target: it asks the policy to
    keep this completion's probability unchanged.

    `samples` are the training rows of a complete group, changed in place, and `conversations` that of each: TRL makes
    several rows of a conversation whose history is rewritten on the way. Returns the samples with a score and a
    trained token; their `advantage` is the target.
    """
    rewards = {i: sample.metrics["reward"] for i, sample in zip(conversations, samples, strict=True)}
    targets, means = group_targets(torch.tensor([*rewards.values()], dtype=torch.float64), objective)
    target = dict(zip(rewards, targets.target.tolist(), strict=True))
    kept = []
    for sample, conversation in zip(samples, conversations, strict=True):
        if math.isfinite(rewards[conversation]) and sample.completion_mask.any():
            sample.advantage = target[conversation]
            cast(dict, sample.metrics)[OWN] = (sample.model_version, *means)
            kept.append(sample)
    return kept


class OPORolloutWorker(AsyncRolloutWorker):
    """TRL's controller of the process in which an [`OPORolloutLoop`] runs. For another loop, derive from both."""

    _loop_cls = OPORolloutLoop

    def start(self) -> None:
        super().start()
        buffer: Any = self.rollout_buffer
        take = buffer.get
        # While it is open here, reading a sample that a killed process has left half written waits for the rest.
        buffer._writer.close()

        def get(timeout: float | None = None) -> RolloutSample:
            try:
                return take(timeout=timeout)
            except (EOFError, OSError):
                cast(Any, self._process).join(5)
                self.check_health(math.inf)
                raise RuntimeError("The rollout worker has been killed. Resume from the last checkpoint.") from None

        buffer.get = get

    def check_health(self, stale_after_s: float) -> None:
        if self._failed_event.is_set():
            cast(Any, self._process).join(5)  # the reason is on its way
        super().check_health(stale_after_s)
        wait_until_it_answers(self._loop_kwargs["vllm_server_url"])

    def stop(self) -> None:
        # TRL asks the process to stop by an event, which hangs if the process is gone.
        process: Any = self._process
        if process is not None and (self._failed_event.is_set() or process.exitcode is not None):
            process.kill()
            self._process = None
        super().stop()


def check_logprobs(client: VLLMClient, temperature: float) -> None:
    """Check that a server reports the log-probabilities of what it samples from; or a `ValueError`."""
    client.wait_for_server_ready()
    mode = client.get_server_info()["model_config"]["logprobs_mode"]
    if mode != "processed_logprobs" and (mode, temperature) != ("raw_logprobs", 1.0):
        said = f"The vLLM server at {mask_text(client.server_url)} runs with `--logprobs-mode {mode}`"
        raise ValueError(f"{said}, but {temperature=} needs `--logprobs-mode processed_logprobs`.")


def _end_with_parent() -> None:
    """End this process when the one that started it ends, even by SIGKILL; TRL's worker would wait for it forever."""

    def wait() -> None:
        cast(Any, parent_process()).join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
