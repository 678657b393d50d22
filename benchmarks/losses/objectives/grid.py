r"""
The objectives of the ablation: a push, a weight and a pull-back, each replaced on its own.

The force on the log-ratio Δ of a completion with t = π/π_behaviour is `weight · (push − pull-back)`:

| part | values |
|---|---|
| push g | `reward`: r − r̄ of its group; `advantage`: over the group's deviation; `escort`: the centred escort weight |
| weight | `one`; `bounded`: min(t, 2); `tapered`: 1 where g ≥ 0, min(t, 1) elsewhere |
| pull-back | `none`; `log`: μΔ, the quadratic term of the log form; `chi2`: μ(min(t, 2) − 1), the paper's, truncated |

`escort-bounded-chi2` is OPO's default, the truncated force of the paper's χ² term, and `escort-bounded-log` its form
`ratio_form: log` with reused completions. With the weight `clipped`, the loss is GSPO's: −min(s·g, clip(s)·g) of the
geometric mean s of the tokens' ratios, without a pull-back.
"""

import itertools

import torch

from opo_trl.objective import MAX_WEIGHT, SEQUENCE_CLAMP, project

from .neighbours import Surrogate


PUSHES = ("reward", "advantage", "escort")
WEIGHTS = ("one", "bounded", "tapered")
PULL_BACKS = ("none", "log", "chi2")


class Composed(Surrogate):
    """A push, a weight and a pull-back."""

    push = "escort"
    weight = "bounded"
    pull_back = "log"

    def drive(self, omega, groups):
        given = {"reward": groups.rewards, "advantage": groups.advantages, "escort": omega}[self.push]
        return project(given, scaling="none", **groups.rows)

    def ratio(self, samples, bound):
        """π/π_behaviour of each completion, at most `bound`; without gradient."""
        return samples.moved.clamp(-SEQUENCE_CLAMP, SEQUENCE_CLAMP).exp().clamp(max=bound)

    def weights(self, samples):
        if self.weight == "one":
            return samples.weights
        if self.weight == "bounded":
            return samples.weights * self.ratio(samples, MAX_WEIGHT)
        return samples.weights * torch.where(samples.target < 0, self.ratio(samples, 1.0), 1.0)

    def terms(self, log_ratio, weights, samples):
        push, pull_back = super().terms(log_ratio, weights, samples)
        if self.pull_back == "none":
            pull_back = torch.zeros_like(push)
        elif self.pull_back == "chi2":
            pull_back = weights * samples.mu * (self.ratio(samples, MAX_WEIGHT) - 1) * log_ratio
        return push, pull_back


class Clipped(Composed):
    """GSPO's clipped ratio with any push."""

    weight = "clipped"
    pull_back = "none"
    is_regression = False
    clip = 0.02

    def weights(self, samples):
        return samples.weights

    def terms(self, log_ratio, weights, samples):
        ratio = (samples.sum(samples.log_ratios) / samples.length).exp()
        push = samples.mu * samples.target
        clipped = torch.min(ratio * push, ratio.clamp(1 - self.clip, 1 + self.clip) * push)
        return -weights * clipped, torch.zeros_like(weights)


def _cell(push: str, weight: str, pull_back: str) -> tuple[str, type[Composed]]:
    name = f"{push}-{weight}-{pull_back}"
    if weight == "clipped":
        return name, type(name, (Clipped,), {"push": push})
    own = {"push": push, "weight": weight, "pull_back": pull_back, "is_regression": pull_back != "none"}
    return name, type(name, (Composed,), own)


_PARTS = [*itertools.product(PUSHES, WEIGHTS, PULL_BACKS), *itertools.product(PUSHES, ["clipped"], ["none"])]
CELLS = dict(_cell(*parts) for parts in _PARTS)
globals().update(CELLS)  # pickle finds a class by its name in its module
