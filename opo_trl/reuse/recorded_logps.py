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

# With fewer tokens in doubt ([`_Tokens.number_in_doubt`]), differences may point one way, or lie on a line, by chance.
_FEWEST_IN_DOUBT = 10

_COMPUTE_THEM_ANEW = "Set `rollouts_model` to the model that sampled the tokens, which computes them anew"


class Finding(NamedTuple):
    """What recorded log-probabilities look like, in parts of a sentence."""

    difference: str
    cause: str
    fix: str  # empty if nothing is wrong


class _Tokens(NamedTuple):
    """Sampled tokens, `[n]`."""

    recorded: Values  # recorded log-probabilities
    current: Values  # log-probabilities under the policy
    entropies: Values  # of the policy in the places of the tokens, in nats

    def where(self, mask: NDArray[np.bool_]) -> "_Tokens":
        """The tokens for which a mask, `[n]`, is true."""
        return _Tokens(self.recorded[mask], self.current[mask], self.entropies[mask])

    @property
    def differences(self) -> Values:
        return self.recorded - self.current

    @property
    def share_above(self) -> float:
        """Share of the tokens whose recorded log-probability is above the policy's by more than rounding."""
        return float(np.mean(self.differences > 0.003))

    @property
    def share_below(self) -> float:
        """The same for those below the policy's."""
        return float(np.mean(self.differences < -0.003))

    @property
    def number_in_doubt(self) -> float:
        """
        Number of tokens in whose place another one could have been sampled: each counts by the probability of that,
        which is 1 less its own, by the record or the policy, whichever gives it the lower one.
        """
        lower = np.minimum(self.recorded, self.current)
        return float(-np.expm1(lower).sum())  # the sum of 1 - exp(log-probability)


def compare(
    recorded: Values, current: Values, entropies: Values, *, temperature: float, truncation: str
) -> Finding | None:
    """
    Compare recorded log-probabilities of sampled tokens with the policy's own before it moves, and say what they look
    like. It tries in this order: truncated sampling, another temperature, zeros that were filled in, another model.
    `None` if they agree within rounding, or if there are too few tokens to tell; zeros that were filled in are found
    among few tokens as well.

    All are float64, `[n]`; `entropies` are the policy's in the places of these tokens, in nats. `temperature` is the
    run's. `truncation` says by which settings tokens were left out of sampling, such as `top_p=0.9`; empty if unknown.
    """
    is_finite = np.isfinite(recorded + current + entropies)  # those of a broken policy are not
    tokens = _Tokens(recorded[is_finite], current[is_finite], entropies[is_finite])
    if not len(tokens.current):
        return None
    # A recorded 0 was filled in, or the token was certain: it would hide what the others look like.
    nonzero = tokens.where(tokens.recorded != 0)
    # With fewer tokens in whose place another could have been sampled, differences may look like anything by chance.
    can_tell = nonzero.number_in_doubt > _FEWEST_IN_DOUBT
    # Without enough tokens, as if they were equal to the policy's: a slope of 1 that explains nothing.
    slope, explained = _slope(nonzero) if can_tell else (1.0, 0.0)
    # A more confident model's are above the policy's, too, but do not rise with them: hence the slope.
    if can_tell and slope > 0.5 and _look_truncated(nonzero):
        settings = truncation or "`top_p`, `top_k` or `min_p`"
        return Finding(
            f"are above the policy's for {tokens.share_above:.0%} of the sampled tokens, and below for hardly any",
            f"as those of the tokens that truncated sampling keeps ({settings})",
            f"{_COMPUTE_THEM_ANEW}, or record them before tokens are left out (vLLM: `raw_logprobs`)",
        )
    # `explained` was at least 0.80 at temperatures from 0.3 to 1.3 instead of 1, and at most 0.57 for other models.
    if explained > 0.7 and slope > 0.1 and abs(slope - 1) > 0.05:
        return Finding(
            f"have a slope of {slope:.2g} to the policy's, which explains {explained:.0%} of the difference",
            f"as those at a temperature near {temperature / slope:.2g} instead of {temperature:g}",
            f"{_COMPUTE_THEM_ANEW}, record them at the run's temperature (vLLM: `processed_logprobs`), or set "
            "`temperature`",
        )
    is_filled_in = _are_filled_in(tokens)
    if is_filled_in.any():
        probability = np.exp(tokens.current[is_filled_in]).mean()
        return Finding(
            f"are exactly 0 for {np.mean(is_filled_in):.0%} of the sampled tokens, to which the policy gives a "
            f"probability of {probability:.0%} on average",
            "as if filled in, or of truncated or greedy sampling",
            _COMPUTE_THEM_ANEW,
        )
    if can_tell and _differ_by_more_than_rounding(nonzero):
        model = f"another model with {truncation}" if truncation else "another model"
        return Finding(
            f"are above the policy's for {tokens.share_above:.0%} of the sampled tokens, and below for "
            f"{tokens.share_below:.0%}",
            f"as those of {model}, or of another state of this one",
            "",
        )
    return None


def _look_truncated(tokens: _Tokens) -> bool:
    """
    Whether recorded log-probabilities look like those of truncated sampling (`top_p` and such): never below the
    policy's but by rounding, and often above, as the tokens that are kept share the probability of those left out.
    """
    differences = tokens.differences  # recorded less the policy's
    risen = differences.clip(min=0).sum()
    fallen = -differences.clip(max=0).sum()
    # `top_p=0.99` adds 0.01 for each choice, twice this bound. By rounding in bfloat16, `top_p=0.95` falls by 0.08 of
    # what it adds.
    if risen - fallen <= 0.005 * tokens.number_in_doubt or fallen >= 0.1 * risen:
        return False
    # A very different model is mostly above the policy, too, but clearly below for 8 % of tokens or more.
    n_below = np.sum(differences < -0.1)
    n_in_doubt = np.sum(tokens.current < -0.1)
    return bool(n_below < 0.02 * n_in_doubt)


def _are_filled_in(tokens: _Tokens) -> NDArray[np.bool_]:
    """
    Which tokens, bool `[n]`, have a recorded 0 that somebody has filled in: the policy is not sure of the token, and
    such zeros are more than a policy that has become sure would have. If they are not more, no token is.
    """
    is_zero = tokens.recorded == 0
    # At this log-probability others have a tenth of the probability. A real 0 leaves them less than 1e-7.
    in_doubt = tokens.current < -0.1
    is_filled_in = is_zero & in_doubt
    # A policy that has become sure has zeros, too, but with them as many that are almost 0. Twice as many, or one
    # token in a hundred, are taken as a policy's.
    is_almost_zero = ~is_zero & in_doubt & (tokens.recorded > -0.01)
    most_of_a_policy = max(0.01 * len(tokens.current), 2 * is_almost_zero.sum())
    if is_filled_in.sum() <= most_of_a_policy:
        return np.zeros_like(is_filled_in)
    return is_filled_in


def _differ_by_more_than_rounding(tokens: _Tokens) -> bool:
    """
    Whether recorded log-probabilities are, in sum, further from the policy's than those of two kernels in bfloat16 are
    from each other, and that by more than chance (two standard errors).
    """
    distances = np.abs(tokens.differences)
    error_of_sum = distances.std() * len(distances) ** 0.5  # standard error of the sum of distances
    # Between kernels in bfloat16, 0.06 was measured for each token in whose place another could have been sampled.
    return bool(distances.sum() - 2 * error_of_sum > 0.06 * tokens.number_in_doubt)


def _slope(tokens: _Tokens) -> tuple[float, float]:
    """
    The slope of recorded log-probabilities to the policy's in places of the same entropy, and the share of their
    differences, from 0 to 1, that the slope and the entropy explain. 0 if the ranks show that it is no temperature.

    A temperature multiplies log-probabilities by such a slope and normalizes them again. The normalizer, a Rényi
    entropy, is not known, but nearly proportional to the entropy: both explain the differences.
    """
    differences = tokens.differences  # recorded less the policy's
    surprises = tokens.current + tokens.entropies  # a log-probability less its mean, which is minus the entropy
    if not np.ptp(differences) or not np.ptp(surprises):  # All are equal: there is no line to find.
        return 1.0, 0.0
    # Weighted least squares of the differences on a constant, the policy's log-probability and its entropy.
    columns = np.stack([np.ones_like(surprises), tokens.current, tokens.entropies], axis=1)
    # Another model may have a few tokens far off, which alone would make a line.
    weights = 1 / (1 + surprises**2)
    roots = np.sqrt(weights)
    factors, *_ = np.linalg.lstsq(columns * roots[:, None], differences * roots, rcond=None)
    slope = 1 + float(factors[1])  # of the recorded values; the factor is that of their differences
    residuals = differences - columns @ factors
    deviations = differences - np.average(differences, weights=weights)
    unexplained = weights @ residuals**2
    variance = weights @ deviations**2
    # A few tokens far off do make a line if the model is sure of all others. But only a temperature orders these
    # others, too: the correlation of ranks was at least 0.67 then, and 0.3 for a sure model before and after training.
    correlation = stats.spearmanr(differences, surprises).statistic
    if not abs(correlation) > 0.6:
        return slope, 0.0
    return slope, float(1 - unexplained / variance)
