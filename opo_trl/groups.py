"""What is computed over the completions of a prompt, in complete groups, on whichever processes they are."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from .batch import Batch, completion_tokens, to_device
from .objective import Groups, token_mean


# Units of float32's rounding in a sum of rewards over functions, and in the mean over a group.
ROUNDING_ERRORS = 8


def have_spread(values: Tensor, counts: Tensor, num_generations: int, rounding: Tensor | float = 0.0) -> Tensor:
    """
    Groups whose `values`, `[N]`, differ by more than `rounding`, `[N / num_generations]`, among those that count (bool
    `[N]`): bool, `[N / num_generations]`.
    """
    values = values.view(-1, num_generations)
    counts = counts.view(-1, num_generations)
    # Not a standard deviation near zero: its rounding errors would depend on the size of the values.
    highest = values.masked_fill(~counts, -torch.inf).amax(dim=1)
    lowest = values.masked_fill(~counts, torch.inf).amin(dim=1)
    return highest > lowest + rounding


def equal_rewards(rewards: Tensor, weights: Tensor, counts: Tensor, num_generations: int) -> tuple[Tensor, Tensor]:
    """
    Completions of groups whose rewards are all equal, bool `[N]`: the weighted sums of `rewards`, `[N, number of
    functions]` with NaN for no score, of the completions that count (bool `[N]`) differ by no more than rounding.

    Besides, that rounding, `[N]`: how far such a sum, or its difference to the group's mean, may be off.
    """
    terms = rewards * weights
    magnitudes = terms.abs().nansum(dim=1).view(-1, num_generations)
    # So many units of float32's rounding, relative to the largest sum of absolute terms in the group
    rounding = ROUNDING_ERRORS * torch.finfo(torch.float32).eps * magnitudes.amax(dim=1)
    # Of groups, `[N / num_generations]`, as the rounding
    differ = have_spread(terms.nansum(dim=1), counts, num_generations, rounding)
    return (~differ).repeat_interleave(num_generations), rounding.repeat_interleave(num_generations)


def rounding_of_advantages(rewards: Tensor, weights: Tensor, num_generations: int, *, is_of_sums: bool) -> Tensor:
    """
    How large TRL's advantages may be by rounding alone, `[N]`: 0 in groups whose rewards differ. `rewards` are those
    of the functions, `[N, number of functions]`. TRL divides a reward less the group's mean by a standard deviation
    plus 1e-4.

    `is_of_sums`: whether TRL normalizes the weighted sums of the rewards (`sum_then_normalize`), or those of each
    function before it adds them.
    """
    scored = ~rewards.isnan()
    if is_of_sums:
        equal, rounding = equal_rewards(rewards, weights, scored.any(dim=1), num_generations)
        return torch.where(equal, rounding / 1e-4, 0.0)  # a standard deviation of 0, plus 1e-4
    equal = torch.ones_like(scored[:, 0])
    rounding = torch.zeros_like(rewards[:, 0])
    for index, weight in enumerate(weights):
        column = rewards[:, index : index + 1]
        equal_here, rounding_here = equal_rewards(column, weight, scored[:, index], num_generations)
        equal = equal & equal_here
        rounding = rounding + rounding_here
    return torch.where(equal, rounding / 1e-8, 0.0)  # divided once per function, and their sum once more


class TargetInputs(NamedTuple):
    """What the target of N completions, those of all processes, is computed from: float64 on the host."""

    advantages: Tensor  # `[N]`
    lengths: Tensor  # tokens that count, `[N]`
    logps: Tensor  # log-probability of the completion under the behaviour policy, `[N]`
    mean_logps: Tensor  # the same per token, `[N]`
    rewards: Tensor  # `[N, number of reward functions]`


def gather_samples(rollout: Batch, logps: Tensor | None, accelerator: Accelerator) -> TargetInputs:
    """
    Gather the inputs of a rollout's target, in complete groups, by one collective call, and wait for them.

    On the host and in float64: a few numbers for each completion cost nothing there, and the target is the same on
    every device. `logps` are the log-probabilities of tokens under the behaviour policy, `[B, T]`; `None` counts as 0.
    """
    advantages = rollout["advantages"]
    mask = completion_tokens(rollout)
    if logps is None:
        logps = torch.zeros_like(mask, dtype=torch.float32)
    # A rollout that an override made from scratch may have advantages but no rewards.
    rewards = rollout.get("rewards_per_func", torch.zeros_like(advantages).unsqueeze(1))
    sum_of_logps = torch.where(mask, logps, 0.0).sum(dim=1)
    columns = [advantages, mask.sum(dim=1), sum_of_logps, token_mean(logps, mask)]
    numbers = torch.stack([column.float() for column in columns], dim=1)  # `[B, 4]`
    of_all = accelerator.gather(torch.cat([numbers, rewards.float()], dim=1))  # of all processes
    numbers_of_all, rewards_of_all = of_all.cpu().double().tensor_split([len(columns)], dim=1)
    advantages_of_all, lengths, logps_of_completions, mean_logps = numbers_of_all.T
    return TargetInputs(advantages_of_all, lengths, logps_of_completions, mean_logps, rewards_of_all)


def complete_groups(
    rollout: Batch,
    logps: Tensor | None,
    accelerator: Accelerator,
    *,
    num_generations: int,
    reward_weights: Tensor,
    vocab_size: int,
) -> tuple[Groups, Tensor]:
    """
    The completions of all processes as an objective sees them, and how many tokens of each count, `[N]`.

    `logps` are as for [`gather_samples`], `reward_weights` those of the reward functions, and `vocab_size` is the
    number of tokens that the policy knows.
    """
    advantages, lengths, logp_sum, logp_mean, rewards = gather_samples(rollout, logps, accelerator)
    is_unscored = rewards.isnan().all(dim=1)
    valid = (lengths > 0) & ~is_unscored & advantages.isfinite()
    weights = reward_weights.cpu().double()
    equal, rounding = equal_rewards(rewards, weights, valid, num_generations)
    # In a group of equal rewards, an advantage within rounding is no signal, whoever has subtracted the mean. A larger
    # one, such as a constant that an override adds, is.
    is_rounding = equal & (advantages.abs() <= rounding)
    sums = (rewards * weights).nansum(dim=1)
    valid_sums = sums.where(valid, -torch.inf)
    highest_of_groups = valid_sums.view(-1, num_generations).amax(dim=1)
    highest = highest_of_groups.repeat_interleave(num_generations)
    groups = Groups(
        advantages=advantages.masked_fill(is_rounding, 0.0),
        rewards=torch.where(equal, highest, sums),  # without the rounding by which equal sums differ
        valid=valid,
        num_generations=num_generations,
        logps=logp_sum,
        mean_logps=logp_mean,
        vocab_size=vocab_size,
        has_rewards="rewards_per_func" in rollout,
    )
    return groups, lengths


def own_samples(rollout: Batch, columns: Mapping[str, Tensor], accelerator: Accelerator) -> dict[str, Tensor]:
    """
    This process's part, `[B]`, of columns over all processes' completions, `[N]`: in float32, on its rollout's device.
    """
    n_local = len(rollout["advantages"])
    first = n_local * accelerator.process_index
    local = slice(first, first + n_local)
    table = torch.stack([column[local].float() for column in columns.values()])
    local_columns = to_device(table, rollout["advantages"].device)
    return dict(zip(columns, local_columns, strict=True))
