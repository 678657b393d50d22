r"""
Published losses that are no regression, as objectives for both trainers. A ≥ 0 stands for a right completion.

| method | loss of a completion; ρ is π/π_behaviour of a token, s its geometric mean | reduction |
|---|---|---|
| GRPO (arXiv 2402.03300) | −min(ρA, clip(ρ)A) of each token; DAPO's and Dr. GRPO's under `sum` | `mean` |
| GSPO (2507.18071) | −min(sA, clip(s)A) | `mean` |
| CISPO (2506.13585) | −min(ρ, 1 + ε)·A·log π of each token, the ratio without gradient | `sum` |
| SAPO (2511.20347) | −4/τ·σ(τ(ρ − 1))·A of each token, τ larger where A is negative | `mean` |
| AReaL (2505.24298) | GRPO's to the policy that takes completions up, times min(ρ, 2) | `mean` |
| TOPR (2503.14286) | −w·A·log π; w is 1 where A ≥ 0, and min(π/π_behaviour, 1) elsewhere | `sum` |

The reduction is `log_ratio_reduction`. A test compares the first four with TRL's.
"""

import torch

from opo_trl.objective import MAX_WEIGHT, SEQUENCE_CLAMP, Objective


class GRPO(Objective):
    """GRPO's clipped ratio of tokens."""

    low, high = 0.2, 0.2

    def terms(self, log_ratio, weights, samples):
        losses = self.clipped(samples.log_ratios.exp(), samples.spread(samples.target))
        return weights * self.reduce(samples.sum(losses), samples), torch.zeros_like(weights)

    def clipped(self, ratio, advantage):
        """Loss of each ratio."""
        return -torch.min(ratio * advantage, ratio.clamp(1 - self.low, 1 + self.high) * advantage)


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


class TOPR(Objective):
    """TOPR's tapered weights."""

    def weights(self, samples):
        tapered = samples.moved.clamp(-SEQUENCE_CLAMP, 0).exp()
        return samples.weights * torch.where(samples.target < 0, tapered, 1.0)

    def terms(self, log_ratio, weights, samples):
        return -weights * samples.target * log_ratio, torch.zeros_like(weights)
