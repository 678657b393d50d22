"""
Means over seeds and paired differences, with 95 % intervals.

Numpy only. Few seeds are the rule, so the quantiles are those of Student's t, and the bootstrap is exact where all its
resamples can be listed.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


CONFIDENCE = 0.95
EXACT_RESAMPLES = 50_000  # up to 6 seeds
RANDOM_RESAMPLES = 20_000

Interval = tuple[float, float]


@dataclass(frozen=True)
class Estimate:
    """
    A mean over seeds.

    Args:
        mean (`float`):
            The mean.
        interval (`tuple[float, float]`, *optional*):
            Its 95 % t interval; `None` for a single value, which says nothing about spread.
        n (`int`):
            Number of values.
    """

    mean: float
    interval: Interval | None
    n: int


@dataclass(frozen=True)
class Difference:
    """
    The mean of paired differences.

    Args:
        estimate ([`Estimate`]):
            Mean difference and its paired 95 % t interval, which the verdict goes by.
        bootstrap (`tuple[float, float]`, *optional*):
            Percentile interval of the paired bootstrap; `None` for a single pair.
    """

    estimate: Estimate
    bootstrap: Interval | None

    @property
    def verdict(self) -> str:
        """`"higher"` or `"lower"` where the t interval leaves 0 out, else `"undecided"`."""
        if self.estimate.interval is None:
            return "undecided"
        low, high = self.estimate.interval
        return "higher" if low > 0 else "lower" if high < 0 else "undecided"


def t_quantile(probability: float, degrees: int) -> float:
    """
    Quantile of Student's t distribution, by bisection of its distribution function.

    Args:
        probability (`float`):
            In `[0.5, 1)`.
        degrees (`int`):
            Degrees of freedom, at least 1.

    Returns:
        `float`: t with P(T ≤ t) = `probability`.
    """
    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:
        if 0.5 + _central_probability(middle, degrees) / 2 < probability:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(low)


def _central_probability(angle: float, degrees: int) -> float:
    """P(|T| ≤ √ν·tan(angle)): the finite series for whole ν, all of whose terms are positive."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine, cosine) if odd else (1.0, 1.0)
    for k in range(3 if odd else 2, degrees - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    if not odd:
        return sine * total
    return 2 / math.pi * (angle + sine * total * (degrees > 1))


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of one or more values, and its t interval."""
    n, mean = len(values), float(np.mean(values))
    if n < 2:
        return Estimate(mean, None, n)
    half = t_quantile((1 + CONFIDENCE) / 2, n - 1) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return Estimate(mean, (mean - half, mean + half), n)


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Difference:
    """Mean of `values` − `baseline`, whose entries belong together one by one."""
    differences = [own - other for own, other in zip(values, baseline, strict=True)]
    return Difference(estimate(differences), bootstrap_interval(differences))


def bootstrap_interval(values: Sequence[float]) -> Interval | None:
    """
    Percentile interval of the mean over resamples with replacement.

    All n^n resamples count where they are at most 50,000; else 20,000 are drawn, always the same ones.

    Args:
        values (`Sequence[float]`):
            The values, one a seed.

    Returns:
        `tuple[float, float]` or `None`: the 2.5 % and 97.5 % quantiles; `None` for a single value.
    """
    n = len(values)
    if n < 2:
        return None
    if n**n <= EXACT_RESAMPLES:
        chosen = np.array(list(itertools.product(range(n), repeat=n)))
    else:
        chosen = np.random.default_rng(0).integers(n, size=(RANDOM_RESAMPLES, n))
    tails = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    low, high = np.quantile(np.asarray(values)[chosen].mean(axis=1), tails, method="inverted_cdf")
    return float(low), float(high)
