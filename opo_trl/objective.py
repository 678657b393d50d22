r"""
Orthogonalized Policy Optimization (OPO): the paper, as pure functions on tensors.

For a prompt, let the group be its G completions sampled from the behaviour policy `pi_k` (the paper's anchor), so that
the expectation under `pi_k` is the mean over the group. With the fluctuation `v = pi / pi_k - 1` and the log-ratio
`Delta = log pi - log pi_k`:

    omega  = rho_alpha / pi_k,  rho_alpha ∝ pi_k^alpha · P*^(1 - alpha),  P* ∝ exp(A / tau)    (escort_weights)
    g      = omega - E[omega]                       the projection onto H0 = {v : E[v] = 0}    (project)
    v*     = g / mu                                 made admissible, 1 + v* >= 0               (admissible_target)
    loss   = -mu · v* · u + mu/2 · u²,              u = Delta or u = exp(Delta) - 1            (opo_loss)

Completing the square, the loss is `mu/2 · (u - v*)²` up to a constant: a regression of u on the projected target with
the constant Hessian mu. `alpha` enters only through omega, `mu` only from v* on. The centred escort weight g is the
paper's drive, the χ² coefficient mu its stiffness.

A rollout has N samples (completions) in N // G groups of consecutive rows, a batch B samples of T completion tokens.
Several functions share these parameters:

- `num_generations` (`int`): group size G. `ValueError` if N is not a multiple of it.
- `valid` (`torch.Tensor`, *optional*): bool mask `[N]` of the samples that take part; `None` means all. Invalid rows
  have no effect, even if they contain NaN or inf; they get zero weight, drive and target.
- `logps`, `anchor_logps`, `reference_logps` (`torch.Tensor`): log-probability of each token, `[B, T]`, under the
  current policy (carries the gradient), the behaviour policy and a reference policy.
- `mask` (`torch.Tensor`): `[B, T]`, non-zero for tokens that count. Others have no effect, even if NaN or inf.

Omega, drive and target carry no gradient. This module depends only on torch.
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
    """Half precision has too few digits for a softmax or a sum of log-probabilities."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def grouped(x: Tensor, num_generations: int) -> Tensor:
    """Reshape `[N]` to `[N // G, G]`. Raises `ValueError` if N is not a multiple of G = `num_generations`."""
    if num_generations < 1 or x.dim() != 1 or x.numel() % num_generations != 0:
        raise ValueError(
            f"Expected a 1-D tensor of complete groups of num_generations={num_generations} rows, got shape "
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

    The log-weight is `(1 - alpha) · (A / temperature - c)` with the correction c for the behaviour policy, and
    `omega = G · softmax(log-weight)` over the group: the mean over the valid rows is exactly the paper's
    `E[omega] = 1`.

    Args:
        advantages (`torch.Tensor`): A, `[N]`.
        alpha (`float`): escort exponent in `[0, 1]`: 1 gives the behaviour policy (omega = 1), 0 gives P\*.
        temperature (`float` or `torch.Tensor`, *optional*, defaults to `1.0`): tau of P\* ∝ exp(A / tau), positive.
        anchor_logps (`torch.Tensor`, *optional*): correction c, the log-probability of each completion under the
            behaviour policy, `[N]`. `None` means c = 0, as for P\* ∝ pi_k · exp(A / tau).

    Returns:
        `torch.Tensor`: omega, `[N]`, non-negative; exactly 1 on the valid rows of a group of equal log-weights.
    """
    log_weights = _at_least_float32(advantages) / temperature
    if anchor_logps is not None:
        log_weights = log_weights - anchor_logps.to(log_weights.dtype)
    keep = grouped(_valid_or_all(advantages, valid), num_generations)
    # Masked first, so that an invalid row cannot turn the maximum or sum of its group into NaN.
    log_weights = grouped((1 - alpha) * log_weights, num_generations).masked_fill(~keep, -torch.inf)
    weights = (log_weights - log_weights.amax(dim=1, keepdim=True)).exp()
    return torch.where(keep, weights / _group_mean(weights, keep), 0.0).flatten()


@torch.no_grad()
def project(
    omega: Tensor, *, num_generations: int, scaling: DriveScaling = "none", valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """
    Projection onto H0, the fluctuations of zero mean (Theorem 3.4): `g = omega - lambda*`, `lambda* = E[omega]`.

    Args:
        omega (`torch.Tensor`): escort weights, `[N]`.
        scaling (`str`, *optional*, defaults to `"none"`): `"group"` or `"batch"` divides g by its unbiased standard
            deviation over the group or over all rows (the paper's "z-scoring"); the result is 0 where that is 0.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: the drive g, `[N]`, 0 on invalid rows and exactly 0 in a group of equal
        weights; the chemical potential lambda*, `[N // G]`, 0 for a group without a valid row.
    """
    keep = grouped(_valid_or_all(omega, valid), num_generations)
    weights = torch.where(keep, grouped(_at_least_float32(omega), num_generations), 0.0)
    chemical_potential = _group_mean(weights, keep)
    low = weights.masked_fill(~keep, torch.inf).amin(dim=1, keepdim=True)
    high = weights.masked_fill(~keep, -torch.inf).amax(dim=1, keepdim=True)
    # Equal weights less their mean may leave a rounding error, which scaling would blow up to order 1.
    drive = torch.where(keep & (high > low), weights - chemical_potential, 0.0)
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
    χ² coefficient for which the target has the given χ² radius: `mean((g / mu)²) = radius`, so
    `mu = sqrt(mean(g²) / radius)` (Proposition 6.3, the trust-region duality, with `E[omega]` projected out).

    Args:
        drive (`torch.Tensor`): g, `[N]`.
        radius (`float`): `E[v²]`, positive.

    Returns:
        `torch.Tensor`: mu, a positive scalar; the smallest positive number of its type if g is 0 everywhere.
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
        drive (`torch.Tensor`): g, `[N]`.
        mu (`float` or `torch.Tensor`): χ² coefficient, positive.
        positivity (`str`, *optional*, defaults to `"none"`):
            - `"none"`: v\* as it is.
            - `"stiffen"`: raise mu to the smallest value for which v\* ≥ −1 on every row.
            - `"clip"`: v\* ← max(v\*, −1 + epsilon), which gives up `E[v*] = 0`.
            - `"project"`: Euclidean projection of 1 + v\* on the simplex {t ≥ 0, mean(t) = 1} of each group, which
              keeps `E[v*] = 0`.
        epsilon (`float`, *optional*, defaults to `1e-3`): margin of `"clip"`, in `(0, 1)`.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: v\*, `[N]`, 0 on invalid rows; the mu used, a scalar.
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
        target = _project_on_simplex(grouped(target, num_generations), grouped(keep, num_generations)).flatten()
    elif positivity not in ("none", "stiffen"):
        raise ValueError(f"positivity={positivity!r} is unknown. Use 'none', 'stiffen', 'clip' or 'project'.")
    return target, mu


def _project_on_simplex(target: Tensor, keep: Tensor) -> Tensor:
    """
    Project each row of 1 + `target` on {t ≥ 0, mean(t) = 1} over its kept entries, and subtract 1 again.

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

    The paper only says "adaptive τ with range [0.2, 1.5]"; the schedule is that of the author's public code
    (`wk222/verlm`), with the entropy of the behaviour policy in both places so that the temperature is fixed for the
    rollout.

    Args:
        base (`float` or `torch.Tensor`): temperature τ₀ at H = 0 and r = 0, positive.
        anchor_entropy (`float` or `torch.Tensor`): H of [`entropy_proxy`]; clipped to `[0, 1]`.
        success (`float` or `torch.Tensor`): r of [`scaled_success`], in `[-1, 1]`.
        low (`float`), high (`float`): range of the temperature, `0 < low <= high`.
        entropy_gain (`float`, *optional*, defaults to `0.2`), success_gain (`float`, *optional*, defaults to `0.5`):
            a and b.

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
    Entropy H of the behaviour policy for [`adaptive_temperature`]: mean of `-log pi_k(y) / |y|` over `log |V|`.

    `mean_logps` are `log pi_k(y) / |y|`, `[N]`, and `vocab_size` is |V|, at least 2. Returns a scalar in `[0, 1]`, 0
    if no row is valid.
    """
    keep = _valid_or_all(mean_logps, valid)
    mean = torch.where(keep, -_at_least_float32(mean_logps), 0.0).sum() / keep.sum().clamp(min=1)
    return (mean / math.log(vocab_size)).clamp(0, 1)


@torch.no_grad()
def scaled_success(rewards: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """
    Success r of a rollout for [`adaptive_temperature`]: mean of the `rewards`, `[N]`, min–max scaled to `[-1, 1]`.

    Returns a scalar; 0 if all rewards are equal, which says nothing about success.
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
        reduction (`str`, *optional*, defaults to `"sum"`): `"sum"` is the log-ratio of the whole completion, for
            which `mean(v²)` is the χ² divergence of the policy; `"mean"` divides it by the completion's length.
        clamp (`float`, *optional*): bound on |Delta| after the reduction. A clamped row has no gradient.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Delta, `[B]`, 0 for a fully masked completion; bool mask of the clamped
        rows, `[B]`.
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
        log_ratio (`torch.Tensor`): Delta, `[B]`; carries the gradient.
        target (`torch.Tensor`): v\*, `[B]`.
        mu (`float` or `torch.Tensor`): χ² coefficient, positive.
        ratio_form (`str`, *optional*, defaults to `"log"`): `"log"`: u = Delta, the paper's surrogate; `"exact"`:
            u = v = exp(Delta) − 1.
        weights (`torch.Tensor`, *optional*): importance weights w of the sampler, `[B]`, without gradient. A row of
            weight 0 has exactly zero loss and gradient, even if it contains NaN or inf.

    Returns:
        `torch.Tensor`: loss of each row, `[B]`, to be averaged over the samples of the optimizer step.
    """
    work, dissipation = loss_terms(log_ratio, target, mu=mu, ratio_form=ratio_form, weights=weights)
    return work + dissipation


def loss_terms(
    log_ratio: Tensor, target: Tensor, *, mu: float | Tensor, ratio_form: RatioForm, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The two terms of [`opo_loss`], `−w · mu · v* · u` (work) and `w · mu/2 · u²` (dissipation), `[B]` each."""
    if ratio_form not in ("log", "exact"):
        raise ValueError(f"ratio_form={ratio_form!r} is unknown. Use 'log' or 'exact'.")
    if weights is None:
        weights = torch.ones_like(log_ratio)
    keep = weights != 0
    log_ratio = torch.where(keep, log_ratio, 0.0)
    target = torch.where(keep, target, 0.0).to(log_ratio.dtype)
    u = torch.expm1(log_ratio) if ratio_form == "exact" else log_ratio
    weights = weights.to(log_ratio.dtype)
    return -weights * mu * target * u, weights * mu / 2 * u.square()


def sequence_weights(ratio: Tensor, mask: Tensor) -> Tensor:
    """
    Importance weight w of each sequence, `[B]`, from TRL's importance sampling `ratio`: `[B, 1]` in its sequence-level
    modes is taken as it is, `[B, T]` in its token-level modes is averaged over the tokens.
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
    Estimate of each completion's KL divergence to a reference policy, as in TRL's `beta` term.

    Args:
        reduction (`str`, *optional*, defaults to `"sum"`): `"sum"` or `"mean"` over the tokens. Use the
            log-ratio's, so that `beta` weighs both terms alike.
        anchor_logps (`torch.Tensor`, *optional*): if given, each token's term is multiplied by its ratio to the
            behaviour policy (`use_bias_correction_kl`), which makes the gradient unbiased.

    Returns:
        `torch.Tensor`: KL estimate, `[B]`, in nats (per token for `"mean"`).
    """
    keep = mask.to(torch.bool)
    difference = torch.where(keep, reference_logps - logps, 0.0)
    per_token = torch.expm1(difference) - difference
    if anchor_logps is not None:
        per_token = per_token * torch.where(keep, logps - anchor_logps, 0.0).exp()
    return _over_tokens(per_token, mask, reduction)
