"""Metrics logged under `opo/`, against values computed by hand in float64."""

import math

import pytest
import torch
from by_hand import f64

from opo_trl.metrics.opo import ratio_ess, target_fit


@pytest.mark.parametrize("form", ["truncated", "log", "exact"])
def test_target_fit_is_the_weighted_share_of_the_target_that_is_reached(form):
    delta = [0.9, -0.2, 0.5, 0.1, math.nan]
    target = [1.0, -0.5, 0.0, 0.4, 2.0]
    weights = [1.0, 0.5, 1.0, 2.0, 0.0]
    missing = asked = 0.0
    for d, v, w in zip(delta, target, weights, strict=True):
        if v and w:  # neither a sample without a target nor an excluded one counts
            u = {"truncated": min(math.expm1(d), 1.0), "log": d, "exact": math.expm1(d)}[form]
            missing += w * (u - v) ** 2
            asked += w * v**2
    fit = target_fit(f64(delta), f64(target), ratio_form=form, weights=f64(weights))
    assert fit == pytest.approx(1 - missing / asked)
    opposite = f64([1.0, -1.0])
    assert target_fit(f64([0.0, 0.0]), opposite) == 0
    assert target_fit(opposite, opposite, ratio_form="log") == 1
    assert target_fit(f64([0.1]), f64([0.0])).isnan()


def test_effective_sample_size_of_ratios_is_a_share_of_the_samples_that_take_part():
    log_ratios = f64([0.3, -0.2, 1.0, 9.0])
    keep = torch.tensor([True, True, True, False])
    ratios = log_ratios[:3].exp()
    sum_of_squares = ratios.square().sum()
    expected = ratios.sum() ** 2 / (3 * sum_of_squares)
    assert ratio_ess(log_ratios, keep) == pytest.approx(expected.item())
    assert ratio_ess(f64([0.7, 0.7, 0.7, 9.0]), keep) == pytest.approx(1)
    far_apart = torch.tensor([20.0, -20.0])
    assert ratio_ess(far_apart, torch.tensor([True, True])) == pytest.approx(0.5)
    assert ratio_ess(f64([1.0]), torch.tensor([False])).isnan()
