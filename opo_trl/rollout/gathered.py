"""Samples of a complete rollout: gathered from all processes, and back to each."""

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ..objective import token_mean
from .rows import completion_tokens


def gather_samples(rollout: Mapping[str, Any], logps: Tensor | None, accelerator: Accelerator) -> tuple[Tensor, ...]:
    """
    Gather the inputs of a rollout's target, in complete groups, by one collective call.

    On the host and in float64: N numbers cost nothing there, and the target is the same on every device.

    Args:
        rollout (`Mapping[str, Any]`):
            This process's samples.
        logps (`torch.Tensor`, *optional*):
            Log-probabilities of their tokens under the behaviour policy, `[B, T]`; `None` counts as 0.
        accelerator (`Accelerator`):
            Accelerator of the run.

    Returns:
        `tuple[torch.Tensor, ...]`: advantages, number of tokens that count, log-probability of the completion, summed
        and per token, `[N]` each; rewards, `[N, number of reward functions]`.

    Raises:
        `ValueError`: the advantages are not one number per sample.
    """
    advantages = rollout["advantages"]
    if advantages.ndim != 1:
        raise ValueError(
            f"The rollout has advantages of shape {tuple(advantages.shape)}, but OPO's target is one number per "
            "completion. Return them with shape [B] from `_generate_and_score_completions`."
        )
    mask = completion_tokens(rollout)
    logps = torch.zeros_like(mask, dtype=torch.float32) if logps is None else logps
    # A rollout that an override made from scratch may have advantages but no rewards.
    rewards = rollout.get("rewards_per_func", torch.zeros_like(advantages).unsqueeze(1))
    columns = [advantages, mask.sum(dim=1), torch.where(mask, logps, 0.0).sum(dim=1), token_mean(logps, mask)]
    table = torch.cat([torch.stack([column.float() for column in columns], dim=1), rewards.float()], dim=1)
    gathered = accelerator.gather(table).cpu().double()
    return (*gathered[:, : len(columns)].T, gathered[:, len(columns) :])


def own_samples(rollout: Mapping[str, Any], column: Tensor, accelerator: Accelerator) -> Tensor:
    """Of a column of all processes' samples, `[N]`, those of this process's rollout, `[B]`; numbers in float32."""
    n_own = len(rollout["advantages"])
    own = column[n_own * accelerator.process_index :][:n_own]
    return (own if own.dtype == torch.bool else own.float()).to(rollout["advantages"].device)
