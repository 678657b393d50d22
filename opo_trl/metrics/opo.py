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
    omega, valid = targets.omega, groups.valid
    alive = grouped(valid, groups.num_generations).any(dim=1)
    metrics = {"frac_zero_drive": (targets.drive == 0)[valid].to(targets.drive.dtype).mean()}
    if omega is None or targets.temperature is None:
        return metrics
    weights = grouped(torch.where(valid, omega, 0.0), groups.num_generations)
    ess = weights.sum(dim=1).square() / weights.square().sum(dim=1).clamp(min=torch.finfo(weights.dtype).tiny)
    return metrics | {"mu": targets.mu, "escort/ess": ess[alive].mean(), "temperature": targets.temperature}


@torch.no_grad()
def step_metrics(log_ratio: Tensor, weights: Tensor, clamped: Tensor) -> dict[str, Tensor]:
    r"""
    Metrics of an optimizer step: how far the policy has moved, from Delta of all its samples, `[B]`.

    `weights` are those in the loss, `[B]`; samples of weight 0 count only in `frac_masked`. `clamped` says of which
    samples the log-ratio was clamped, bool `[B]`. Returns scalars: with v = exp(Delta) − 1, `chi2` is the mean of v²,
    and `conservation_residual` that of v; 0 if no sample takes part.
    """
    keep = weights != 0
    count = keep.sum().clamp(min=1)
    delta = torch.where(keep, log_ratio, 0.0)
    v = torch.expm1(delta)
    return {
        "chi2": v.square().sum() / count,
        "conservation_residual": v.sum() / count,
        "log_ratio/absmax": delta.abs().max(),
        "frac_clamped": (clamped & keep).sum() / count,
        "frac_masked": 1 - keep.to(v.dtype).mean(),
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
    weights = torch.where(target == 0, 0.0, torch.ones_like(u) if weights is None else weights)
    keep = weights != 0
    missing = torch.where(keep, weights * (u - target).square(), 0.0).sum()
    return 1 - missing / torch.where(keep, weights * target.square(), 0.0).sum()


@torch.no_grad()
def ratio_ess(log_ratio: Tensor, keep: Tensor) -> Tensor:
    """
    Effective sample size of the importance ratios π/π_k of whole completions, as a share of their number:
    `(Σ r)² / (n · Σ r²)`. A low one foretells collapse (VCPO, arXiv 2602.17616).

    `log_ratio` is Delta of the whole completion, `[B]`; samples to `keep` take part, bool `[B]`. A scalar in `(0, 1]`,
    1 while the policy is the behaviour policy; NaN if no sample takes part.
    """
    ratio = log_ratio[keep].softmax(dim=0)  # its scale cancels
    return 1 / (len(ratio) * ratio.square().sum()) if len(ratio) else ratio.new_tensor(math.nan)


def gradient_response_efficiency(gradient_norm: float, advantage_range: float) -> float:
    """
    The paper's ‖∇‖ / (½ AdvRange): gradient norm per unit of advantage signal; NaN without any signal. The norm is
    that of an optimizer step before clipping, the range max A − min A over the rollout.
    """
    return gradient_norm / (advantage_range / 2) if advantage_range > 0 else math.nan
