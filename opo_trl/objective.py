r"""
The targets of completions, and the loss that moves the policy there: tensors only, without a trainer.

Orthogonalized Policy Optimization (OPO): for a prompt, let the group be its G completions sampled from the behaviour
policy `pi_k` (the paper's anchor), so that the expectation under `pi_k` is the mean over the group. With the
fluctuation `v = pi / pi_k - 1` and the log-ratio `Delta = log pi - log pi_k`:

    omega  = rho_alpha / pi_k,  rho_alpha ∝ pi_k^alpha · P*^(1 - alpha),  P* ∝ exp(A / tau)    (escort_weights)
    g      = omega - E[omega]                       the projection onto H0 = {v : E[v] = 0}    (project)
    v*     = g / mu                                 made admissible, 1 + v* >= 0, if asked for  (admissible_target)
    loss   = w · (-mu · v* + mu · (w - 1)) · Delta, w = min(pi / pi_k, 2) without gradient     (loss_terms)

As long as `pi / pi_k <= 2`, this has the gradient of `-E_pi[g] + mu/2 · χ²(pi ‖ pi_k)`, the paper's equation 14, whose
optimum is v = v* if it is admissible; the bound keeps the variance finite (`docs/theory.md`). `alpha` enters only
through omega, `mu` only from v* on. The centred escort weight g is the paper's drive, the χ² coefficient mu its
stiffness.

The paper's surrogate and its exact form are the other two values of `ratio_form`:

    loss   = w · (-mu · v* · u + mu/2 · u²),        u = Delta or u = exp(Delta) - 1

Here w is 1, except where completions are reused or stale (`OPO.weights`). Completing the square, this is `w · mu/2 ·
(u - v*)²` up to a constant: a regression of u on the projected target with the constant Hessian mu.

[`OPO`] puts these together. Another [`Objective`] overrides a method or two (`docs/subclassing.md`).

A rollout has N samples (completions) in N // G groups of consecutive rows, a batch B samples of T completion tokens.
Several functions share these parameters:

- `num_generations` (`int`): group size G. `ValueError` if N is not a multiple of it.
- `valid` (`torch.Tensor`, *optional*): bool mask `[N]` of the samples that take part; `None` means all. Invalid rows
  have no effect, even if they contain NaN or inf; they get zero weight, drive and target.
- `mask` (`torch.Tensor`): `[B, T]`, non-zero for tokens that count. Others have no effect, even if NaN or inf.

Omega, drive and target carry no gradient. This module depends only on torch.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor


DriveScaling = Literal["none", "group", "batch"]
Positivity = Literal["none", "stiffen", "clip", "project"]
RatioForm = Literal["truncated", "log", "exact"]
Reduction = Literal["sum", "mean"]

# Bound on the ratio π/π_k as a weight (docs/theory.md: its bias and variance).
MAX_WEIGHT = 2.0
# Bound on the log-ratio of whole completions, which keeps the square of its exponential finite.
SEQUENCE_CLAMP = 20.0


def _at_least_float32(x: Tensor) -> Tensor:
    """Half precision has too few digits for a softmax or a sum of log-probabilities."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def grouped(x: Tensor, num_generations: int) -> Tensor:
    """Reshape `[N]` to `[N // G, G]`. Raises `ValueError` if N is not a multiple of G = `num_generations`."""
    if num_generations < 1 or x.dim() != 1 or x.numel() % num_generations != 0:
        raise ValueError(
            f"Expected a 1-D tensor of complete groups of {num_generations=} rows, got shape {tuple(x.shape)}. "
            "Pass the rows of complete groups, group after group."
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

    The log-weight of a sample is `(1 - alpha) · (A / temperature - c)`: `alpha` in `[0, 1]` is the escort exponent, 1
    for the behaviour policy (omega = 1) and 0 for P\* ∝ exp(A / tau); c is `anchor_logps`, the log-probability of the
    completion under the behaviour policy, or 0, as for P\* ∝ pi_k · exp(A / tau). `omega = G · softmax(log-weight)`
    over the group, `[N]`: the mean over the valid rows is exactly the paper's `E[omega] = 1`.
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

    `scaling="group"` or `"batch"` divides g by its unbiased standard deviation over the group or over all rows (the
    paper's "z-scoring"); the result is 0 where that is 0.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: the drive g, `[N]`, exactly 0 in a group of equal weights; the chemical
        potential lambda*, `[N // G]`, 0 for a group without a valid row.
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

    `radius` is `E[v²]`, positive. A scalar; the smallest positive number of its type if g is 0 everywhere.
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
    mu ≥ −min g, that is mu ≥ 1 − min omega for an unscaled drive. `positivity` keeps it:

    - `"none"`: v\* as it is.
    - `"stiffen"`: raise mu to the smallest value for which v\* ≥ −1 on every row.
    - `"clip"`: v\* ← max(v\*, −1 + epsilon), which gives up `E[v*] = 0`; epsilon is in `(0, 1)`.
    - `"project"`: Euclidean projection of 1 + v\* on the simplex {t ≥ 0, mean(t) = 1} of each group, which keeps
      `E[v*] = 0`.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: v\*, `[N]`; the mu used, a positive scalar.
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
    count = keep.sum(dim=1, keepdim=True)  # n
    entries = target.masked_fill(~keep, -torch.inf)
    # A constant added to a row does not change its projection. With a maximum of 0, the sums keep their digits.
    entries = entries - entries.amax(dim=1, keepdim=True)
    descending = entries.sort(dim=1, descending=True).values
    rank = torch.arange(1, target.shape[1] + 1, device=target.device, dtype=target.dtype)
    sums_of_largest = descending.masked_fill(descending == -torch.inf, 0.0).cumsum(dim=1)
    threshold = (sums_of_largest - count) / rank
    # The largest entry always exceeds its threshold in exact arithmetic; clamp covers empty groups.
    support = (descending > threshold).sum(dim=1, keepdim=True).clamp(min=1)
    projected = (entries - threshold.gather(1, support - 1)).clamp(min=0)
    return torch.where(keep, projected - 1, 0.0)


def token_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of `x` (`[B, T]`) over the tokens of each completion, `[B]`."""
    return torch.where(mask.to(torch.bool), x, 0.0).sum(dim=-1)


def token_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of `x` (`[B, T]`) over the tokens of each completion, `[B]`; 0 for a fully masked completion."""
    return token_sum(x, mask) / mask.to(torch.bool).sum(dim=-1).clamp(min=1)


def opo_loss(log_ratio: Tensor, target: Tensor, **options: Any) -> Tensor:
    """OPO loss of each completion, `[B]`, to be averaged over an optimizer step: the sum of its [`loss_terms`]."""
    work, dissipation = loss_terms(log_ratio, target, **options)
    return work + dissipation


def loss_terms(
    log_ratio: Tensor,
    target: Tensor,
    *,
    mu: float | Tensor,
    ratio_form: RatioForm = "truncated",
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""
    The two terms of OPO's loss: the push towards the target (the paper's work) and the pull back to the behaviour
    policy (its dissipation), `[B]` each.

    With u the [`coordinate`] and `weights` w, 1 by default: `−w · mu · v* · u` and `w · mu/2 · u²`, equations 14 and
    18 of the paper. In the truncated form, with b = min(exp(Delta), 2) without gradient: `−w · b · mu · v* · Delta`
    and `w · b · mu · (b − 1) · Delta`, whose gradients are those of the exact form where exp(Delta) < 2.

    `log_ratio` Delta carries the gradient; `target` is v\*, `[B]` each. A row of weight 0 has exactly zero loss and
    gradient, even if it contains NaN or inf.
    """
    if weights is None:
        weights = torch.ones_like(log_ratio)
    keep = weights != 0
    log_ratio = torch.where(keep, log_ratio, 0.0)
    target = torch.where(keep, target, 0.0).to(log_ratio.dtype)
    u, weights = coordinate(log_ratio, ratio_form), weights.to(log_ratio.dtype)
    if ratio_form == "truncated":
        u = u.detach()
        weighted = weights * (1 + u) * mu * log_ratio
        return -weighted * target, weighted * u
    push = -weights * mu * target * u
    return push, weights * mu / 2 * u.square()


def coordinate(log_ratio: Tensor, ratio_form: RatioForm) -> Tensor:
    """
    What is to be at the target: Delta (`"log"`), exp(Delta) − 1 (`"exact"`) or min(exp(Delta), 2) − 1 (`"truncated"`);
    `[B]`. `ValueError` for another form.
    """
    if ratio_form not in ("truncated", "log", "exact"):
        raise ValueError(f"ratio_form={ratio_form!r} is unknown. Use 'truncated', 'log' or 'exact'.")
    if ratio_form == "log":
        return log_ratio
    return torch.expm1(log_ratio if ratio_form == "exact" else log_ratio.clamp(max=math.log(MAX_WEIGHT)))


@dataclass(frozen=True)
class Groups:
    """Complete groups of completions, from which targets are computed: all of a rollout, or one group; `[N]` each."""

    advantages: Tensor
    rewards: Tensor  # weighted sums over the reward functions
    valid: Tensor  # whether a sample takes part
    num_generations: int
    logps: Tensor | None = None  # under the behaviour policy; only if `reads_logps`, like the next two
    mean_logps: Tensor | None = None  # per token
    vocab_size: int = 0
    has_rewards: bool = True  # a rollout that an override made from scratch may have none; they count as 0

    @property
    def rows(self) -> dict[str, Any]:
        """Parameters of the functions above."""
        return {"num_generations": self.num_generations, "valid": self.valid}


@dataclass(frozen=True)
class Targets:
    """Targets of samples, `[N]` each, without gradient; 0 on invalid samples."""

    drive: Tensor  # g
    target: Tensor  # v*
    mu: Tensor  # a scalar
    omega: Tensor | None = None  # if g is computed from it, like the next
    temperature: Tensor | None = None


@dataclass(frozen=True)
class Samples:
    """B completions of a micro-batch: tensors `[B]`, or `[B, T]` with a value for each token."""

    logps: Tensor  # log-probability of each token under the policy; carries the gradient
    anchor_logps: Tensor  # log-probability of each token under the behaviour policy
    mask: Tensor  # whether each token counts
    target: Tensor
    mu: Tensor
    weights: Tensor  # importance weights of the sampler; 0 for excluded samples
    age: Tensor  # age of the behaviour policy in optimizer steps
    reused: bool  # whether several passes train on completions, or another policy has written them
    steering: Tensor | None = None  # whether each token has a ratio (`top_entropy_quantile`); `None`: all have
    sampler_ratios: Tensor | None = None  # π_k/π_sampler of each token, or `[B, 1]` of completions; `None`: 1

    @classmethod
    def of(cls, logps: Tensor, anchor_logps: Tensor, mask: Tensor, target: Tensor, mu: Tensor) -> "Samples":
        """Samples of weight 1 and age 0, as those of a loop without a trainer; `mu` may be a scalar."""
        ones, zeros = torch.ones_like(target), torch.zeros_like(target)
        return cls(logps, anchor_logps, mask, target, mu, weights=ones, age=zeros, reused=True)

    @cached_property
    def token_log_ratios(self) -> Tensor:
        """Log-ratio of each token; 0 for those that do not count."""
        return torch.where(self.mask, _at_least_float32(self.logps) - _at_least_float32(self.anchor_logps), 0.0)

    @cached_property
    def log_ratios(self) -> Tensor:
        """Log-ratio of each token; 0 for those that do not count, and for those that have no ratio."""
        return self.token_log_ratios if self.steering is None else self.token_log_ratios.where(self.steering, 0.0)

    @cached_property
    def moved(self) -> Tensor:
        """Log-ratio of each whole completion, without gradient."""
        return self.sum(_at_least_float32(self.logps.detach()) - _at_least_float32(self.anchor_logps))

    @property
    def length(self) -> Tensor:
        """Number of tokens of each completion, at least 1."""
        return self.mask.sum(dim=-1).clamp(min=1)

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the tokens of each completion."""
        return token_sum(x, self.mask)

    def spread(self, x: Tensor) -> Tensor:
        """A value of each completion, for each of its tokens."""
        return x.unsqueeze(1)

    def kl(self, reference_logps: Tensor, ratio: Tensor | None = None) -> Tensor:
        """
        Estimate of the KL divergence to a reference policy in nats, as in TRL's `beta` term, `[B]`. Multiplied by the
        `ratio` to the behaviour policy, each token's term has an unbiased gradient.
        """
        logps = _at_least_float32(self.logps)
        difference = torch.where(self.mask, _at_least_float32(reference_logps) - logps, 0.0)
        terms = torch.expm1(difference) - difference
        return self.sum(terms if ratio is None else terms * ratio)


@dataclass(frozen=True)
class Loss:
    """Loss of each sample and its parts; `[B]` each."""

    work: Tensor  # the push towards the target
    dissipation: Tensor  # the pull back to the behaviour policy
    log_ratio: Tensor
    clamped: Tensor  # whether the log-ratio is at its bound
    weights: Tensor  # 0 for excluded samples
    clipped_low: Tensor | None = None  # share of its tokens below the range of the ratio, if it has one
    clipped_high: Tensor | None = None  # above

    def total(self, rests: Tensor) -> Tensor:
        """`work + dissipation`; 0, with a gradient of exactly 0, for samples that rest (bool `[B]`)."""
        return torch.where(rests, 0.0, self.work + self.dissipation)


class Objective:
    """
    Targets and loss of completions, for [`OPOTrainer`] or a loop of your own (`docs/objectives.md`).

    The targets here are the advantages; subclasses define `terms`. `args` is the configuration, whose fields are read
    when they are used.

    A public attribute of a subclass with a type and a value, such as `clip: float = 0.4`, is an option: a recipe sets
    it by `objective_options: {clip: 0.2}`. `self.clip` then has that value.
    """

    # Names of fields of `OPOConfig` that this objective reads, and not every objective. Options of its own are not
    # listed here: they are attributes.
    fields: frozenset[str] = frozenset()
    is_regression = False  # whether the loss has a χ² term, and no force where the coordinate is at the target
    reads_logps = False  # whether targets need `Groups.logps`
    scales_by_pass = False  # whether `scale` is that of all completions of a pass, not of the rollout they are from

    def __init__(self, args: Any):
        self.args = args
        for name, value in self.options.items():
            setattr(self, name, value)

    @property
    def options(self) -> dict[str, Any]:
        """Values of its options, as the configuration has them."""
        return getattr(self.args, "objective_options", None) or {}

    @property
    def fields_off(self) -> dict[str, str]:
        """Fields that have no effect by the value of another field → that field."""
        return {}

    @property
    def ratio_form(self) -> RatioForm:
        """Form of a χ² term."""
        return self.args.ratio_form

    @property
    def clips(self) -> str | None:
        """Whether the ratio of each `"token"` or `"sequence"` is clipped, for the log."""
        return None

    @property
    def log_ratio_reduction(self) -> Reduction:
        """Whether the log-ratio is that of a completion, or its mean over tokens."""
        return self.args.log_ratio_reduction

    @property
    def reduction(self) -> str:
        """How a completion's loss depends on its length: a `"sum"` over tokens is divided by the mean length."""
        return self.log_ratio_reduction

    def describe_objective(self) -> str:
        """Line of a run's plan: the objective's name, its options, and the fields that it reads, without those off."""
        values = dict(self.options)
        for name in sorted({*self.fields, "beta"}):
            values[name] = getattr(self.args, name, None)
        parts = [type(self).__name__]
        for name, value in values.items():
            is_off = value in (None, "none") or value is False
            if not is_off:
                parts.append(f"{name} = {value}")
        return ", ".join(parts)

    def targets(self, groups: Groups) -> Targets:
        """Targets of N samples in complete groups, `[N]`: once per rollout, or when a group is scored."""
        drive = torch.where(groups.valid, groups.advantages, 0.0)
        return Targets(drive, drive, drive.new_ones(()))

    def weights(self, samples: Samples) -> Tensor:
        """Weight of each sample in the loss, `[B]`, without gradient; 0 excludes it."""
        return samples.weights

    def terms(self, log_ratio: Tensor, weights: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        """
        Loss of each sample, `[B]`, as two terms: push and pull-back. `log_ratio`, of the sample, carries the gradient;
        `weights` are those of [`~Objective.weights`].
        """
        raise NotImplementedError

    def loss(self, samples: Samples) -> Loss:
        """Loss of each sample of a micro-batch, `[B]`, from its log-ratio, bounded in value by `log_ratio_clamp`."""
        bound = self.args.log_ratio_clamp
        log_ratio = self.reduce(samples.sum(samples.log_ratios), samples)
        weights = self.weights(samples)
        clamped = log_ratio.detach().abs() > bound
        # Bounded in value, so that no exponential overflows, but not in gradient, which only the form of the loss may
        # bound. An infinite log-ratio becomes the bound, without gradient; NaN stays.
        bounded = log_ratio.detach().clamp(-bound, bound)
        log_ratio = torch.where(log_ratio.isinf(), bounded, bounded + (log_ratio - log_ratio.detach()))
        return Loss(*self.terms(log_ratio, weights, samples), log_ratio, clamped, weights)

    def reduce(self, total: Tensor, samples: Samples) -> Tensor:
        """Sums over tokens, `[B]`, as they are, or as means over tokens under `log_ratio_reduction: mean`."""
        return total if self.log_ratio_reduction == "sum" else total / samples.length

    def kl(self, reference_logps: Tensor, samples: Samples, *, corrected: bool) -> Tensor:
        """Estimate of the KL divergence of each sample to a reference policy, in nats, `[B]`."""
        return samples.kl(reference_logps, samples.token_log_ratios.exp() if corrected else None)

    def scale(self, length: Tensor, valid: Tensor) -> Tensor:
        """
        Factor of all losses of a rollout, from the number of tokens of its completions, `[N]`. The log-ratio of a
        completion is a sum over its tokens, and so is its gradient: a constant of the rollout makes the norm
        comparable with that of GRPO, whose loss is a mean over tokens.
        """
        if self.reduction == "sum" and valid.any():
            return 1 / length[valid].mean()
        return torch.tensor(1.0)

    def zero_gradient(self, target: Tensor, mu: Tensor, mask: Tensor, *, moved: bool = False) -> Tensor:
        """
        Which samples have no gradient, bool `[B]`: as long as the policy is the behaviour policy or, if it has
        `moved`, wherever it is. The loss itself says so, at equal log-probabilities or at several log-ratios of either
        sign. `mask` are the tokens that count, `[B, T]`.
        """
        rests = torch.ones_like(target, dtype=torch.bool)
        length = mask.sum(dim=1, keepdim=True).clamp(min=1)
        # The log-ratio of each token. Some losses bound that of a token, others that of a completion.
        distances = (1.0, 0.1, 0.01 / length)
        log_ratios: list[Tensor | float] = [0.0]
        if moved:
            log_ratios = [sign * distance for distance in distances for sign in (1, -1)]
        for log_ratio in log_ratios:
            gradient = self._gradient_at(log_ratio, target, mu, mask)
            rests = rests & (gradient == 0).all(dim=1)
        return rests

    @torch.enable_grad()
    def _gradient_at(self, log_ratio: Tensor | float, target: Tensor, mu: Tensor, mask: Tensor) -> Tensor:
        """Gradient of the loss in the log-probabilities of tokens, `[B, T]`, whose log-ratios have this value."""
        # At other values than 0, where a term of log-probabilities may have no gradient by chance.
        logps = torch.full(mask.shape, -1.0, dtype=target.dtype, device=target.device, requires_grad=True)
        loss = self.loss(Samples.of(logps, logps.detach() - log_ratio, mask, target, mu))
        total = (loss.work + loss.dissipation).sum()
        (gradient,) = torch.autograd.grad(total, logps, allow_unused=True, materialize_grads=True)
        return gradient


class OPO(Objective):
    """The paper's objective, as at the top of this module."""

    fields = frozenset(
        {
            *("adaptive_temperature", "temperature_range", "anchor_correction", "drive_scaling"),
            *("mu", "chi2_radius", "positivity", "positivity_epsilon", "ratio_form"),
            *("alpha", "escort_temperature", "log_ratio_reduction", "log_ratio_clamp"),
        }
    )
    is_regression = True

    @property
    def reads_logps(self) -> bool:  # type: ignore[override]
        return self.args.anchor_correction != "absorbed" or self.args.adaptive_temperature

    def targets(self, groups: Groups) -> Targets:
        """Targets of complete groups, from escort weights and μ."""
        args = self.args
        temperature = self.temperature(groups)
        # Log-probabilities of completions under the behaviour policy that enter the escort weights; `None`: none
        corrections = {"absorbed": None, "length_normalized": groups.mean_logps, "sequence": groups.logps}
        anchor = corrections[args.anchor_correction]
        omega = escort_weights(
            groups.advantages, alpha=args.alpha, temperature=temperature, anchor_logps=anchor, **groups.rows
        )
        drive, _ = self.drive(omega, groups)
        # Of `mu` and `chi2_radius`, a configuration has one.
        mu = stiffness_for_radius(drive, args.chi2_radius, valid=groups.valid) if args.mu is None else args.mu
        target, mu = self.target(drive, mu, groups)
        return Targets(drive, target, mu, omega, torch.as_tensor(temperature, dtype=omega.dtype))

    def temperature(self, groups: Groups) -> float | Tensor:
        r"""
        Temperature of P\*; adaptive: `clip(tau · (1 + 0.2·H − 0.5·(1 − H)·r), low, high)`.

        A confident (H small) and successful (r near 1) policy gets sharper escort weights. H is the mean of `−log
        pi_k(y) / |y|` over `log |V|`, clipped to `[0, 1]`; r the mean reward, min–max scaled to `[-1, 1]`, 0 if all
        are equal. The paper only says "adaptive τ with range [0.2, 1.5]"; the schedule is that of the author's public
        code (`wk222/verlm`), with the entropy of the behaviour policy in both places, so that it is fixed per rollout.
        """
        args, valid = self.args, groups.valid
        if not args.adaptive_temperature:
            return args.escort_temperature
        surprise = torch.where(valid, -groups.mean_logps, 0.0).sum() / valid.sum().clamp(min=1)
        entropy = (surprise / math.log(groups.vocab_size)).clamp(0, 1)
        success = torch.zeros_like(entropy)
        rewards = groups.rewards[valid]
        if len(rewards) and rewards.max() > rewards.min():
            lowest, highest = rewards.min(), rewards.max()
            above_lowest = rewards.mean() - lowest
            scaled = 2 * above_lowest / (highest - lowest) - 1
            success = scaled.clamp(-1, 1)  # the mean may round to outside its range
        factor = 1 + 0.2 * entropy - 0.5 * (1 - entropy) * success
        return (args.escort_temperature * factor).clamp(*args.temperature_range)

    def drive(self, omega: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
        """Drive, `[N]`, and chemical potential, `[N // G]`, of the escort weights."""
        return project(omega, scaling=self.args.drive_scaling, **groups.rows)

    def target(self, drive: Tensor, mu: float | Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
        """Target, `[N]`, and the χ² coefficient used."""
        options = {"positivity": self.args.positivity, "epsilon": self.args.positivity_epsilon}
        return admissible_target(drive, mu=mu, **options, **groups.rows)

    def weights(self, samples: Samples) -> Tensor:
        """
        The sampler's weights. In the paper's two forms, which have no ratio of their own, times min(pi / pi_k, 2)
        where completions are reused or stale: one that the policy has made unlikely has almost no gradient. The weight
        stays above 0, which would exclude the sample.
        """
        if not samples.reused or self.ratio_form == "truncated":
            return samples.weights
        # Without gradient. The first bound keeps the exponential finite, the second is 2.
        log_ratio = self.reduce(samples.moved, samples).clamp(-SEQUENCE_CLAMP, SEQUENCE_CLAMP)
        ratio = log_ratio.exp().clamp(max=MAX_WEIGHT)
        return torch.where(samples.weights != 0, samples.weights * ratio, 0.0)

    def terms(self, log_ratio: Tensor, weights: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        """OPO's push and pull-back of each sample, `[B]` each, in the form that `ratio_form` names."""
        form = self.ratio_form
        return loss_terms(log_ratio, samples.target, mu=samples.mu, ratio_form=form, weights=weights)
