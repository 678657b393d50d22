r"""
Orthogonalized Policy Optimization (OPO): the paper, as pure functions on tensors.

For a prompt, let the group be its G completions sampled from the anchor policy `pi_k`, so that the expectation under
`pi_k` is the mean over the group. With the fluctuation `v = pi / pi_k - 1` and the log-ratio
`Delta = log pi - log pi_k`:

    omega  = rho_alpha / pi_k,  rho_alpha ∝ pi_k^alpha · P*^(1 - alpha),  P* ∝ exp(A / tau)    (escort_weights)
    g      = omega - E[omega]                       the projection onto H0 = {v : E[v] = 0}    (project)
    v*     = g / mu                                 made admissible, 1 + v* >= 0               (admissible_target)
    loss   = -mu · v* · u + mu/2 · u²,              u = Delta or u = exp(Delta) - 1            (opo_loss)

Completing the square, the loss is `mu/2 · (u - v*)²` up to a constant: a regression of u on the projected target with
the constant Hessian mu. `alpha` enters only through omega, `mu` only from v* on.

N is the number of completions in a rollout, N // G the number of groups; the rows of one group are consecutive. B is
the number of rows at hand, T the number of completion tokens. `valid` marks the rows that take part: the others get
zero weight, zero drive and zero target, and hold no influence on the rest, whatever finite or non-finite value stands
in them. `omega`, the drive and the target carry no gradient.

This module needs nothing but torch, and knows no trainer.
"""

import math
from typing import Literal

import torch
from torch import Tensor


DriveScaling = Literal["none", "group", "batch"]
Positivity = Literal["none", "stiffen", "clip", "project"]
RatioForm = Literal["log", "exact"]
Reduction = Literal["sum", "mean"]


def _at_least_float32(x: Tensor) -> Tensor:
    """Half precision holds too few digits for a softmax or a sum of log-probabilities."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _grouped(x: Tensor, num_generations: int) -> Tensor:
    """Reshape `[N]` to `[N // G, G]`, or raise `ValueError` where N does not hold whole groups."""
    if num_generations < 1 or x.dim() != 1 or x.numel() % num_generations != 0:
        raise ValueError(
            f"Expected a 1-D tensor of whole groups of num_generations={num_generations} rows, got shape "
            f"{tuple(x.shape)}. Pass the rows of complete groups, group after group."
        )
    return x.view(-1, num_generations)


def _valid_or_all(x: Tensor, valid: Tensor | None) -> Tensor:
    return torch.ones_like(x, dtype=torch.bool) if valid is None else valid.to(torch.bool)


def _group_mean(x: Tensor, valid: Tensor) -> Tensor:
    """Mean over the valid rows of each group of `x` (`[N // G, G]`, zero where invalid): `[N // G, 1]`."""
    return x.sum(dim=1, keepdim=True) / valid.sum(dim=1, keepdim=True).clamp(min=1)


@torch.no_grad()
def escort_weights(
    advantages: Tensor,
    *,
    alpha: float,
    num_generations: int,
    temperature: float | Tensor = 1.0,
    anchor_logps: Tensor | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    r"""
    Escort weights `omega = rho_alpha / pi_k` (Definition 3.1 of the paper), self-normalized in each group.

    The log-weight is `(1 - alpha) · (A / temperature - c)` with `c` the anchor correction, and
    `omega = G · softmax(log-weight)` over the group, so that the mean of omega over the valid rows is exactly the
    paper's `E[omega] = 1`.

    Args:
        advantages (`torch.Tensor`):
            Advantages A, shape `[N]`.
        alpha (`float`):
            Escort exponent in `[0, 1]`: 1 leaves the anchor as it is (omega = 1), 0 goes all the way to P\*.
        num_generations (`int`):
            Group size G.
        temperature (`float` or `torch.Tensor`, *optional*, defaults to `1.0`):
            Temperature of P\* ∝ exp(A / temperature), positive.
        anchor_logps (`torch.Tensor`, *optional*):
            Anchor log-probability of each completion, shape `[N]`, reduced as the anchor correction wants it. `None`
            absorbs the correction in the sampling measure (c = 0), which is to choose P\* ∝ pi_k · exp(A / tau).
        valid (`torch.Tensor`, *optional*):
            Bool mask of the rows that take part, shape `[N]`. `None` stands for all.

    Returns:
        `torch.Tensor`: omega, shape `[N]`, non-negative; 0 on invalid rows, exactly 1 on the valid rows of a group
        whose log-weights are all equal.
    """
    log_weights = _at_least_float32(advantages) / temperature
    if anchor_logps is not None:
        log_weights = log_weights - anchor_logps.to(log_weights.dtype)
    keep = _grouped(_valid_or_all(advantages, valid), num_generations)
    # An invalid row must not turn its group's maximum or sum into NaN, so it is replaced before anything is computed.
    log_weights = _grouped((1 - alpha) * log_weights, num_generations).masked_fill(~keep, -torch.inf)
    weights = (log_weights - log_weights.amax(dim=1, keepdim=True)).exp()
    return torch.where(keep, weights / _group_mean(weights, keep), 0.0).flatten()


@torch.no_grad()
def project(
    omega: Tensor, *, num_generations: int, scaling: DriveScaling = "none", valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """
    Projection onto H0, the fluctuations of zero mean (Theorem 3.4): `g = omega - lambda*`, `lambda* = E[omega]`.

    Args:
        omega (`torch.Tensor`):
            Escort weights, shape `[N]`.
        num_generations (`int`):
            Group size G.
        scaling (`str`, *optional*, defaults to `"none"`):
            `"group"` or `"batch"` divides g by its unbiased standard deviation over the group or over all rows (the
            paper's "z-scoring"). Where g has no spread the result is 0.
        valid (`torch.Tensor`, *optional*):
            Bool mask of the rows that take part, shape `[N]`.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: the drive g, shape `[N]`, 0 on invalid rows and exactly 0 in a group of
        equal weights; the chemical potential lambda*, shape `[N // G]` (0 for a group without a valid row).
    """
    keep = _grouped(_valid_or_all(omega, valid), num_generations)
    grouped = torch.where(keep, _grouped(_at_least_float32(omega), num_generations), 0.0)
    chemical_potential = _group_mean(grouped, keep)
    low = grouped.masked_fill(~keep, torch.inf).amin(dim=1, keepdim=True)
    high = grouped.masked_fill(~keep, -torch.inf).amax(dim=1, keepdim=True)
    # Equal weights less their mean may leave a rounding error, which scaling would blow up to order 1.
    drive = torch.where(keep & (high > low), grouped - chemical_potential, 0.0)
    if scaling == "group":
        drive = drive / _unbiased_std(drive, keep.sum(dim=1, keepdim=True), dim=1)
    elif scaling == "batch":
        drive = drive / _unbiased_std(drive.flatten(), keep.sum(), dim=0)
    elif scaling != "none":
        raise ValueError(f"scaling={scaling!r} is unknown. Use 'none', 'group' or 'batch'.")
    return drive.flatten(), chemical_potential.flatten()


def _unbiased_std(drive: Tensor, count: Tensor, dim: int) -> Tensor:
    """Standard deviation of a drive of zero mean (0 where invalid) over `count` rows; infinite where it is 0."""
    std = (drive.square().sum(dim=dim, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    return torch.where(std > 0, std, torch.inf)


@torch.no_grad()
def stiffness_for_radius(drive: Tensor, radius: float, *, valid: Tensor | None = None) -> Tensor:
    r"""
    Stiffness mu for which the target has the wanted χ² radius: `mean((g / mu)²) = radius`, so
    `mu = sqrt(mean(g²) / radius)` (Proposition 6.3, the trust-region duality, with `E[omega]` projected out).

    Args:
        drive (`torch.Tensor`):
            Drive g, shape `[N]`.
        radius (`float`):
            Wanted `E[v²]`, positive.
        valid (`torch.Tensor`, *optional*):
            Bool mask of the rows that take part, shape `[N]`.

    Returns:
        `torch.Tensor`: mu, a positive scalar. A drive that is 0 everywhere has nothing to constrain and gives the
        smallest positive number of its type.
    """
    drive = _at_least_float32(drive)
    keep = _valid_or_all(drive, valid)
    size = torch.where(keep, drive.abs(), 0.0)
    largest = size.max()
    # Squares of the relative size neither overflow nor underflow.
    relative = size / torch.where(largest > 0, largest, 1.0)
    mean_square = relative.square().sum() / keep.sum().clamp(min=1)
    return (largest * (mean_square / radius).sqrt()).clamp(min=torch.finfo(drive.dtype).tiny)


@torch.no_grad()
def admissible_target(
    drive: Tensor,
    *,
    mu: float | Tensor,
    num_generations: int,
    positivity: Positivity = "none",
    epsilon: float = 1e-3,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""
    Target fluctuation `v* = g / mu`, kept where `pi_k · (1 + v*)` is a distribution.

    The paper's condition mu ≥ ‖omega‖_∞ − 1 (Proposition 6.4) bounds the wrong side: what has to hold is
    mu ≥ −min g, that is mu ≥ 1 − min omega for an unscaled drive.

    Args:
        drive (`torch.Tensor`):
            Drive g, shape `[N]`.
        mu (`float` or `torch.Tensor`):
            Stiffness, positive.
        num_generations (`int`):
            Group size G.
        positivity (`str`, *optional*, defaults to `"none"`):
            - `"none"`: v\* as it is.
            - `"stiffen"`: raise mu to the smallest value for which v\* ≥ −1 on every row.
            - `"clip"`: v\* ← max(v\*, −1 + epsilon), which gives up `E[v*] = 0`.
            - `"project"`: Euclidean projection of 1 + v\* on the simplex {t ≥ 0, mean(t) = 1} of each group, which
              keeps `E[v*] = 0`.
        epsilon (`float`, *optional*, defaults to `1e-3`):
            Margin of `"clip"`, in `(0, 1)`.
        valid (`torch.Tensor`, *optional*):
            Bool mask of the rows that take part, shape `[N]`.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: v\*, shape `[N]`, 0 on invalid rows; the stiffness used, a scalar.
    """
    keep = _valid_or_all(drive, valid)
    drive = torch.where(keep, _at_least_float32(drive), 0.0)
    mu = torch.as_tensor(mu, dtype=drive.dtype, device=drive.device)
    if positivity == "stiffen":
        mu = torch.maximum(mu, -drive.min())
    target = drive / mu
    if positivity == "clip":
        target = torch.where(keep, target.clamp(min=-1 + epsilon), 0.0)
    elif positivity == "project":
        grouped_keep = _grouped(keep, num_generations)
        target = _project_on_simplex(_grouped(target, num_generations), grouped_keep).flatten()
    elif positivity not in ("none", "stiffen"):
        raise ValueError(f"positivity={positivity!r} is unknown. Use 'none', 'stiffen', 'clip' or 'project'.")
    return target, mu


def _project_on_simplex(target: Tensor, keep: Tensor) -> Tensor:
    """
    Project each row of 1 + `target` on {t ≥ 0, mean(t) = 1} over its kept entries, and take 1 off again.

    Sort-based algorithm of Duchi, Shalev-Shwartz, Singer and Chandra (ICML 2008): with the entries sorted downwards,
    the threshold is `(sum of the k largest − n) / k` for the largest k whose k-th entry exceeds it.
    """
    count = keep.sum(dim=1, keepdim=True)
    kept = target.masked_fill(~keep, -torch.inf)
    # A constant added to a row does not change its projection; below 0 no entry costs the others their digits.
    kept = kept - kept.amax(dim=1, keepdim=True)
    descending = kept.sort(dim=1, descending=True).values
    rank = torch.arange(1, target.shape[1] + 1, device=target.device, dtype=target.dtype)
    threshold = (descending.masked_fill(descending == -torch.inf, 0.0).cumsum(dim=1) - count) / rank
    # The largest entry always exceeds its threshold in exact arithmetic; clamp covers empty groups.
    support = (descending > threshold).sum(dim=1, keepdim=True).clamp(min=1)
    projected = (kept - threshold.gather(1, support - 1)).clamp(min=0)
    return torch.where(keep, projected - 1, 0.0)


@torch.no_grad()
def adaptive_temperature(
    base: float | Tensor,
    *,
    anchor_entropy: float | Tensor,
    success: float | Tensor,
    low: float,
    high: float,
    entropy_gain: float = 0.2,
    success_gain: float = 0.5,
) -> Tensor:
    r"""
    Temperature of P\* for one rollout: `clip(base · (1 + a·H − b·(1 − H)·r), low, high)`.

    A confident (H small) and successful (r near 1) policy gets a smaller temperature, hence sharper escort weights.

    The paper says no more than "adaptive τ with range [0.2, 1.5]"; the schedule is that of the author's public code
    (`wk222/verlm`), with the entropy of the anchor in both places so that the temperature is fixed for the rollout.

    Args:
        base (`float` or `torch.Tensor`):
            Temperature τ₀ at H = 0 and r = 0, positive.
        anchor_entropy (`float` or `torch.Tensor`):
            H, the mean of `-log pi_k(y) / |y|` over `log |V|`; clipped to `[0, 1]`.
        success (`float` or `torch.Tensor`):
            r, the rollout's mean reward scaled to `[-1, 1]`.
        low (`float`), high (`float`):
            Range of the temperature, `0 < low <= high`.
        entropy_gain (`float`, *optional*, defaults to `0.2`):
            a.
        success_gain (`float`, *optional*, defaults to `0.5`):
            b.

    Returns:
        `torch.Tensor`: the temperature, of the broadcast shape of the inputs.
    """
    entropy = torch.as_tensor(anchor_entropy).clamp(0, 1)
    confidence = 1 - entropy
    factor = 1 + entropy_gain * entropy - success_gain * confidence * torch.as_tensor(success)
    return (base * factor).clamp(low, high)


@torch.no_grad()
def entropy_proxy(mean_logps: Tensor, *, vocab_size: int, valid: Tensor | None = None) -> Tensor:
    """
    Entropy of the anchor as [`adaptive_temperature`] wants it: mean of `-log pi_k(y) / |y|` over `log |V|`.

    Args:
        mean_logps (`torch.Tensor`):
            Mean log-probability per token of each completion under the anchor, shape `[N]`.
        vocab_size (`int`):
            Size |V| of the vocabulary, at least 2.
        valid (`torch.Tensor`, *optional*):
            Bool mask of the rows that take part, shape `[N]`.

    Returns:
        `torch.Tensor`: H in `[0, 1]`, a scalar; 0 where no row is valid.
    """
    keep = _valid_or_all(mean_logps, valid)
    mean = torch.where(keep, -_at_least_float32(mean_logps), 0.0).sum() / keep.sum().clamp(min=1)
    return (mean / math.log(vocab_size)).clamp(0, 1)


@torch.no_grad()
def scaled_success(rewards: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """
    Success of a rollout as [`adaptive_temperature`] wants it: the mean of the rewards, min–max scaled to `[-1, 1]`.

    Args:
        rewards (`torch.Tensor`):
            Reward of each completion, shape `[N]`.
        valid (`torch.Tensor`, *optional*):
            Bool mask of the rows that take part, shape `[N]`.

    Returns:
        `torch.Tensor`: r in `[-1, 1]`, a scalar; 0 where the rewards have no spread, which says nothing of success.
    """
    rewards = _at_least_float32(rewards)[_valid_or_all(rewards, valid)]
    if rewards.numel() == 0:
        return rewards.new_zeros(())
    low, high = rewards.min(), rewards.max()
    scaled = 2 * (rewards.mean() - low) / torch.where(high > low, high - low, 1.0) - 1
    return torch.where(high > low, scaled.clamp(-1, 1), 0.0)  # the mean may round to outside its range


def sequence_log_ratio(
    logps: Tensor,
    anchor_logps: Tensor,
    mask: Tensor,
    *,
    reduction: Reduction = "sum",
    clamp: float | None = None,
) -> tuple[Tensor, Tensor]:
    """
    Log-ratio `Delta = log pi(y) − log pi_k(y)` of each completion, from the log-probabilities of its tokens.

    Args:
        logps (`torch.Tensor`):
            Per-token log-probabilities under the current policy, shape `[B, T]`; carries the gradient.
        anchor_logps (`torch.Tensor`):
            The same under the anchor, shape `[B, T]`.
        mask (`torch.Tensor`):
            Non-zero where a token belongs to the completion, shape `[B, T]`. Other positions have exactly zero
            influence, whatever they hold.
        reduction (`str`, *optional*, defaults to `"sum"`):
            `"sum"` is the log-ratio of whole completions, for which `mean(v²)` is the χ² divergence of the policy;
            `"mean"` divides it by the completion's length.
        clamp (`float`, *optional*):
            Bound on |Delta| after the reduction. A clamped row has no gradient.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Delta, shape `[B]`, 0 for a fully masked completion; a bool mask of the
        clamped rows, shape `[B]`.
    """
    keep = mask.to(torch.bool)
    difference = torch.where(keep, _at_least_float32(logps) - _at_least_float32(anchor_logps), 0.0)
    log_ratio = _over_tokens(difference, mask, reduction)
    if clamp is None:
        return log_ratio, torch.zeros_like(log_ratio, dtype=torch.bool)
    return log_ratio.clamp(-clamp, clamp), log_ratio.detach().abs() > clamp


def _over_tokens(x: Tensor, mask: Tensor, reduction: Reduction) -> Tensor:
    """Sum or mean of `x` (`[B, T]`) over the tokens of each completion, `[B]`; 0 for a fully masked completion."""
    keep = mask.to(torch.bool)
    total = torch.where(keep, x, 0.0).sum(dim=-1)
    if reduction == "sum":
        return total
    if reduction == "mean":
        return total / keep.sum(dim=-1).clamp(min=1)
    raise ValueError(f"reduction={reduction!r} is unknown. Use 'sum' or 'mean'.")


def token_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of `x` (`[B, T]`) over the tokens of each completion, `[B]`; 0 for a fully masked completion."""
    return _over_tokens(x, mask, "mean")


def opo_loss(
    log_ratio: Tensor,
    target: Tensor,
    *,
    mu: float | Tensor,
    ratio_form: RatioForm = "log",
    weights: Tensor | None = None,
) -> Tensor:
    r"""
    OPO loss of each completion, `w · (−mu · v* · u + mu/2 · u²)` (equations 14 and 18 of the paper).

    Args:
        log_ratio (`torch.Tensor`):
            Delta, shape `[B]`; carries the gradient.
        target (`torch.Tensor`):
            v\*, shape `[B]`.
        mu (`float` or `torch.Tensor`):
            Stiffness, positive.
        ratio_form (`str`, *optional*, defaults to `"log"`):
            `"log"`: u = Delta, the paper's surrogate. `"exact"`: u = v = exp(Delta) − 1.
        weights (`torch.Tensor`, *optional*):
            Importance weights w of the sampler, shape `[B]`, without gradient. A row of weight 0 has exactly zero
            loss and gradient, whatever it holds.

    Returns:
        `torch.Tensor`: loss of each row, shape `[B]`, to be averaged over the N rows of the optimizer step.
    """
    work, dissipation = _loss_terms(log_ratio, target, mu=mu, ratio_form=ratio_form, weights=weights)
    return work + dissipation


def _loss_terms(
    log_ratio: Tensor, target: Tensor, *, mu: float | Tensor, ratio_form: RatioForm, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The two terms of the loss, `−w · mu · v* · u` (work) and `w · mu/2 · u²` (dissipation), shape `[B]` each."""
    if ratio_form not in ("log", "exact"):
        raise ValueError(f"ratio_form={ratio_form!r} is unknown. Use 'log' or 'exact'.")
    if weights is None:
        weights = torch.ones_like(log_ratio)
    keep = weights != 0
    log_ratio = torch.where(keep, log_ratio, 0.0)
    target = torch.where(keep, target, 0.0).to(log_ratio.dtype)
    coordinate = torch.expm1(log_ratio) if ratio_form == "exact" else log_ratio
    weights = weights.to(log_ratio.dtype)
    return -weights * mu * target * coordinate, weights * mu / 2 * coordinate.square()


def sequence_weights(ratio: Tensor, mask: Tensor) -> Tensor:
    """
    TRL's importance ratio of the sampler, reduced to one number per sequence.

    Args:
        ratio (`torch.Tensor`):
            `[B, 1]` for TRL's sequence-level modes, `[B, T]` for its token-level ones.
        mask (`torch.Tensor`):
            Non-zero where a token belongs to the completion, shape `[B, T]`.

    Returns:
        `torch.Tensor`: w, shape `[B]`: the sequence's own ratio, or the mean of its tokens' ratios.
    """
    return ratio.squeeze(1) if ratio.shape[1] == 1 else token_mean(ratio, mask)


def reference_kl(
    logps: Tensor,
    reference_logps: Tensor,
    mask: Tensor,
    *,
    reduction: Reduction = "sum",
    anchor_logps: Tensor | None = None,
) -> Tensor:
    """
    Estimate of the KL divergence to a reference policy of each completion, as TRL's `beta` term has it.

    Args:
        logps (`torch.Tensor`):
            Per-token log-probabilities under the current policy, shape `[B, T]`; carries the gradient.
        reference_logps (`torch.Tensor`):
            The same under the reference policy, shape `[B, T]`.
        mask (`torch.Tensor`):
            Non-zero where a token belongs to the completion, shape `[B, T]`.
        reduction (`str`, *optional*, defaults to `"sum"`):
            `"sum"` or `"mean"` over the tokens: that of the log-ratio, so that `beta` weighs both terms alike.
        anchor_logps (`torch.Tensor`, *optional*):
            Per-token log-probabilities under the anchor, shape `[B, T]`. When given, each token's term is multiplied
            by its ratio to the anchor (`use_bias_correction_kl`), which makes the gradient unbiased.

    Returns:
        `torch.Tensor`: KL estimate, shape `[B]`, in nats (per token for `"mean"`).
    """
    keep = mask.to(torch.bool)
    difference = torch.where(keep, reference_logps - logps, 0.0)
    per_token = torch.expm1(difference) - difference
    if anchor_logps is not None:
        per_token = per_token * torch.where(keep, logps - anchor_logps, 0.0).exp()
    return _over_tokens(per_token, mask, reduction)


def gradient_response_efficiency(gradient_norm: float, advantage_range: float) -> float:
    """
    The paper's ‖∇‖ / (½ AdvRange): gradient norm per unit of advantage signal; NaN without any signal.

    Args:
        gradient_norm (`float`):
            Norm of the gradient of an optimizer step, before clipping.
        advantage_range (`float`):
            max A − min A over the rollout.
    """
    return gradient_norm / (advantage_range / 2) if advantage_range > 0 else math.nan


@torch.no_grad()
def drive_diagnostics(
    omega: Tensor,
    drive: Tensor,
    target: Tensor,
    *,
    chemical_potential: Tensor,
    mu: float | Tensor,
    temperature: float | Tensor,
    num_generations: int,
    valid: Tensor | None = None,
) -> dict[str, Tensor]:
    r"""
    What there is to know of a rollout before any update: escort weights, projection, target.

    Args:
        omega (`torch.Tensor`), drive (`torch.Tensor`), target (`torch.Tensor`):
            omega, g and v\*, shape `[N]` each, in groups.
        chemical_potential (`torch.Tensor`):
            lambda\*, shape `[N // G]`.
        mu (`float` or `torch.Tensor`), temperature (`float` or `torch.Tensor`):
            The values used.
        num_generations (`int`):
            Group size G.
        valid (`torch.Tensor`, *optional*):
            Bool mask of the rows that take part, shape `[N]`.

    Returns:
        `dict[str, torch.Tensor]`: scalars `escort/{min,max,ess}` (`ess`: mean over groups of (Σω)² / Σω², between 1
        and G), `escort/chemical_potential`, `temperature`, `mu`, `positivity_margin` (1 + min v\*),
        `frac_target_clipped` (rows whose target positivity moved) and `frac_zero_drive` (rows without first-order
        signal). NaN where no row is valid.
    """
    keep = _valid_or_all(omega, valid)
    alive = _grouped(keep, num_generations).any(dim=1)
    weights = _grouped(torch.where(keep, omega, 0.0), num_generations)
    ess = weights.sum(dim=1).square() / weights.square().sum(dim=1).clamp(min=torch.finfo(weights.dtype).tiny)
    # The projection of an admissible target is that target up to rounding: such a row has not moved.
    moved = ~torch.isclose(target, drive / mu, rtol=1e-5, atol=1e-6)
    return {
        "escort/min": _extreme(omega[keep], torch.min),
        "escort/max": _extreme(omega[keep], torch.max),
        "escort/ess": ess[alive].mean(),
        "escort/chemical_potential": chemical_potential[alive].mean(),
        "temperature": torch.as_tensor(temperature, dtype=omega.dtype),
        "mu": torch.as_tensor(mu, dtype=omega.dtype),
        "positivity_margin": 1 + _extreme(target[keep], torch.min),
        "frac_target_clipped": moved[keep].to(omega.dtype).mean(),
        "frac_zero_drive": (drive == 0)[keep].to(omega.dtype).mean(),
    }


def _extreme(x: Tensor, reduce) -> Tensor:
    return reduce(x) if x.numel() else x.new_tensor(torch.nan)


@torch.no_grad()
def diagnostics(
    log_ratio: Tensor,
    target: Tensor,
    *,
    mu: float | Tensor,
    ratio_form: RatioForm = "log",
    weights: Tensor | None = None,
    clamped: Tensor | None = None,
) -> dict[str, Tensor]:
    r"""
    What there is to know of one optimizer step: how far the policy has moved, and the two terms of the loss.

    Together with [`drive_diagnostics`] these are the metrics that the trainer logs under `opo/`. Rows of weight 0 are
    left out of all but `frac_masked`, `work` and `dissipation`.

    Args:
        log_ratio (`torch.Tensor`), target (`torch.Tensor`), mu, ratio_form, weights:
            As in [`opo_loss`], for all rows of the optimizer step.
        clamped (`torch.Tensor`, *optional*):
            Bool mask of the rows whose log-ratio was clamped, shape `[B]`.

    Returns:
        `dict[str, torch.Tensor]`: scalars `chi2` (mean v², with v = exp(Delta) − 1), `tv_bound` (½ √chi2, an upper
        bound of the total variation), `conservation_residual` (mean v), `log_ratio/{mean,absmax}`,
        `approximation_gap` (mean |v − Delta|), `frac_clamped`, `frac_masked`, `work` and `dissipation` (means over all
        rows). 0 where no row takes part.
    """
    work, dissipation = _loss_terms(log_ratio, target, mu=mu, ratio_form=ratio_form, weights=weights)
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
        "work": work.mean(),
        "dissipation": dissipation.mean(),
    }
