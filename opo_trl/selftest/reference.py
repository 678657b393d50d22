"""
A rollout and its gradients in float64, from rewards and tokens: completion by completion, from the logits of a model
that TRL has not patched.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..generation.first_step import advantages_of


Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Completion:
    """A completion: its tokens, which of them count in the loss, and a reward of each function or `None`."""

    prompt: list[int]
    tokens: list[int]
    counts: list[bool]
    rewards: list[float | None]

    def reward_values(self) -> Tensor:
        """The rewards, `[number of functions]`, with NaN for none."""
        values = [math.nan if reward is None else reward for reward in self.rewards]
        return torch.tensor(values, dtype=torch.float64)

    def counted(self) -> Tensor:
        """Whether each token of the completion counts, `[T]`."""
        return torch.tensor(self.counts)


def chosen(logps: Tensor, completion: Completion) -> Tensor:
    """Log-probabilities of the completion's tokens, `[T]`, among those of the vocabulary, `[T, V]`."""
    return logps.gather(1, torch.tensor(completion.tokens)[:, None]).squeeze(1)


def entropy(logps: Tensor) -> Tensor:
    """Entropy of distributions `[T, V]` in nats, `[T]`."""
    return -(logps.exp() * logps).sum(dim=1)


def _truncated_ratio(log_ratios: Tensor, largest: float) -> Tensor:
    """
    Probability of a completion by the policy over that by the behaviour policy, at most `largest` and without a
    gradient, from the log-ratios of its tokens.
    """
    ratio = log_ratios.detach().sum().exp()
    return ratio.clamp(max=largest)


class Reference:
    """
    What a rollout's completions, in complete groups, say of all that is computed from them: advantages, which of them
    train, log-probabilities and gradients, in float64.

    `args` are those of a trainer; the `objective` is one of `opo`, `topr`, `grpo` and `dapo`.
    """

    def __init__(self, model: torch.nn.Module, args: Any, objective: str, completions: Sequence[Completion]):
        self.model = model
        self.args = args
        self.objective = objective
        self.completions = completions
        rewards = torch.stack([completion.reward_values() for completion in completions])
        if args.reward_weights is None:
            weights = torch.ones(rewards.size(1), dtype=torch.float64)
        else:
            weights = torch.tensor(args.reward_weights, dtype=torch.float64)
        self.advantages = advantages_of(
            rewards,
            weights,
            args.num_generations,
            scale=args.scale_rewards,
            aggregation=args.multi_objective_aggregation,
        )
        lengths = torch.tensor([sum(completion.counts) for completion in completions], dtype=torch.float64)
        is_unscored = rewards.isnan().all(dim=1)
        self.valid = (lengths > 0) & ~is_unscored  # those that train: scored, with a token that counts
        # A sum over tokens is divided by the mean length: of all completions for DAPO, of those that train for OPO.
        lengths_in_mean = lengths if objective == "dapo" else lengths[self.valid]
        self.mean_length = lengths_in_mean.mean()

    def logps(self, weights: Weights, completion: Completion) -> Tensor:
        """
        Log-probabilities of every token of the vocabulary, `[T, V]`, at the place of each token of a completion, by
        the model with these weights and at the temperature of sampling.
        """
        exact = {name: weight.double() for name, weight in weights.items()}
        tokens = torch.tensor([completion.prompt + completion.tokens])
        logits = torch.func.functional_call(self.model, exact, (tokens,)).logits[0]
        of_completion = logits[len(completion.prompt) - 1 : -1]  # those after a token are of the next one
        return (of_completion / self.args.temperature).log_softmax(dim=-1)

    def surprise(self, behaviour: Weights) -> float:
        """
        How much less likely the completions are than those that the behaviour policy samples, in standard deviations.

        −log p of a sampled token is its entropy in the mean, and differences add up as those of independent numbers.
        """
        difference = 0.0
        variance = 0.0
        for completion in self.completions:
            logps = self.logps(behaviour, completion)
            mean = entropy(logps)
            second_moment = (logps.exp() * logps.square()).sum(dim=1)
            excess = -chosen(logps, completion) - mean
            difference += excess.sum().item()
            variance += (second_moment - mean.square()).sum().item()
        return difference / math.sqrt(variance)

    def gradient(self, policy: Weights, behaviour: Weights, initial: Weights) -> dict[str, Tensor]:
        """
        Gradient of the loss of an optimizer step over all completions, by the weights of the `policy`: name → tensor.

        The weights of the `behaviour` policy wrote the completions, and the `initial` ones are the reference's.
        """
        weights = {name: weight.double().requires_grad_() for name, weight in policy.items()}
        losses = []
        with torch.no_grad():
            of_behaviour = [self.logps(behaviour, completion) for completion in self.completions]
        lowest_entropy = self._lowest_entropy_that_steers([entropy(logps) for logps in of_behaviour])
        for index in self.valid.nonzero().flatten().tolist():
            completion = self.completions[index]
            counted = completion.counted()
            of_vocabulary = self.logps(weights, completion)
            logps = chosen(of_vocabulary, completion)
            log_ratios = (logps - chosen(of_behaviour[index], completion))[counted]
            steers = entropy(of_behaviour[index])[counted] >= lowest_entropy
            loss = self._loss(log_ratios, steers, index)
            if self.args.beta:
                with torch.no_grad():
                    of_reference = chosen(self.logps(initial, completion), completion)
                # The unbiased estimate of KL by one sample, times the ratio, as `use_bias_correction_kl` has it.
                distance = (of_reference - logps)[counted]
                kl = (distance.exp() - 1 - distance) * log_ratios.exp()
                loss = loss + self.args.beta * kl.mean()
            mean_entropy = entropy(of_vocabulary)[counted].mean()
            losses.append(loss - self.args.entropy_coef * mean_entropy)
        total = torch.stack(losses).sum() / len(self.completions)
        gradients = torch.autograd.grad(total, [*weights.values()], allow_unused=True, materialize_grads=True)
        return dict(zip(weights, gradients, strict=True))

    def _lowest_entropy_that_steers(self, entropies: list[Tensor]) -> Tensor:
        """
        The entropy from which on a token's ratio is part of the loss: `top_entropy_quantile` is the share of all
        counted tokens that have it, those of the highest entropies. `entropies` are those of each completion, `[T]`.
        """
        counted = [
            values[completion.counted()] for values, completion in zip(entropies, self.completions, strict=True)
        ]
        return torch.cat(counted).quantile(1 - self.args.top_entropy_quantile)

    def _loss(self, log_ratios: Tensor, steers: Tensor, index: int) -> Tensor:
        """
        Loss of the completion at this index, from the log-ratios of its tokens that count. `steers`: whether each of
        these is part of the loss, which only GRPO and DAPO ask.
        """
        if self.objective in ("grpo", "dapo"):
            return self._clipped_loss(log_ratios, steers, index)
        if self.objective == "topr":
            return self._topr_loss(log_ratios, index)
        return self._opo_loss(log_ratios, index)

    def _clipped_loss(self, log_ratios: Tensor, steers: Tensor, index: int) -> Tensor:
        """
        PPO's loss of a completion: for each token, minus the advantage times the ratio or the clipped ratio, whichever
        product is smaller; summed over the tokens that steer, over the number of all that count (GRPO) or the mean of
        this number (DAPO).
        """
        advantage = self.advantages[index]
        ratio = log_ratios.exp()
        clipped = ratio.clamp(1 - self.args.epsilon, 1 + self.args.epsilon)
        losses = -torch.minimum(ratio * advantage, clipped * advantage)
        length = len(log_ratios) if self.objective == "grpo" else self.mean_length
        return losses[steers].sum() / length

    def _topr_loss(self, log_ratios: Tensor, index: int) -> Tensor:
        """
        TOPR's loss of a completion, whose `log_ratios` are those of the policy to the behaviour policy. A good
        completion has a weight of 1. A bad one has the ratio, at most 1, and none if the policy has become so much
        less likely to write it that `off_policy_mask_threshold` masks it.
        """
        drift = -log_ratios.detach().mean()  # how much less probable its tokens are than when they were sampled
        weight: float | Tensor
        # By the sign before centring, as TRL's mask goes by it. Centring, below, is over the completions that train.
        if self.advantages[index] > 0:
            weight = 1.0
        elif drift > self.args.off_policy_mask_threshold:
            weight = 0.0
        else:
            weight = _truncated_ratio(log_ratios, 1.0)
        centered_advantage = self.advantages[index] - self._mean_of_group(self.advantages, index)
        return -weight * centered_advantage * log_ratios.sum() / self.mean_length

    def _opo_loss(self, log_ratios: Tensor, index: int) -> Tensor:
        """
        OPO's loss of a completion: the ratio r, at most 2, times the slope μ(r - 1 - v) at its target v, which is the
        escort weight over its group's mean, less 1, over μ.
        """
        mu = self.args.mu
        weight = _truncated_ratio(log_ratios, 2.0)
        exponent = (1 - self.args.alpha) / self.args.escort_temperature
        escort = (exponent * self.advantages).exp()
        relative_escort = escort[index] / self._mean_of_group(escort, index)
        target = (relative_escort - 1) / mu
        slope = mu * (weight - 1 - target)
        return weight * slope * log_ratios.sum() / self.mean_length

    def _mean_of_group(self, values: Tensor, index: int) -> Tensor:
        """Mean of a value over those completions of this completion's group that train. Groups have one size."""
        first = index - index % self.args.num_generations
        group = slice(first, first + self.args.num_generations)
        return values[group][self.valid[group]].mean()
