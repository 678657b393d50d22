"""
What recorded log-probabilities of sampled tokens look like, beside the policy's own of the same tokens.

A record may hold something else than the log-probabilities at which its tokens were sampled. A run that believes it
trains with wrong ratios, or not at all. Before the policy moves, the differences show what it holds.

All bounds lie between what was measured for the policy itself, in float32 and bfloat16, and for the cases that they
tell apart, of a random model, of one with an entropy of 0.03 nats per token and of SmolLM2-135M.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats


Values = NDArray[np.float64]

# With fewer, differences may point one way, or lie on a line, by chance.
_FEWEST_CHOICES = 10

_ANEW = "Set `rollouts_model` to the model that sampled the tokens, which computes them anew"


class Finding(NamedTuple):
    """What recorded log-probabilities look like, in parts of a sentence."""

    difference: str
    cause: str
    fix: str  # empty if nothing is wrong


class _Tokens(NamedTuple):
    recorded: Values  # log-probabilities, `[n]`
    own: Values
    entropies: Values

    @property
    def differences(self) -> Values:
        return self.recorded - self.own

    @property
    def choices(self) -> float:
        """Number of tokens, each counted by the probability that another one is sampled."""
        return float(-np.expm1(np.minimum(self.recorded, self.own)).sum())


def compare(recorded: Values, own: Values, entropies: Values, *, temperature: float, cut: str) -> Finding | None:
    """
    Compare recorded log-probabilities of sampled tokens with the policy's own before it moves. `None` if they agree
    within rounding, or there are too few to tell.

    All are float64, `[n]`; `entropies` are the policy's in the places of these tokens, in nats. `temperature` is the
    run's. `cut` says by which settings tokens were left out of sampling, such as `top_p=0.9`; empty if unknown.
    """
    is_finite = np.isfinite(recorded + own + entropies)  # a policy may be broken
    recorded, own, entropies = recorded[is_finite], own[is_finite], entropies[is_finite]
    if not len(recorded):
        return None
    above, below = np.mean(recorded - own > 0.003), np.mean(recorded - own < -0.003)
    is_zero = recorded == 0
    others = _Tokens(recorded[~is_zero], own[~is_zero], entropies[~is_zero])
    can_tell = others.choices > _FEWEST_CHOICES
    slope, explained = _slope(others) if can_tell else (1.0, 0.0)
    # A sure model's are above those of a policy that is not, too, but whatever the policy's are.
    if can_tell and slope > 0.5 and _are_of_kept_tokens(others):
        difference = f"are above the policy's for {above:.0%} of the sampled tokens, and below for hardly any"
        cause = f"as those of the tokens that truncated sampling keeps ({cut or '`top_p`, `top_k` or `min_p`'})"
        fix = f"{_ANEW}, or record them before tokens are left out (vLLM: `raw_logprobs`)"
        return Finding(difference, cause, fix)
    # For temperatures from 0.3 to 1.3 instead of 1, at least 0.80 was measured, and for other models at most 0.57.
    if explained > 0.7 and slope > 0.1 and abs(slope - 1) > 0.05:
        difference = f"have a slope of {slope:.2g} to the policy's, which explains {explained:.0%} of the difference"
        cause = f"as those at a temperature near {temperature / slope:.2g} instead of {temperature:g}"
        fix = f"{_ANEW}, record them at the run's temperature (vLLM: `processed_logprobs`), or set `temperature`"
        return Finding(difference, cause, fix)
    # At this log-probability others have a tenth of the probability. A real 0 leaves them less than 1e-7.
    in_doubt = own < -0.1
    filled_in, almost = is_zero & in_doubt, ~is_zero & in_doubt & (recorded > -0.01)
    # A policy that has become sure has zeros, too, but with them as many that are almost 0.
    if filled_in.sum() > max(0.01 * len(own), 2 * almost.sum()):
        probability = np.exp(own[filled_in]).mean()
        difference = f"are exactly 0 for {np.mean(filled_in):.0%} of the sampled tokens"
        difference += f", to which the policy gives a probability of {probability:.0%} on average"
        return Finding(difference, "as if filled in, or of truncated or greedy sampling", _ANEW)
    distances = np.abs(others.differences)
    error = distances.std() * len(distances) ** 0.5  # of the sum
    # Between kernels in bfloat16, 0.06 was measured for each choice.
    if can_tell and distances.sum() - 2 * error > 0.06 * others.choices:
        difference = f"are above the policy's for {above:.0%} of the sampled tokens, and below for {below:.0%}"
        author = f"another model with {cut}" if cut else "another model"
        return Finding(difference, f"as those of {author}, or of another state of this one", "")
    return None


def _are_of_kept_tokens(tokens: _Tokens) -> bool:
    """
    Whether they are never below the policy's but by rounding, and often above: where tokens are left out, those that
    are kept share their probability.
    """
    differences = tokens.differences
    risen, fallen = differences.clip(min=0).sum(), -differences.clip(max=0).sum()
    # `top_p=0.99` adds 0.01 for each choice. By rounding in bfloat16, `top_p=0.95` falls by 0.08 of what it adds.
    goes_up = risen - fallen > 0.005 * tokens.choices and fallen < 0.1 * risen
    # A very different model is mostly above the policy, too, but clearly below for 8 % of tokens or more.
    return bool(goes_up and np.sum(differences < -0.1) < 0.02 * np.sum(tokens.own < -0.1))


def _slope(tokens: _Tokens) -> tuple[float, float]:
    """
    The slope between log-probabilities in the same place, and which share of the differences it explains.

    A temperature multiplies log-probabilities by such a slope and normalizes them again. The normalizer, a Rényi
    entropy, is not known, but nearly proportional to the entropy: both explain the differences.
    """
    differences, surprises = tokens.differences, tokens.own + tokens.entropies
    if not (np.ptp(differences) and np.ptp(surprises)):
        return 1.0, 0.0
    columns = np.stack([np.ones_like(surprises), tokens.own, tokens.entropies], axis=1)
    # Another model may have a few tokens far off, which alone would make a line.
    weights = 1 / (1 + surprises**2)
    root = np.sqrt(weights)
    factors = np.linalg.lstsq(columns * root[:, None], differences * root, rcond=None)[0]
    slope = 1 + float(factors[1])
    unexplained = weights @ (differences - columns @ factors) ** 2
    variance = weights @ (differences - np.average(differences, weights=weights)) ** 2
    # They do if it is sure of all others; but only a temperature orders these, too: the correlation of ranks was at
    # least 0.67 then, and for a sure model before and after training 0.3.
    order = abs(stats.spearmanr(differences, surprises).statistic)
    return slope, float(1 - unexplained / variance) if order > 0.6 else 0.0
