r"""
Targets of a group, computed when it is scored, in the process of the rollout worker.

Only there is the group complete. TRL later fills micro-batches with single samples, so most groups are split over
several, and drops samples that have become too old.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from trl.experimental.async_grpo.async_rollout_worker import (
    AsyncRolloutWorker,
    RolloutGroup,
    RolloutSample,
    _AsyncRolloutLoop,
)

from ..metrics.opo import rollout_metrics
from ..objective import Groups, Objective, Targets
from ..rewards.errors import RewardError
from .faults import MOST_LOST, GuardedLoop


OWN = "opo"  # entry of a sample's metrics with what the loss needs of it; the trainer takes it out

# Metrics of a group whose mean over the samples of many groups is that of a rollout. The trainer knows the extremes.
MEANS = ("escort/ess", "escort/chemical_potential", "temperature", "mu", "frac_target_clipped", "frac_zero_drive")


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
    metrics = rollout_metrics(targets, group)
    return targets, [metrics[name].item() if name in metrics else math.nan for name in MEANS]


def with_targets(
    samples: Sequence[RolloutSample], conversations: Sequence[int], objective: Objective
) -> list[RolloutSample]:
    """
    Give the samples of a group their targets, from their rewards, and leave out those without a score.

    A sample without a score has no advantage. TRL gives it one of 0. In OPO, 0 is a real target: it asks the policy to
    keep this completion's probability unchanged.

    Args:
        samples (`list[RolloutSample]`): training rows of a complete group, changed in place.
        conversations (`list[int]`): the conversation of each. TRL makes several rows of a conversation whose history
            is rewritten on the way.

    Returns:
        `list[RolloutSample]`: the samples with a score and a trained token. `advantage` is the target.
    """
    rewards: dict[int, float] = {}
    tokens: Counter[int] = Counter()
    for sample, conversation in zip(samples, conversations, strict=True):
        rewards[conversation] = sample.metrics["reward"]
        tokens[conversation] += int(sample.completion_mask.sum())
    scores = torch.tensor([*rewards.values()], dtype=torch.float64)
    targets, means = group_targets(scores, objective)
    omega = torch.full_like(scores, torch.nan) if targets.omega is None else targets.omega
    place = {conversation: i for i, conversation in enumerate(rewards)}
    kept = []
    for sample, conversation in zip(samples, conversations, strict=True):
        i = place[conversation]
        if scores[i].isfinite() and sample.completion_mask.any():
            sample.advantage = targets.target[i].item()
            own: dict = sample.metrics
            own[OWN] = (sample.model_version, tokens[conversation], omega[i].item(), *means)
            kept.append(sample)
    return kept


class OPORolloutLoop(GuardedLoop):
    """
    TRL's rollout loop, with the targets of the objective `opo`. Groups that an earlier run has `trained` are left out.
    Those after the first `epochs` are generated when these have been scored, to fill up the last optimizer step.
    """

    def __init__(self, *, opo: Objective, trained: Collection[int] = frozenset(), epochs: int = 0, **named):
        super().__init__(**named)
        self.opo, self.trained, self.epochs = opo, trained, epochs
        self._left = epochs - sum(group < epochs for group in trained)
        self._epochs_are_scored = asyncio.Event()
        self._unscored = 0  # groups, in a row

    def _repeat_iterator(self) -> Iterator[tuple[int, dict[str, Any]]]:
        return (work for work in super()._repeat_iterator() if work[0] not in self.trained)

    async def _generate_one(self, prompt, tool_dict, tools, group_id=0):
        if group_id >= self.epochs and self._left > 0:
            await self._epochs_are_scored.wait()
        return await super()._generate_one(prompt, tool_dict, tools, group_id)

    async def _score_group(self, group: RolloutGroup) -> list[RolloutSample]:
        samples = await super()._score_group(group)
        self._left -= 1
        if not self._left:
            self._epochs_are_scored.set()
        conversations = [i for i, rows in enumerate(group.completions_sequences) for _ in rows]
        kept = with_targets(samples, conversations, self.opo) if samples else []
        self._counters["sample/unscored_total"] += len(samples) - len(kept)
        self._unscored = 0 if kept else self._unscored + 1
        if self._unscored == MOST_LOST:
            raise RewardError(
                f"No completion of the last {MOST_LOST} groups has a score, or a token to train. Check the rewards "
                f"({', '.join(self.reward_func_names)}): `None` and NaN are no score."
            )
        return kept


def make_targets(worker: AsyncRolloutWorker, objective: Objective) -> None:
    """Let TRL's worker, which has not started yet, make targets; a loop that makes none raises a `ValueError`."""
    if worker._loop_cls is _AsyncRolloutLoop:
        worker._loop_cls = OPORolloutLoop
    elif not issubclass(worker._loop_cls, OPORolloutLoop):
        raise ValueError(
            f"rollout_worker={type(worker).__name__} has the loop {worker._loop_cls.__name__}, which computes no "
            "targets for OPO. Set its `_loop_cls` to a class that derives from "
            "`opo_trl.asynchronous.targets.OPORolloutLoop` first, and then from that loop."
        )
    worker._loop_kwargs["opo"] = objective
