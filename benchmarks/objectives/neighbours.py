r"""
Neighbours of OPO, and OPO with single parts replaced, for both trainers.

Most regress the log-ratio Δ = log π/π_behaviour of a completion on a target. With r̄ the mean reward of a group of G:

| method | target, or loss where it is no regression of each completion | here |
|---|---|---|
| OPO, `ratio_form: log` | (ω − 1)/μ, mean 0 in each group; weight min(π/π_behaviour, 2) | [`Surrogate`] |
| OPO without the weight | the same | [`Unweighted`] |
| Kimi k1.5 (arXiv 2501.12599) | (r − r̄)/τ; its gradient is (r − r̄)·∇log π − τ/2·∇Δ² | [`Kimi`], μ = τ |
| OAPL (2602.19362), β₁ = β₂ = β | log ω at α = 0, = r/β − log mean exp(r/β) | [`OAPL`], μ = β |
| REBEL, A\*-PO (2505.20686) | differences of Δ on differences of r/η, over all pairs of a group | [`REBEL`], μ = η |
| TPO (2604.06159) | cross-entropy of q ∝ p_behaviour·exp(A) and π, both normalized over the group | [`TPO`], μ = 1 |
| a constant in the mean (2605.28150) | OPO's, plus a constant | [`Lowered`], [`Raised`] |
| Algorithm 1 of OPO's paper | ω/μ, without the projection (docs/paper.md, 4) | [`Algorithm1`] |
| M2PO (2510.01161) | −π/π_behaviour·A of each token, without those of the largest log-ratios | [`M2PO`] |

`Kimi`, `OAPL` and `REBEL` need `scale_rewards: none`, so that advantages are r − r̄; then at τ = β = η they ask for the
same differences of Δ in a group, and treat only its mean differently. The neighbours have weight 1.
"""

from dataclasses import replace

import torch
from torch import Tensor

from opo_trl.objective import MAX_WEIGHT, OPO, Objective, grouped, project


M2_THRESHOLD = 0.04  # of M2PO's paper


class Surrogate(OPO):
    """OPO with its paper's surrogate, unless `ratio_form` is `exact`."""

    @property
    def ratio_form(self):
        return "log" if self.args.ratio_form == "truncated" else self.args.ratio_form


# 1. Other weights


class Unweighted(Surrogate):
    """Completions have weight 1."""

    def weights(self, samples):
        return samples.weights


class FallingMu(Unweighted):
    """The same, with a χ² coefficient that falls with the age of a completion, and the same drive."""

    def terms(self, log_ratio, weights, samples):
        fall = (1 + samples.age).sqrt()
        fallen = replace(samples, target=samples.target * fall, mu=samples.mu / fall)
        return super().terms(log_ratio, weights, fallen)


class Decoupled(Surrogate):
    """
    The policy that takes a completion up is its anchor, as in AReaL's decoupled loss where an optimizer step is a
    whole pass: the log-ratio is 0, and the weight min(π/π_behaviour, `own`).
    """

    own = MAX_WEIGHT

    def weights(self, samples):
        return samples.weights * self.reduce(samples.moved, samples).exp().clamp(max=self.own)

    def terms(self, log_ratio, weights, samples):
        log_ratio = self.reduce(samples.sum(samples.log_ratios), samples)
        return super().terms(log_ratio - log_ratio.detach(), weights, samples)


# 2. Other targets


class Linear(Surrogate):
    """The drive is the advantage, centred over the group."""

    def drive(self, omega, groups):
        return project(groups.advantages, scaling=self.args.drive_scaling, **groups.rows)


class WithoutProjection(Surrogate):
    """The drive is ω itself."""

    def drive(self, omega, groups):
        return omega, super().drive(omega, groups)[1]


class Algorithm1(WithoutProjection, Unweighted):
    """Algorithm 1 of the paper."""


class LogNormalized(Unweighted):
    """The target less its log-mean-exp, so that the mean of exp(Δ*) is 1 in each group."""

    def target(self, drive, mu, groups):
        target, mu = super().target(drive, mu, groups)
        keep = grouped(groups.valid, groups.num_generations)
        of_groups = target.view_as(keep).masked_fill(~keep, -torch.inf)
        count = keep.sum(dim=1, keepdim=True).clamp(min=1)
        excess = of_groups.logsumexp(dim=1, keepdim=True) - count.log()
        return torch.where(keep, of_groups - excess, 0.0).flatten(), mu


class Lowered(Unweighted):
    """The target plus a constant, for every completion."""

    shift = -0.5

    def target(self, drive, mu, groups):
        target, mu = super().target(drive, mu, groups)
        return torch.where(groups.valid, target + self.shift, 0.0), mu


class Raised(Lowered):
    """The opposite constant."""

    shift = 0.5


# 3. Published methods


class Kimi(Linear, Unweighted):
    """Kimi k1.5 with τ = μ."""


class OAPL(LogNormalized, Linear):
    """OAPL with β = μ: (r − r̄)/β less its log-mean-exp is r/β − log mean exp(r/β)."""


class WholeGroups(Kimi):
    """
    A loss of each group, which `group_losses` computes. Asynchronous training divides groups.

    Raises:
        `ValueError`: micro-batches would divide groups.
    """

    def __init__(self, args):
        super().__init__(args)
        for name, wanted in (("plan_micro_batches", False), ("steps_per_generation", 1)):
            value = getattr(args, name, None)
            if value != wanted:
                raise ValueError(f"{name}={value} divides groups between micro-batches. Set `{name}` to {wanted}.")

    def terms(self, log_ratio, weights, samples):
        columns = {
            "valid": weights != 0,
            "logps": samples.sum(samples.logps),
            "anchor": samples.sum(samples.anchor_logps),
            "target": samples.target,
        }
        losses = self.group_losses(**{n: grouped(x, self.args.num_generations) for n, x in columns.items()})
        return samples.mu * losses.flatten(), torch.zeros_like(weights)

    def group_losses(self, *, valid: Tensor, logps: Tensor, anchor: Tensor, target: Tensor) -> Tensor:
        """Loss over μ of each completion from its log-probabilities and its target, all `[B // G, G]`."""
        raise NotImplementedError


class REBEL(WholeGroups):
    r"""
    REBEL with η = μ: squared errors of all pairs of a group, `1/(4G) · Σ_ij ((Δ_i − Δ_j) − (v*_i − v*_j))²`.

    This is half of the sum of squares of Δ − v\* less its mean over the group: the mean of Δ is free.
    """

    def group_losses(self, *, valid, logps, anchor, target):
        error = torch.where(valid, logps - anchor - target, 0.0)
        mean = error.sum(dim=1, keepdim=True) / valid.sum(dim=1, keepdim=True).clamp(min=1)
        return torch.where(valid, error - mean, 0.0).square() / 2


class TPO(WholeGroups):
    """TPO with u = A/μ: cross-entropy of q ∝ p_behaviour · exp(u) and π, both normalized over the group."""

    def group_losses(self, *, valid, logps, anchor, target):
        wanted = (anchor + target).masked_fill(~valid, -torch.inf).softmax(dim=1)
        found = logps.masked_fill(~valid, -torch.inf).log_softmax(dim=1)
        return torch.where(valid, -wanted * found, 0.0)


class M2PO(Objective):
    """
    M2PO: the policy gradient of tokens weighted by π/π_behaviour, without the tokens whose log-ratios are largest.

    As many are left out as it takes for the mean square of the others to be at most `threshold`. A micro-batch must
    hold an optimizer step.
    """

    threshold = M2_THRESHOLD

    def terms(self, log_ratio, weights, samples):
        kept = small_second_moment(samples.log_ratios.detach(), samples.mask, self.threshold)
        tokens = torch.where(kept, -samples.log_ratios.exp() * samples.spread(samples.target), 0.0)
        return weights * self.reduce(samples.sum(tokens), samples), torch.zeros_like(weights)


def small_second_moment(log_ratio: Tensor, mask: Tensor, threshold: float = M2_THRESHOLD) -> Tensor:
    """Most tokens whose mean square of log-ratios is at most `threshold`, the smallest first: bool `[B, T]`."""
    squares = log_ratio.square().masked_fill(~mask, torch.inf).flatten()
    ascending, order = squares.sort()
    means = ascending.cumsum(dim=0) / torch.arange(1, len(order) + 1, device=order.device)
    kept = torch.zeros_like(squares, dtype=torch.bool)
    kept[order[means <= threshold]] = True
    return kept.view_as(mask)
