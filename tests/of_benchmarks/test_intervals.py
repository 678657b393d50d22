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


def test_estimate_counts_its_values():
    result = estimate([0.91, 0.95, 0.89, 0.97, 0.93])
    assert (result.mean, result.n) == (pytest.approx(0.93), 5)


def test_equal_values_have_an_interval_of_width_0():
    assert estimate([0.25] * 3).interval == (0.25, 0.25)


def test_interval_covers_at_its_level():
    draws = np.random.default_rng(3).normal(2.0, 0.5, size=(4000, 4))
    covered = np.mean([low <= 2.0 <= high for low, high in (estimate(list(row)).interval for row in draws)])
    assert covered == pytest.approx(0.95, abs=0.012)


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


def test_bootstrap_of_many_seeds_is_the_same_every_time_and_close_to_the_normal_one():
    values = list(np.random.default_rng(0).normal(1.0, 2.0, size=40))
    first = bootstrap_interval(values)
    assert bootstrap_interval(values) == first
    half = 1.96 * np.std(values) / math.sqrt(40)
    assert first == pytest.approx((np.mean(values) - half, np.mean(values) + half), abs=0.1)


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


def test_pairing_removes_the_variance_between_seeds():
    """The methods differ less than their seeds, but by the same amount for every seed."""
    baseline, other = [0.2, 0.5, 0.8], [0.25, 0.56, 0.84]
    assert estimate(other).interval[0] < estimate(baseline).interval[1]
    assert paired_difference(other, baseline).verdict == "higher"
    assert paired_difference([0.56, 0.84, 0.25], baseline).verdict == "undecided"


def test_t_interval_decides_where_the_bootstrap_of_few_seeds_is_too_narrow():
    difference = paired_difference([0.1, 0.2, 0.6], [0.0, 0.0, 0.0])
    assert difference.bootstrap[0] > 0
    assert difference.verdict == "undecided"
