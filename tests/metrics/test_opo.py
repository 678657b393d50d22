"""Metrics logged under `opo/`, against values computed by hand in float64."""

import math

import pytest
import torch
from objective_by_hand import f64

from opo_trl.metrics.opo import ratio_ess, rollout_metrics, target_fit
from opo_trl.objective import Groups, Targets


def displacement(form, log_ratio):
    """How far a completion has moved, in the units of its target."""
    if form == "log":
        return log_ratio
    excess = math.expm1(log_ratio)
    return min(excess, 1.0) if form == "truncated" else excess


@pytest.mark.parametrize("form", ["truncated", "log", "exact"])
def test_target_fit_is_the_weighted_share_of_the_target_that_is_reached(form):
    delta = [0.9, -0.2, 0.5, 0.1, math.nan]
    target = [1.0, -0.5, 0.0, 0.4, 2.0]
    weights = [1.0, 0.5, 1.0, 2.0, 0.0]
    squared_miss = 0.0
    squared_target = 0.0
    for log_ratio, goal, weight in zip(delta, target, weights, strict=True):
        if goal and weight:  # neither a completion without a target nor an excluded one counts
            miss = displacement(form, log_ratio) - goal
            squared_miss += weight * miss**2
            squared_target += weight * goal**2
    fit = target_fit(f64(delta), f64(target), ratio_form=form, weights=f64(weights))
    assert fit == pytest.approx(1 - squared_miss / squared_target)
    opposite = f64([1.0, -1.0])
    unmoved = target_fit(0 * opposite, opposite)
    assert unmoved == 0
    arrived = target_fit(opposite, opposite, ratio_form="log")
    assert arrived == 1
    without_target = target_fit(f64([0.1]), f64([0.0]))
    assert without_target.isnan()


def test_effective_sample_size_of_ratios_is_a_share_of_the_samples_that_take_part():
    log_ratios = f64([0.3, -0.2, 1.0, 9.0])
    keep = torch.tensor([True, True, True, False])
    ratios = log_ratios[:3].exp()
    sum_of_squares = ratios.square().sum()
    expected = ratios.sum() ** 2 / (3 * sum_of_squares)
    assert ratio_ess(log_ratios, keep) == pytest.approx(expected.item())
    equal = f64([0.7, 0.7, 0.7, 9.0])
    assert ratio_ess(equal, keep) == pytest.approx(1)
    far_apart = torch.tensor([20.0, -20.0])
    both = torch.tensor([True, True])
    assert ratio_ess(far_apart, both) == pytest.approx(0.5)
    of_none = ratio_ess(f64([1.0]), torch.tensor([False]))
    assert of_none.isnan()


def test_a_group_without_a_valid_completion_counts_in_no_metric_of_a_rollout():
    drive = f64([0.5, 0.0, 0.0, 0.0])
    omega = f64([1.5, 0.5, 0.0, 0.0])
    targets = Targets(drive, drive, f64(1.0), omega=omega, temperature=f64(2.0))
    groups = Groups(drive, drive, torch.tensor([True, True, False, False]), num_generations=2)
    metrics = rollout_metrics(targets, groups)
    assert metrics["frac_zero_drive"] == 0.5
    assert metrics["escort/ess"] == pytest.approx(2.0**2 / (1.5**2 + 0.5**2))
