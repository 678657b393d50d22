"""Means over seeds and paired differences, with 95 % intervals."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


CONFIDENCE = 0.95
EXACT_RESAMPLES = 50_000  # all n^n of up to 6 seeds; otherwise they are drawn with a fixed seed
RANDOM_RESAMPLES = 20_000

Interval = tuple[float, float]


@dataclass(frozen=True)
class Estimate:
    """The mean of `n` values, and its 95 % t interval; `None` for a single value."""

    mean: float
    interval: Interval | None
    n: int


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, with two intervals."""

    estimate: Estimate  # with the paired t interval, which decides the verdict
    bootstrap: Interval | None  # of the paired bootstrap; `None` for a single pair

    @property
    def verdict(self) -> str:
        """`"higher"` or `"lower"` if the t interval excludes 0, otherwise `"undecided"`."""
        low, high = self.estimate.interval or (0, 0)
        return "higher" if low > 0 else "lower" if high < 0 else "undecided"


def t_quantile(degrees: int) -> float:
    """Half-width of Student's central 95 % interval, in standard errors."""
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, degrees))


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of one or more values, and its t interval."""
    n, mean = len(values), float(np.mean(values))
    if n < 2:
        return Estimate(mean, None, n)
    half = t_quantile(n - 1) * float(stats.sem(values))
    return Estimate(mean, (mean - half, mean + half), n)


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Difference:
    """Mean of `values` − `baseline`, paired entry by entry."""
    differences = [own - other for own, other in zip(values, baseline, strict=True)]
    return Difference(estimate(differences), bootstrap_interval(differences))


def bootstrap_interval(values: Sequence[float]) -> Interval | None:
    """
    Percentile interval (2.5 % to 97.5 %) of the mean over resamples with replacement; `None` for a single value.

    Of few values it is that of all resamples: `scipy.stats.bootstrap` draws, and its bounds would depend on the draw.
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
