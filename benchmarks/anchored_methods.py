r"""
Neighbours of OPO, as subclasses of [`OPOTrainer`], and OPO with single parts replaced.

All regress the log-ratio Δ = log π/π_anchor of a completion on a target. With r̄ the mean reward of a group of G:

| method | target, or loss where it is no regression of each completion | here |
|---|---|---|
| OPO | (ω − 1)/μ, mean 0 in each group; weight min(π/π_behaviour, 2) | [`OPOTrainer`] |
| OPO without the weight | the same | [`Unweighted`] |
| Kimi k1.5 (arXiv 2501.12599) | (r − r̄)/τ; its gradient is (r − r̄)·∇log π − τ/2·∇Δ² | [`Kimi`], μ = τ |
| OAPL (2602.19362), β₁ = β₂ = β | log ω at α = 0, = r/β − log mean exp(r/β) | [`OAPL`], μ = β |
| REBEL, A\*-PO (2505.20686) | differences of Δ on differences of r/η, over all pairs of a group | [`REBEL`], μ = η |
| TPO (2604.06159) | cross-entropy of q ∝ p_anchor·exp(A) and π, both normalized over the group | [`TPO`], μ = 1 |
| a constant in the mean (2605.28150) | OPO's, plus a constant | [`Lowered`], [`Raised`] |
| Algorithm 1 of OPO's paper | ω/μ, without the projection (docs/errata.md, 4) | [`WithoutProjection`] |
| M2PO (2510.01161) | −π/π_b·A of each token, without those of the largest (log π/π_b)² | [`M2PO`] |

`Kimi`, `OAPL` and `REBEL` need `scale_rewards: none`, so that advantages are r − r̄; then at τ = β = η they ask for the
same differences of Δ in a group, and treat only its mean differently. The neighbours have weight 1.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from opo_trl import OPOTrainer, objective
from opo_trl.methods import Method
from opo_trl.metrics.step import SampleReport
from opo_trl.rollout.rows import completion_tokens


M2_THRESHOLD = 0.04  # of M2PO's paper


# 1. Other weights and anchors


class Unweighted(OPOTrainer):
    """Completions keep the behaviour policy as anchor, and have weight 1."""

    def _weights(self, inputs, logps, anchor, mask):
        return super()._weights(inputs, anchor, anchor, mask)  # a log-ratio of 0 has weight 1


class LatestAnchor(OPOTrainer):
    """
    The policy that begins a pass is the anchor of the completions that it takes up; their weight is
    min(π_anchor/π_behaviour, 2).
    """

    def _rows_of_pass(self, index, passed):
        rows = dict(super()._rows_of_pass(index, passed))
        if passed:
            # TRL's name for the policy that sampled: parts are cut from it, too. Only vLLM would need it for itself.
            rows["sampling_per_token_logps"] = rows.pop("old_per_token_logps")
        return rows

    def _weights(self, inputs, logps, anchor, mask):
        return super()._weights(inputs, anchor, inputs.get("sampling_per_token_logps", anchor), mask)


class UnweightedLatestAnchor(LatestAnchor, Unweighted):
    """The policy that begins a pass is the anchor, and completions have weight 1."""


# 2. Other targets


class Linear(Unweighted):
    """The drive is the advantage, centred over the group."""

    def _drive(self, omega, advantages, groups):
        return objective.project(advantages, scaling=self.args.drive_scaling, **groups)


class LatestLinear(LatestAnchor):
    """The same drive, with `LatestAnchor`'s anchor and weight."""

    _drive = Linear._drive


class WithoutProjection(Unweighted):
    """Algorithm 1: the drive is ω itself."""

    def _drive(self, omega, advantages, groups):
        _, potential = objective.project(omega, scaling=self.args.drive_scaling, **groups)
        return omega, potential


class LatestWithoutProjection(LatestAnchor):
    """The same drive, with `LatestAnchor`'s anchor and weight."""

    _drive = WithoutProjection._drive


class LogNormalized(Unweighted):
    """The target less its log-mean-exp, so that the mean of exp(Δ*) is 1 in each group."""

    def _target(self, drive, mu, groups):
        target, mu = super()._target(drive, mu, groups)
        keep = objective.grouped(groups["valid"], groups["num_generations"])
        of_groups = target.view_as(keep).masked_fill(~keep, -torch.inf)
        count = keep.sum(dim=1, keepdim=True).clamp(min=1)
        excess = of_groups.logsumexp(dim=1, keepdim=True) - count.log()
        return torch.where(keep, of_groups - excess, 0.0).flatten(), mu


class Lowered(Unweighted):
    """The target plus a constant, for every completion."""

    shift = -0.5

    def _target(self, drive, mu, groups):
        target, mu = super()._target(drive, mu, groups)
        return torch.where(groups["valid"], target + self.shift, 0.0), mu


class Raised(Lowered):
    """The opposite constant."""

    shift = 0.5


# 3. Published methods


class Kimi(Linear):
    """Kimi k1.5 with τ = μ."""


class OAPL(LogNormalized, Linear):
    """OAPL with β = μ: (r − r̄)/β less its log-mean-exp is r/β − log mean exp(r/β)."""


class WholeGroups(Linear):
    """
    A loss of each group, which `_group_losses` computes.

    Raises:
        `ValueError`: micro-batches would divide groups.
    """

    def __init__(self, *inputs, **named):
        super().__init__(*inputs, **named)
        for name, wanted in (("plan_micro_batches", False), ("steps_per_generation", 1)):
            value = getattr(self.args, name)
            if value != wanted:
                raise ValueError(f"{name}={value} divides groups between micro-batches. Set `{name}` to {wanted}.")

    def _sample_losses(self, inputs, logps, entropies) -> tuple[Tensor, SampleReport]:
        _, report = super()._sample_losses(inputs, logps, entropies)
        mask = completion_tokens(inputs) & inputs["opo_valid"].unsqueeze(1)
        columns = {
            "valid": inputs["opo_valid"],
            "logps": torch.where(mask, logps, 0.0).sum(dim=1),
            "anchor": torch.where(mask, self._anchor_logps(inputs, logps), 0.0).sum(dim=1),
            "target": inputs["opo_target"],
        }
        losses = self._group_losses(**{n: objective.grouped(x, self.num_generations) for n, x in columns.items()})
        return inputs["opo_scale"] * inputs["opo_mu"] * losses.flatten(), report

    def _group_losses(self, *, valid: Tensor, logps: Tensor, anchor: Tensor, target: Tensor) -> Tensor:
        """Loss over μ of each completion from its log-probabilities and its target, all `[B // G, G]`."""
        raise NotImplementedError


class REBEL(WholeGroups):
    r"""
    REBEL with η = μ: squared errors of all pairs of a group, `1/(4G) · Σ_ij ((Δ_i − Δ_j) − (v*_i − v*_j))²`.

    This is half of the sum of squares of Δ − v\* less its mean over the group: the mean of Δ is free.
    """

    def _group_losses(self, *, valid, logps, anchor, target):
        error = torch.where(valid, logps - anchor - target, 0.0)
        mean = error.sum(dim=1, keepdim=True) / valid.sum(dim=1, keepdim=True).clamp(min=1)
        return torch.where(valid, error - mean, 0.0).square() / 2


class TPO(WholeGroups):
    """TPO with u = A/μ: cross-entropy of q ∝ p_anchor · exp(u) and π, both normalized over the group."""

    def _group_losses(self, *, valid, logps, anchor, target):
        wanted = (anchor + target).masked_fill(~valid, -torch.inf).softmax(dim=1)
        found = logps.masked_fill(~valid, -torch.inf).log_softmax(dim=1)
        return torch.where(valid, -wanted * found, 0.0)


class M2PO(OPOTrainer):
    """
    M2PO: the policy gradient of tokens weighted by π/π_behaviour, without the tokens whose log-ratios are largest.

    As many are left out as it takes for the mean square of the others to be at most 0.04. A micro-batch must hold an
    optimizer step.
    """

    def _compute_loss(self, model, inputs: Mapping[str, Any]) -> Tensor:
        logps, _, _ = self._token_logps(model, inputs)
        mask = completion_tokens(inputs) & inputs["opo_valid"].unsqueeze(1)
        log_ratio = logps - self._anchor_logps(inputs, logps)
        kept = small_second_moment(log_ratio.detach(), mask)
        tokens = torch.where(kept, -log_ratio.exp() * inputs["advantages"].unsqueeze(1), 0.0).sum(dim=1)
        n_rows = self.args.per_device_train_batch_size * self.current_gradient_accumulation_steps
        return (inputs["opo_scale"] * tokens).sum() / n_rows


def small_second_moment(log_ratio: Tensor, mask: Tensor, threshold: float = M2_THRESHOLD) -> Tensor:
    """Most tokens whose mean square of log-ratios is at most `threshold`, the smallest first: bool `[B, T]`."""
    squares = log_ratio.square().masked_fill(~mask, torch.inf).flatten()
    ascending, order = squares.sort()
    means = ascending.cumsum(dim=0) / torch.arange(1, len(order) + 1, device=order.device)
    kept = torch.zeros_like(squares, dtype=torch.bool)
    kept[order[means <= threshold]] = True
    return kept.view_as(mask)


_TRAINERS: tuple[type[OPOTrainer], ...] = (
    Unweighted,
    LatestAnchor,
    UnweightedLatestAnchor,
    Linear,
    LatestLinear,
    WithoutProjection,
    LatestWithoutProjection,
    LogNormalized,
    Lowered,
    Raised,
    Kimi,
    OAPL,
    REBEL,
    TPO,
    M2PO,
)

METHODS = tuple(
    Method(t.__name__, t.__name__, "#000000", f"{__name__}.{t.__name__}", "opo_trl.config.OPOConfig")
    for t in _TRAINERS
)
