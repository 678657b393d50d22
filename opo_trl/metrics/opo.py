"""Metrics of the objective, for a rollout and for an optimizer step. Logged under `opo/`."""

import math

import torch
from torch import Tensor

from ..objective import Groups, RatioForm, Targets, coordinate, grouped


@torch.no_grad()
def rollout_metrics(targets: Targets, groups: Groups) -> dict[str, Tensor]:
    r"""
    Metrics of a rollout before any update: escort weights, projection, target.

    Returns:
        `dict[str, torch.Tensor]`: scalars `mu`, `positivity_margin` (1 + min v\*), `frac_target_clipped` (samples
        whose target `positivity` changed) and `frac_zero_drive` (samples without first-order signal). If the target is
        made of escort weights, also `escort/{min,max,ess}` (`ess`: mean over groups of (Σω)² / Σω², between 1 and G),
        `escort/chemical_potential` and `temperature`. NaN if no sample is valid.

    Raises:
        `ValueError`: N is not a multiple of G.
    """
    drive, target, omega, valid = targets.drive, targets.target, targets.omega, groups.valid
    alive = grouped(valid, groups.num_generations).any(dim=1)
    # The projection of an admissible target is that target up to rounding: such a sample has not moved.
    moved = ~torch.isclose(target, drive / targets.mu, rtol=1e-5, atol=1e-6)
    metrics = {
        "mu": targets.mu,
        "positivity_margin": 1 + _extreme(target[valid], torch.min),
        "frac_target_clipped": moved[valid].to(drive.dtype).mean(),
        "frac_zero_drive": (drive == 0)[valid].to(drive.dtype).mean(),
    }
    if omega is None or targets.chemical_potential is None or targets.temperature is None:
        return metrics
    weights = grouped(torch.where(valid, omega, 0.0), groups.num_generations)
    ess = weights.sum(dim=1).square() / weights.square().sum(dim=1).clamp(min=torch.finfo(weights.dtype).tiny)
    return metrics | {
        "escort/min": _extreme(omega[valid], torch.min),
        "escort/max": _extreme(omega[valid], torch.max),
        "escort/ess": ess[alive].mean(),
        "escort/chemical_potential": targets.chemical_potential[alive].mean(),
        "temperature": targets.temperature,
    }


def _extreme(x: Tensor, reduce) -> Tensor:
    return reduce(x) if x.numel() else x.new_tensor(torch.nan)


@torch.no_grad()
def step_metrics(
    log_ratio: Tensor, *, weights: Tensor | None = None, clamped: Tensor | None = None
) -> dict[str, Tensor]:
    r"""
    Metrics of an optimizer step: how far the policy has moved, from Delta of all its samples, `[B]`.

    `weights` are those in the loss, `[B]`; samples of weight 0 count only in `frac_masked`. `clamped` says of which
    samples the log-ratio was clamped, bool `[B]`.

    Returns:
        `dict[str, torch.Tensor]`: scalars `chi2` (mean v², with v = exp(Delta) − 1), `tv_bound` (½ √chi2, an upper
        bound of the total variation), `conservation_residual` (mean v), `log_ratio/{mean,absmax}`,
        `approximation_gap` (mean |v − Delta|), `frac_clamped` and `frac_masked`. 0 if no sample takes part.
    """
    keep = torch.ones_like(log_ratio, dtype=torch.bool) if weights is None else weights != 0
    count = keep.sum().clamp(min=1)
    delta = torch.where(keep, log_ratio, 0.0)
    v = torch.expm1(delta)
    chi2 = v.square().sum() / count
    clamped = torch.zeros_like(keep) if clamped is None else clamped & keep
    return {
        "chi2": chi2,
        "tv_bound": chi2.sqrt() / 2,
        "conservation_residual": v.sum() / count,
        "log_ratio/mean": delta.sum() / count,
        "log_ratio/absmax": delta.abs().max(),
        "approximation_gap": (v - delta).sum() / count,  # e^Delta - 1 >= Delta
        "frac_clamped": clamped.sum() / count,
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
