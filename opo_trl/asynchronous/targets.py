r"""
Targets of a group, computed when it is scored, in the process of the rollout worker.

Only there is the group complete. TRL later fills micro-batches with single samples, so most groups are split over
several, and drops samples that have become too old.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from ..metrics.opo import rollout_metrics
from ..objective import Groups, Objective, Targets


OWN = "opo"  # entry of a sample's metrics with what the loss needs of it; the trainer takes it out

# Metrics of a group whose mean over the samples of many groups is that of a rollout.
MEANS = ("escort/ess", "temperature", "mu", "frac_zero_drive")


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

    `samples` are the training rows of a complete group, changed in place, and `conversations` that of each: TRL makes
    several rows of a conversation whose history is rewritten on the way. Returns the samples with a score and a
    trained token; their `advantage` is the target.
    """
    rewards = {i: sample.metrics["reward"] for i, sample in zip(conversations, samples, strict=True)}
    scores = torch.tensor([*rewards.values()], dtype=torch.float64)
    targets, means = group_targets(scores, objective)
    place = {conversation: i for i, conversation in enumerate(rewards)}
    kept = []
    for sample, conversation in zip(samples, conversations, strict=True):
        i = place[conversation]
        if scores[i].isfinite() and sample.completion_mask.any():
            sample.advantage = targets.target[i].item()
            own: dict = sample.metrics
            own[OWN] = (sample.model_version, *means)
            kept.append(sample)
    return kept
