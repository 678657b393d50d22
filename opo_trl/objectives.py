r"""
Published losses as objectives, each held against TRL's by `tests/test_parity.py`, and their names in recipes.

With ρ the ratio π/π_k of a token, t of the whole completion, and A the advantage:

| `objective` | loss of a token | summed over tokens, and |
|---|---|---|
| `grpo` (arXiv 2402.03300) | −min(ρA, clip(ρ, 1 − ε, 1 + ε')A) | divided by the length of the completion |
| `gspo` (2507.18071) | the same, ρ being the geometric mean over the completion | divided by its length |
| `dr_grpo` (2503.20783) | as GRPO's | divided by `max_completion_length` |
| `dapo` (2503.14476) | as GRPO's | divided by the mean length in the rollout |
| `cispo` (2506.13585) | −min(ρ, ε')·A·log π, the ratio without gradient | divided by the mean length in the rollout |
| `sapo` (2511.20347) | −4/τ·σ(τ(ρ − 1))·A, τ by the sign of A | divided by the length of the completion |
| `vespo` (2602.10693) | −t^k·exp(λ(1 − t))·A·log π, k and λ by the sign of A | as `cispo` |

Where a ratio has no gradient, log ρ, of the same gradient, stands for log π. [`TOPR`] weighs whole completions. The
fields that they read have the meaning that they have in TRL.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from .fields import load, require
from .objective import (
    OPO,
    SEQUENCE_CLAMP,
    Groups,
    Loss,
    Objective,
    Samples,
    Targets,
    escort_weights,
    loss_terms,
    project,
)


Push = Literal["escort", "reward", "advantage"]


class GRPO(Objective):
    """GRPO's clipped ratio, of tokens or, by `importance_sampling_level`, of completions."""

    fields = frozenset({"importance_sampling_level", "epsilon", "epsilon_high", "delta"})
    reduction = "mean"
    scales_by_pass = True
    takes_sampler_ratios = True  # as factors of the losses of tokens

    @property
    def level(self) -> str:
        """Whether the ratio is of a `"token"`, or of a `"sequence"`: the geometric mean over it."""
        return self.args.importance_sampling_level

    clips = level

    def loss(self, samples: Samples) -> Loss:
        """
        Loss of each sample from the losses of its tokens, and the shares of its tokens that are clipped. All of it is
        `work`, as nothing pulls back to the behaviour policy.
        """
        ratio, advantage = self.ratio(samples), samples.spread(samples.target)
        losses = self.token_losses(ratio, advantage, samples)
        if samples.sampler_ratios is not None and self.takes_sampler_ratios:
            losses = losses * samples.sampler_ratios
        if samples.steering is not None:  # which tokens have a loss, under `top_entropy_quantile`
            losses = torch.where(samples.steering, losses, 0.0)
        # The sampler's weights are factors of the losses of tokens. Here, a weight of 0 excludes a sample.
        push = torch.where(samples.weights != 0, self.reduce(samples.sum(losses), samples), 0.0)
        below, above = self.clipped(ratio, advantage)
        share_below = samples.sum(below.float()) / samples.length
        share_above = samples.sum(above.float()) / samples.length
        return Loss(
            work=push,
            dissipation=torch.zeros_like(push),
            log_ratio=samples.moved,
            clamped=torch.zeros_like(push, dtype=torch.bool),
            weights=samples.weights,
            clipped_low=share_below,
            clipped_high=share_above,
        )

    def ratio(self, samples: Samples) -> Tensor:
        """
        The ratio π/π_k: of tokens, `[B, T]`, or of completions, the geometric mean over their tokens, `[B, 1]`.
        """
        log_ratios = samples.token_log_ratios
        if self.level == "sequence":
            log_ratios = samples.spread(samples.sum(log_ratios) / samples.length)
        return log_ratios.exp()

    @property
    def range(self) -> tuple[float, float]:
        """Bounds within which the ratio has a gradient."""
        args = self.args
        above = args.epsilon if args.epsilon_high is None else args.epsilon_high
        return 1 - args.epsilon, 1 + above

    def token_losses(self, ratio: Tensor, advantage: Tensor, samples: Samples) -> Tensor:
        """
        The clipped loss of each ratio, before the sampler's importance weights. `delta`, if set, also bounds the ratio
        that is not clipped.
        """
        within = ratio.clamp(*self.range)
        if self.args.delta is not None:
            ratio = ratio.clamp(max=self.args.delta)
        return -torch.min(ratio * advantage, within * advantage)

    def clipped(self, ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """Which ratios are below and above their range, where that leaves them without a gradient."""
        low, high = self.range
        return (ratio < low) & (advantage < 0), (ratio > high) & (advantage > 0)

    def reduce(self, total: Tensor, samples: Samples) -> Tensor:
        return total / samples.length if self.reduction == "mean" else total

    def scale(self, length: Tensor, valid: Tensor) -> Tensor:
        """
        Factor of all losses of a rollout: for a sum over tokens, 1 over the mean length of all its completions,
        `[N]`, also of those that do not take part; otherwise 1.
        """
        if self.reduction != "sum":
            return torch.tensor(1.0)
        mean_length = length.mean().clamp(min=1 / len(length))  # as of one token in all
        return 1 / mean_length

    def kl(self, reference_logps: Tensor, samples: Samples, *, corrected: bool) -> Tensor:
        return samples.kl(reference_logps, self.ratio(samples) if corrected else None)


class GSPO(GRPO):
    """GSPO: GRPO with the ratio of completions."""

    level = clips = "sequence"


class DAPO(GRPO):
    """DAPO's loss, whose tokens all weigh the same."""

    reduction = "sum"


class DrGRPO(GRPO):
    """Dr. GRPO's loss, without a length in the denominator. Its advantages need `scale_rewards: none`."""

    reduction = "constant"

    def reduce(self, total: Tensor, samples: Samples) -> Tensor:
        return total / self.args.max_completion_length


class CISPO(GRPO):
    """CISPO's bounded weight; `epsilon_high`, or `epsilon`, is the bound itself."""

    fields = frozenset({"importance_sampling_level", "epsilon", "epsilon_high"})
    reduction = "sum"

    @property
    def range(self) -> tuple[float, float]:
        args = self.args
        return 0.0, args.epsilon if args.epsilon_high is None else args.epsilon_high

    def token_losses(self, ratio: Tensor, advantage: Tensor, samples: Samples) -> Tensor:
        """The ratio, at most `range[1]` and without gradient, as the weight of a loss in log-probabilities."""
        _, highest = self.range
        weight = ratio.detach().clamp(max=highest)
        return -weight * advantage * samples.token_log_ratios


class SAPO(GRPO):
    """SAPO's soft gate."""

    fields = frozenset({"importance_sampling_level", "sapo_temperature_pos", "sapo_temperature_neg"})
    range, clips = (0.0, math.inf), None

    def token_losses(self, ratio: Tensor, advantage: Tensor, samples: Samples) -> Tensor:
        """The soft gate: a sigmoid around a ratio of 1, with a temperature by the sign of the advantage."""
        args = self.args
        temperature = torch.where(advantage > 0, args.sapo_temperature_pos, args.sapo_temperature_neg)
        gate = torch.sigmoid(temperature * (ratio - 1))
        return -gate * 4 / temperature * advantage


class VESPO(GRPO):
    """VESPO's gamma weight of completions, of which the sampler's importance weights are a part."""

    fields = frozenset({"vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"})
    level = "token"
    reduction = "sum"
    range, clips = (0.0, math.inf), None
    takes_sampler_ratios = False

    @torch.no_grad()
    def gamma(self, samples: Samples) -> Tensor:
        """
        The weight t^k·exp(λ(1 − t)) of each completion, `[B]`, with k and λ by the sign of its target, the advantage.
        Its t is the ratio π/π_k, times the sampler's importance weights if there are any; all in logarithms, and
        bounded.
        """
        args, lowest = self.args, math.log(1e-8)
        log_t = samples.sum(samples.token_log_ratios.clamp(-SEQUENCE_CLAMP, SEQUENCE_CLAMP))
        if samples.sampler_ratios is not None:
            log_weights = samples.sampler_ratios.log().clamp(lowest, SEQUENCE_CLAMP)
            is_per_completion = log_weights.size(1) == 1
            log_t = log_t + (log_weights.squeeze(1) if is_per_completion else samples.sum(log_weights))
        log_t = log_t.clamp(lowest, SEQUENCE_CLAMP)
        is_right = samples.target >= 0
        k = torch.where(is_right, args.vespo_k_pos, args.vespo_k_neg)
        decay = torch.where(is_right, args.vespo_lambda_pos, args.vespo_lambda_neg).clamp(min=1e-4)
        log_gamma = decay + k * log_t - decay * log_t.exp()
        return log_gamma.exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    def token_losses(self, ratio: Tensor, advantage: Tensor, samples: Samples) -> Tensor:
        weight = samples.spread(self.gamma(samples))
        return -weight * advantage * samples.token_log_ratios


class TOPR(Objective):
    """
    REINFORCE with the tapered importance weights of TOPR (Le Roux et al., 2025, arXiv 2503.14286): `-w · g · Delta`.

    The push g is `args.push` of the completion, and w the ratio pi / pi_k of all of it (`log_ratio_reduction: mean`:
    the geometric mean over its tokens), without gradient, within `args.positive_bounds` where g is positive and within
    `args.negative_bounds` where it is negative. TOPR's weights are 1 and the ratio up to 1. With `[0, 2]` for both and
    the push r − r̄, this is truncated REINFORCE, with the gradient of the expected reward, `-E_pi[r]`, as long as the
    ratio is at most 2. Nothing pulls the policy back.
    """

    fields = frozenset(
        {
            *("push", "positive_bounds", "negative_bounds", "alpha", "escort_temperature"),
            *("log_ratio_reduction", "log_ratio_clamp"),
        }
    )

    @property
    def fields_off(self) -> dict[str, str]:
        """Fields that `push` leaves without effect: those of the escort weights, or of TRL's advantages → `"push"`."""
        push = self.args.push
        of_escort_weights = () if push == "escort" else ("alpha", "escort_temperature")
        of_advantages = ("scale_rewards", "multi_objective_aggregation") if push == "reward" else ()
        return dict.fromkeys((*of_escort_weights, *of_advantages), "push")

    def targets(self, groups: Groups) -> Targets:
        """
        The push of each completion, less the mean of its group: both drive and target. `ValueError` without rewards.
        """
        args = self.args
        if args.push == "reward" and not groups.has_rewards:
            fix = "Return them from `_generate_and_score_completions`, `[B, number of reward functions]`"
            raise ValueError(f"The rollout has no `rewards_per_func`, which push='reward' needs. {fix}.")
        if args.push == "reward":
            push = groups.rewards
        elif args.push == "advantage":
            push = groups.advantages
        else:
            temperature = args.escort_temperature
            push = escort_weights(groups.advantages, alpha=args.alpha, temperature=temperature, **groups.rows)
        # Advantages are centred, but rounding may leave something in a group of equal rewards.
        drive, _ = project(push, **groups.rows)
        # As there is no pull back, its coefficient, by which a drive is divided to get the target, is 1.
        return Targets(drive, drive, drive.new_ones(()))

    def weights(self, samples: Samples) -> Tensor:
        """The ratio of each completion, within the bounds for the sign of its push; 0 excludes it."""
        log_ratio = self.reduce(samples.moved, samples)
        ratio = log_ratio.clamp(-SEQUENCE_CLAMP, SEQUENCE_CLAMP).exp()
        pushed_up = ratio.clamp(*self.args.positive_bounds)
        pushed_down = ratio.clamp(*self.args.negative_bounds)
        bounded = torch.where(samples.target > 0, pushed_up, pushed_down)
        return torch.where(samples.weights != 0, samples.weights * bounded, 0.0)

    def terms(self, log_ratio: Tensor, weights: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        push, _ = loss_terms(log_ratio, samples.target, mu=samples.mu, ratio_form="log", weights=weights)
        return push, torch.zeros_like(push)


OBJECTIVES: dict[str, type[Objective]] = {
    "opo": OPO,
    "topr": TOPR,
    "grpo": GRPO,
    "gspo": GSPO,
    "dr_grpo": DrGRPO,
    "dapo": DAPO,
    "cispo": CISPO,
    "sapo": SAPO,
    "vespo": VESPO,
}
# Losses of TRL (`loss_type`) that have no objective, and the nearest that has one.
NEAREST = {"bnpo": "dapo", "luspo": "gspo"}


def objective_named(name: str) -> type[Objective]:
    """The objective of a word of [`OBJECTIVES`], or of the dotted path of a class. `ValueError` if there is none."""
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    allowed = f"one of {', '.join(OBJECTIVES)}, or the dotted path of a subclass of `opo_trl.objective.Objective`"
    kind = load("objective", name, allowed, "my_module.Mine")
    require(isinstance(kind, type) and issubclass(kind, Objective), "objective", name, allowed)
    return kind
