r"""
Published losses that are no regression, as objectives. A ≥ 0 stands for a right completion.

| method | loss of a completion; ρ is π/π_behaviour of a token, s its geometric mean, t its product | reduction |
|---|---|---|
| GRPO (arXiv 2402.03300) | −min(ρA, clip(ρ)A) of each token; DAPO's under `sum` | `mean` |
| Dr. GRPO (2503.20783) | the same, where A is r − r̄, not divided by the group's deviation | `sum` |
| GSPO (2507.18071) | −min(sA, clip(s)A) | `mean` |
| CISPO (2506.13585) | −min(ρ, 1 + ε)·A·log π of each token, the ratio without gradient | `sum` |
| SAPO (2511.20347) | −4/τ·σ(τ(ρ − 1))·A of each token, τ larger where A is negative | `mean` |
| VESPO (2602.10693) | −t^k·exp(λ(1 − t))·A·log π, the weight without gradient, k and λ by the sign of A | `sum` |
| AReaL (2505.24298) | GRPO's to the policy that takes completions up, times min(ρ, 2) | `mean` |
| SPO (2401.16025) | −ρA + |A|/(2ε)·(ρ − 1)² of each token | `mean` |
| DRPO (2606.09821) | −ρA + |A|/(2δ)·(π − π_behaviour)²/π_behaviour of each token | `mean` |
| TOPR (2503.14286) | −w·A·log π; w is 1 where A ≥ 0, and min(t, 1) elsewhere | `sum` |
| GRPO with TRL's truncated sampling | GRPO's to a recomputed policy, times min(ρ, 2) or min(t, 2) | `mean` |

The reduction is `log_ratio_reduction`. A test compares GRPO, GSPO, CISPO, SAPO and VESPO with the package's, another
the last with TRL's. The gradient of DRPO's loss is `−ρ(1 − sign(A)·(π − π_behaviour)/δ)·A·∇log π`: the weights that
its paper describes.
"""

import math
from dataclasses import replace

import torch

from opo_trl import objectives
from opo_trl.objective import MAX_WEIGHT, SEQUENCE_CLAMP, Objective, project


class GRPO(Objective):
    """GRPO's clipped ratio of tokens."""

    low, high = 0.2, 0.2

    def terms(self, log_ratio, weights, samples):
        losses = self.clipped(samples.log_ratios.exp(), samples.spread(samples.target))
        return weights * self.reduce(samples.sum(losses), samples), torch.zeros_like(weights)

    def clipped(self, ratio, advantage):
        """Loss of each ratio."""
        return -torch.min(ratio * advantage, ratio.clamp(1 - self.low, 1 + self.high) * advantage)


class DrGRPO(GRPO):
    """GRPO with the advantages of Dr. GRPO."""

    def targets(self, groups):
        advantages, _ = project(groups.rewards, **groups.rows)
        return super().targets(replace(groups, advantages=advantages))


class GSPO(GRPO):
    """GSPO's clipped ratio of sequences."""

    low, high = 3e-4, 4e-4

    def terms(self, log_ratio, weights, samples):
        mean = samples.sum(samples.log_ratios) / samples.length
        return weights * self.clipped(mean.exp(), samples.target), torch.zeros_like(weights)


class CISPO(GRPO):
    """CISPO's bounded weight of tokens. The log-ratio has the gradient of log π."""

    high = 4.0

    def clipped(self, ratio, advantage):
        return -ratio.detach().clamp(max=1 + self.high) * advantage * ratio.log()


class SAPO(GRPO):
    """SAPO's soft gate."""

    positive, negative = 1.0, 1.05

    def clipped(self, ratio, advantage):
        temperature = torch.where(advantage > 0, self.positive, self.negative)
        return -torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantage


class AReaL(GRPO):
    """AReaL's decoupled loss, where no optimizer step has passed since the completions were taken up."""

    def clipped(self, ratio, advantage):
        return ratio.detach().clamp(max=MAX_WEIGHT) * super().clipped(ratio / ratio.detach(), advantage)


class VESPO(Objective):
    """VESPO's gamma weight of completions."""

    positive, negative = (2.0, 3.0), (3.0, 2.0)  # k and λ

    def terms(self, log_ratio, weights, samples):
        is_right, pairs = samples.target >= 0, zip(self.positive, self.negative, strict=True)
        k, decay = (torch.where(is_right, *pair) for pair in pairs)
        moved = samples.moved.clamp(math.log(1e-8), SEQUENCE_CLAMP)
        gamma = (decay + k * moved - decay * moved.exp()).exp()
        return -weights * gamma * samples.target * log_ratio, torch.zeros_like(weights)


class SPO(Objective):
    """SPO's quadratic penalty on the ratio of tokens."""

    radius = 0.2

    def terms(self, log_ratio, weights, samples):
        ratio, advantage = samples.log_ratios.exp(), samples.spread(samples.target)
        coefficient = advantage.abs() / (2 * self.radius) * self.size(samples)
        penalty = coefficient * (ratio - 1).square()
        return tuple(weights * self.reduce(samples.sum(x), samples) for x in (-ratio * advantage, penalty))

    def size(self, samples):
        """Factor of each token's penalty."""
        return 1.0


class DRPO(SPO):
    """DRPO's quadratic penalty on the probability of tokens; `radius` is its δ."""

    def size(self, samples):
        return samples.anchor_logps.exp()


class TOPR(Objective):
    """TOPR's tapered weights."""

    def weights(self, samples):
        tapered = samples.moved.clamp(-SEQUENCE_CLAMP, 0).exp()
        return samples.weights * torch.where(samples.target < 0, tapered, 1.0)

    def terms(self, log_ratio, weights, samples):
        return -weights * samples.target * log_ratio, torch.zeros_like(weights)


class TruncatedSampling(objectives.GRPO):
    """
    GRPO with the truncated importance sampling of TRL, whose loss is the package's: the clipped ratio to a policy that
    was recomputed when the completions were taken up, times min(its ratio to the one that wrote them, 2).

    The recomputed policy is that of the step, as with TRL's defaults, where a rollout serves one optimizer step.
    `level_of_truncation` is that of TRL's `token_truncate` or `sequence_truncate`. AReaL's loss is the former.
    """

    level_of_truncation = "token"

    def loss(self, samples):
        log_ratios = samples.token_log_ratios.detach()
        if self.level_of_truncation == "sequence":
            log_ratios = samples.spread(samples.sum(log_ratios))
        ratios = log_ratios.exp().clamp(max=MAX_WEIGHT)
        return super().loss(replace(samples, anchor_logps=samples.logps.detach(), sampler_ratios=ratios))


class TruncatedSamplingOfCompletions(TruncatedSampling):
    """The same with one ratio for a completion."""

    level_of_truncation = "sequence"
