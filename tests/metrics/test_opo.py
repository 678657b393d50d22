"""Metrics logged under `opo/`, against values computed by hand in float64."""

import math
import statistics

import pytest
import torch
from by_hand import TRASH, f64

from opo_trl.metrics.opo import gradient_response_efficiency, ratio_ess, rollout_metrics, step_metrics, target_fit
from opo_trl.objective import Groups, Targets


def test_gradient_response_efficiency_is_the_gradient_per_half_advantage_range():
    assert gradient_response_efficiency(0.6, 3.0) == pytest.approx(0.4)
    assert math.isnan(gradient_response_efficiency(0.6, 0.0))


def metrics(targets: Targets, group: int, valid: torch.Tensor) -> dict[str, torch.Tensor]:
    nothing = torch.zeros(len(valid))  # what targets are made of is not read
    return rollout_metrics(targets, Groups(nothing, nothing, valid, group))


@pytest.mark.parametrize("trash", TRASH)
def test_invalid_row_has_no_effect_on_rollout_metrics(trash):
    valid = torch.tensor([True, True, False, False, False, False])  # the second group has no valid row
    omega, drive = f64([1.5, 0.5] + [trash] * 4), f64([0.5, -0.5] + [trash] * 4)
    got = metrics(Targets(drive, drive, f64(1.0), omega, f64(1.0)), 3, valid)
    assert got["escort/ess"].item() == pytest.approx(4 / 2.5)
    assert got["frac_zero_drive"].item() == 0.0
    nothing = metrics(Targets(drive, drive, f64(1.0), omega, f64(1.0)), 3, torch.zeros(6, dtype=torch.bool))
    assert nothing["escort/ess"].isnan()
    assert nothing["frac_zero_drive"].isnan()


@pytest.mark.parametrize("trash", TRASH)
def test_step_metrics_are_the_definitions(trash):
    """A row of weight zero has no effect."""
    log_ratio, rows = [0.3, trash, -1.2, 0.1], [0, 2, 3]
    got = step_metrics(f64(log_ratio), f64([1.0, 0.0, 0.5, 2.0]), torch.tensor([False, True, True, False]))
    v = [math.exp(log_ratio[i]) - 1 for i in rows]
    expected = {
        "chi2": statistics.fmean(x**2 for x in v),
        "conservation_residual": statistics.fmean(v),
        "log_ratio/absmax": 1.2,
        "frac_clamped": 1 / 3,
        "frac_masked": 1 / 4,
    }
    assert {name: value.item() for name, value in got.items()} == pytest.approx(expected, rel=1e-6)
    nothing = step_metrics(f64([trash]), f64([0.0]), torch.tensor([True]))
    assert nothing.pop("frac_masked").item() == 1.0
    assert all(value.item() == 0.0 for value in nothing.values())


@pytest.mark.parametrize("form", ["truncated", "log", "exact"])
def test_target_fit_is_the_weighted_share_of_the_target_that_is_reached(form):
    delta, target, weights = [0.9, -0.2, 0.5, 0.1, math.nan], [1.0, -0.5, 0.0, 0.4, 2.0], [1.0, 0.5, 1.0, 2.0, 0.0]
    missing = asked = 0.0
    for d, v, w in zip(delta, target, weights, strict=True):
        if v and w:  # neither a sample without a target nor an excluded one counts
            u = {"truncated": min(math.expm1(d), 1.0), "log": d, "exact": math.expm1(d)}[form]
            missing += w * (u - v) ** 2
            asked += w * v**2
    got = target_fit(f64(delta), f64(target), ratio_form=form, weights=f64(weights))
    assert got.item() == pytest.approx(1 - missing / asked)
    assert target_fit(f64([0.0, 0.0]), f64([1.0, -1.0])).item() == 0
    assert target_fit(f64([1.0, -1.0]), f64([1.0, -1.0]), ratio_form="log").item() == 1
    assert target_fit(f64([0.1]), f64([0.0])).isnan()


def test_effective_sample_size_of_ratios_is_a_share_of_the_samples_that_take_part():
    keep = torch.tensor([True, True, True, False])
    ratios = [math.exp(d) for d in (0.3, -0.2, 1.0)]
    expected = sum(ratios) ** 2 / (3 * sum(r**2 for r in ratios))
    assert ratio_ess(f64([0.3, -0.2, 1.0, 9.0]), keep).item() == pytest.approx(expected)
    assert ratio_ess(f64([0.7, 0.7, 0.7, 9.0]), keep).item() == pytest.approx(1)
    assert ratio_ess(f64([20.0, -20.0]).float(), torch.tensor([True, True])).item() == pytest.approx(0.5)
    assert ratio_ess(f64([1.0]), torch.tensor([False])).isnan()
