"""Intervals against published quantiles, simulation and enumeration."""

import itertools
import math

import numpy as np
import pytest

from benchmarks.intervals import bootstrap_interval, estimate, paired_difference


# Student's t, two-sided 95 %, as printed in any table.
TABLE = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 9: 2.2622, 30: 2.0423}


@pytest.mark.parametrize(("degrees", "quantile"), TABLE.items())
def test_t_interval_has_the_printed_quantile(degrees, quantile):
    values = np.random.default_rng(degrees).normal(size=degrees + 1)
    low, high = estimate(list(values)).interval
    error = math.sqrt(sum((values - values.mean()) ** 2) / degrees / len(values))
    assert (low + high) / 2 == pytest.approx(values.mean())
    assert (high - low) / 2 / error == pytest.approx(quantile, abs=5e-5)


def test_one_seed_has_no_interval_and_decides_nothing():
    assert estimate([0.5]).interval is None
    difference = paired_difference([0.9], [0.1])
    assert difference.estimate.mean == pytest.approx(0.8)
    assert (difference.estimate.interval, difference.bootstrap, difference.verdict) == (None, None, "undecided")


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_bootstrap_is_that_of_all_resamples(n):
    values = list(np.random.default_rng(n).normal(size=n))
    means = sorted(sum(resample) / n for resample in itertools.product(values, repeat=n))
    # The smallest value that at least 2.5 % (97.5 %) of all resamples do not exceed.
    low, high = (means[math.ceil(p * len(means)) - 1] for p in (0.025, 0.975))
    assert bootstrap_interval(values) == pytest.approx((low, high), rel=1e-12)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([1.1, 2.2, 3.3, 4.4], "higher"),
        ([0.9, 1.8, 2.7, 3.6], "lower"),
        ([1.5, 1.5, 3.5, 3.5], "undecided"),
        ([1.0, 2.0, 3.0, 4.0], "undecided"),
    ],
)
def test_verdict_follows_the_paired_t_interval(values, verdict):
    difference = paired_difference(values, [1.0, 2.0, 3.0, 4.0])
    assert difference.verdict == verdict
