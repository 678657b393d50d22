"""Metrics of the objective, for a rollout and for an optimizer step. Logged under `opo/`."""

import math

import torch
from torch import Tensor

from ..objective import Groups, RatioForm, Targets, coordinate, grouped


@torch.no_grad()
def rollout_metrics(targets: Targets, groups: Groups) -> dict[str, Tensor]:
    r"""
    Metrics of a rollout before any update: the scalar `frac_zero_drive` (samples without first-order signal); if the
    target is made of escort weights, also `mu`, `escort/ess` (mean over groups of (Σω)² / Σω², between 1 and G) and
    `temperature`. NaN if no sample is valid. `ValueError` if N is not a multiple of G.
    """
    drive = targets.drive[groups.valid]
    has_no_drive = (drive == 0).to(drive.dtype)
    metrics = {"frac_zero_drive": has_no_drive.mean()}
    if targets.omega is None or targets.temperature is None:
        return metrics
    weights = torch.where(groups.valid, targets.omega, 0.0)
    ess = _effective_sizes(grouped(weights, groups.num_generations))
    has_valid = grouped(groups.valid, groups.num_generations).any(dim=1)
    mean_ess = ess[has_valid].mean()
    return metrics | {"mu": targets.mu, "escort/ess": mean_ess, "temperature": targets.temperature}


def _effective_sizes(weights: Tensor) -> Tensor:
    """Effective sample size (Σω)² / Σω² of each row of weights; 0 for a row of zeros."""
    smallest = torch.finfo(weights.dtype).tiny
    sums = weights.sum(dim=1)
    sums_of_squares = weights.square().sum(dim=1)
    return sums.square() / sums_of_squares.clamp(min=smallest)


@torch.no_grad()
def step_metrics(log_ratio: Tensor, weights: Tensor, clamped: Tensor) -> dict[str, Tensor]:
    r"""
    Metrics of an optimizer step: how far the policy has moved, from Delta of all its samples, `[B]`.

    `weights` are those in the loss, `[B]`; samples of weight 0 count only in `frac_masked`. `clamped` says of which
    samples the log-ratio was clamped, bool `[B]`. Returns scalars: with v = exp(Delta) − 1, `chi2` is the mean of v²,
    and `conservation_residual` that of v; 0 if no sample takes part.
    """
    takes_part = weights != 0
    count = takes_part.sum().clamp(min=1)
    delta = torch.where(takes_part, log_ratio, 0.0)
    v = torch.expm1(delta)
    sum_of_squares = v.square().sum()
    n_clamped = (clamped & takes_part).sum()
    share_taking_part = takes_part.to(v.dtype).mean()
    return {
        "chi2": sum_of_squares / count,
        "conservation_residual": v.sum() / count,
        "log_ratio/absmax": delta.abs().max(),
        "frac_clamped": n_clamped / count,
        "frac_masked": 1 - share_taking_part,
    }


@torch.no_grad()
def target_fit(
    log_ratio: Tensor, target: Tensor, *, ratio_form: RatioForm = "truncated", weights: Tensor | None = None
) -> Tensor:
    r"""
    How much of the change that the target asks for has happened: `1 − Σ w·(u − v*)² / Σ w·v*²`, over v\* ≠ 0, with
    the [`coordinate`] u and the rest as in [`loss_terms`].

    A scalar, at most 1: 0 while the policy is the behaviour policy, 1 at the target, below 0 when the policy is
    further from the target than the behaviour policy is; NaN without a target.
    """
    u = coordinate(log_ratio, ratio_form)
    if weights is None:
        weights = torch.ones_like(u)
    weights = torch.where(target == 0, 0.0, weights)
    missing = _weighted_sum((u - target).square(), weights)
    asked_for = _weighted_sum(target.square(), weights)
    return 1 - missing / asked_for


def _weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Σ w·x over the samples whose weight is not 0: the values of others may not be finite."""
    return torch.where(weights != 0, weights * values, 0.0).sum()


@torch.no_grad()
def ratio_ess(log_ratio: Tensor, keep: Tensor) -> Tensor:
    """
    Effective sample size of the importance ratios π/π_k of whole completions, as a share of their number:
    `(Σ r)² / (n · Σ r²)`. A low one foretells collapse (VCPO, arXiv 2602.17616).

    `log_ratio` is Delta of the whole completion, `[B]`; samples to `keep` take part, bool `[B]`. A scalar in `(0, 1]`,
    1 while the policy is the behaviour policy; NaN if no sample takes part.
    """
    ratio = log_ratio[keep].softmax(dim=0)  # its scale cancels
    if len(ratio) == 0:
        return ratio.new_tensor(math.nan)
    sum_of_squares = ratio.square().sum()
    return 1 / (len(ratio) * sum_of_squares)


def gradient_response_efficiency(gradient_norm: float, advantage_range: float) -> float:
    """
    The paper's ‖∇‖ / (½ AdvRange): gradient norm per unit of advantage signal; NaN without any signal. The norm is
    that of an optimizer step before clipping, the range max A − min A over the rollout.
    """
    return gradient_norm / (advantage_range / 2) if advantage_range > 0 else math.nan
