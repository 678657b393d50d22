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
class Sample:
    """A completion: its tokens, which of them count in the loss, and a reward of each function or `None`."""

    prompt: list[int]
    completion: list[int]
    counts: list[bool]
    rewards: list[float | None]


def chosen(logps: Tensor, sample: Sample) -> Tensor:
    """Of log-probabilities `[T, V]`, those of the completion's tokens, `[T]`."""
    return logps.gather(1, torch.tensor(sample.completion)[:, None]).squeeze(1)


def entropy(logps: Tensor) -> Tensor:
    """Entropy of distributions `[T, V]` in nats, `[T]`."""
    return -(logps.exp() * logps).sum(dim=1)


class Reference:
    """What a rollout's samples, in complete groups, say of all that is computed from them; `args` are a trainer's."""

    def __init__(self, model: torch.nn.Module, args: Any, objective: str, samples: Sequence[Sample]):
        self.model, self.args, self.objective, self.samples = model, args, objective, samples
        nan = math.nan
        rewards = [[nan if reward is None else reward for reward in sample.rewards] for sample in samples]
        weights = args.reward_weights or [1.0] * len(rewards[0])
        options = {"scale": args.scale_rewards, "aggregation": args.multi_objective_aggregation}
        self.rewards = torch.tensor(rewards, dtype=torch.float64)
        self.advantages = advantages_of(
            self.rewards, torch.tensor(weights, dtype=torch.float64), args.num_generations, **options
        )
        self.valid = torch.tensor([any(sample.counts) for sample in samples]) & ~self.rewards.isnan().all(dim=1)
        lengths = torch.tensor([sum(sample.counts) for sample in samples], dtype=torch.float64)
        # A sum over tokens is divided by the mean length: of all completions for DAPO, of those that train for OPO.
        self.mean_length = (lengths if objective == "dapo" else lengths[self.valid]).mean()

    def logps(self, weights: Weights, sample: Sample) -> Tensor:
        """Log-probabilities of every token of the vocabulary, at the place of each token of a completion."""
        exact = {name: weight.double() for name, weight in weights.items()}
        tokens = torch.tensor([sample.prompt + sample.completion])
        logits = torch.func.functional_call(self.model, exact, (tokens,)).logits[0, len(sample.prompt) - 1 : -1]
        return (logits / self.args.temperature).log_softmax(dim=-1)

    def surprise(self, behaviour: Weights) -> float:
        """
        How much less likely the completions are than samples of the behaviour policy, in standard deviations: −log p
        of a sampled token is its entropy in the mean, and the differences add up as those of independent numbers.
        """
        total = variance = 0.0
        for sample in self.samples:
            logps = self.logps(behaviour, sample)
            mean = entropy(logps)
            total += (-chosen(logps, sample) - mean).sum().item()
            second_moment = (logps.exp() * logps.square()).sum(dim=1)
            variance += (second_moment - mean.square()).sum().item()
        return total / math.sqrt(variance)

    def gradient(self, policy: Weights, behaviour: Weights, initial: Weights) -> dict[str, Tensor]:
        """
        Gradient of an optimizer step over all samples, in the weights of the `policy`; the `behaviour` policy wrote
        them, and the `initial` one is the reference.
        """
        weights = {name: weight.double().requires_grad_() for name, weight in policy.items()}
        with torch.no_grad():
            before = [self.logps(behaviour, sample) for sample in self.samples]
            references = [chosen(self.logps(initial, sample), sample) for sample in self.samples]
        steers = self._steering([entropy(logps) for logps in before])
        losses = []
        for index in self.valid.nonzero().flatten().tolist():
            sample = self.samples[index]
            counts = torch.tensor(sample.counts)
            of_vocabulary = self.logps(weights, sample)
            logps = chosen(of_vocabulary, sample)
            log_ratios = (logps - chosen(before[index], sample))[counts]
            loss = self._loss(log_ratios, steers[index][counts], index)
            if self.args.beta:
                distance = (references[index] - logps)[counts]
                kl = (distance.exp() - 1 - distance) * log_ratios.exp()
                loss = loss + self.args.beta * kl.mean()
            losses.append(loss - self.args.entropy_coef * entropy(of_vocabulary)[counts].mean())
        total = torch.stack(losses).sum() / len(self.samples)
        found = torch.autograd.grad(total, [*weights.values()], allow_unused=True, materialize_grads=True)
        return dict(zip(weights, found, strict=True))

    def _steering(self, entropies: list[Tensor]) -> list[Tensor]:
        """Tokens whose ratio counts, of each sample: those of the highest entropies (`top_entropy_quantile`)."""
        counted = [each[torch.tensor(sample.counts)] for each, sample in zip(entropies, self.samples, strict=True)]
        lowest = torch.cat(counted).quantile(1 - self.args.top_entropy_quantile)
        return [each >= lowest for each in entropies]

    def _loss(self, log_ratios: Tensor, steers: Tensor, index: int) -> Tensor:
        """Loss of a completion from the log-ratios of its tokens that count."""
        advantage = self.advantages[index]
        if self.objective in ("grpo", "dapo"):
            ratio = log_ratios.exp()
            clipped = ratio.clamp(1 - self.args.epsilon, 1 + self.args.epsilon)
            losses = -torch.minimum(ratio * advantage, clipped * advantage)[steers]
            return losses.sum() / (len(log_ratios) if self.objective == "grpo" else self.mean_length)
        log_ratio = log_ratios.sum()
        ratio = log_ratio.detach().exp()
        if self.objective == "topr":
            far = -log_ratios.detach().mean() > self.args.off_policy_mask_threshold
            weight = 1.0 if advantage > 0 else (0.0 if far else ratio.clamp(max=1.0))
            return -weight * self._centred(self.advantages, index) * log_ratio / self.mean_length
        weight, mu = ratio.clamp(max=2.0), self.args.mu
        escort = ((1 - self.args.alpha) * self.advantages / self.args.escort_temperature).exp()
        target = self._centred(escort, index, normalizes=True) / mu
        return weight * mu * (weight - 1 - target) * log_ratio / self.mean_length

    def _centred(self, values: Tensor, index: int, *, normalizes: bool = False) -> Tensor:
        """A sample's value less the mean over the valid samples of its group; first divided by it, or not."""
        first = index - index % self.args.num_generations
        group = slice(first, first + self.args.num_generations)
        mean = values[group][self.valid[group]].mean()
        return values[index] / mean - 1 if normalizes else values[index] - mean
