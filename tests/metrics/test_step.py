"""Metrics of an optimizer step, from the reports of its samples."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from opo_trl.config import ObjectiveConfig
from opo_trl.metrics.step import SampleReport, metrics_of_samples
from opo_trl.objective import OPO, Samples
from opo_trl.objectives import OBJECTIVES


def report(**fields: list[float]) -> SampleReport:
    """Two samples that count, with these values; other fields are 0."""
    names = [field.name for field in dataclasses.fields(SampleReport)]
    values = {"weights": [1.0, 1.0], "tokens": [1.0, 1.0], **fields}
    return SampleReport(**{name: torch.tensor(values.get(name, [0.0, 0.0])) for name in names})


def metrics(**fields: list[float]) -> dict[str, float]:
    return metrics_of_samples(report(**fields), OPO(ObjectiveConfig()), kl=False, bonus=False)


def test_a_sample_whose_log_ratio_nobody_has_computed_counts_in_no_metric_of_it():
    moved = {"log_ratio": [math.nan, 0.1], "sequence_log_ratio": [9.0, 0.1], "target": [1.0, 0.2]}
    logged = metrics(computed=[0.0, 1.0], **moved)
    v = math.expm1(0.1)
    assert logged["opo/chi2"] == pytest.approx(v**2)
    assert logged["opo/conservation_residual"] == pytest.approx(v)
    assert logged["opo/target_fit"] == pytest.approx(1 - (v - 0.2) ** 2 / 0.2**2)
    assert logged["opo/ratio/ess"] == 1
    assert (logged["opo/frac_skipped"], logged["opo/frac_masked"]) == (0.5, 0)


def test_a_log_ratio_of_nan_that_was_computed_is_logged():
    logged = metrics(log_ratio=[math.nan, 0.1], computed=[1.0, 1.0])
    assert math.isnan(logged["opo/chi2"])


def test_a_filler_is_reported_as_if_it_were_left_out_but_for_its_entropy():
    batch = {"opo_filler": torch.tensor([True, False]), "opo_counts": torch.ones(2), "opo_mu": torch.ones(2)}
    of_both = report(log_ratio=[0.5, 0.1], computed=[1.0, 1.0], entropy=[2.0, 1.0], tokens=[4.0, 2.0])
    (on_policy,) = of_both.with_left_out(batch)
    assert on_policy.computed.tolist() == [0, 1]
    assert on_policy.log_ratio.tolist() == pytest.approx([0, 0.1])
    assert (on_policy.entropy.tolist(), on_policy.tokens.tolist()) == ([2, 1], [4, 2])
    (off_policy,) = of_both.with_left_out({**batch, "old_per_token_logps": torch.zeros(2, 1)})
    assert off_policy.log_ratio.isnan().tolist() == [True, False]


def test_a_completion_without_tokens_has_no_ratio_that_could_be_clipped():
    samples = report(computed=[1.0, 1.0], tokens=[0.0, 3.0], clipped_low=[0.0, 1.0])
    logged = metrics_of_samples(samples, OBJECTIVES["gspo"](ObjectiveConfig()), kl=False, bonus=False)
    assert (logged["clip_ratio/low_min"], logged["clip_ratio/region_mean"]) == (1, 1)


@pytest.mark.parametrize(("name", "share"), [("grpo", 0.25), ("gspo", 0.5)])
def test_a_clipped_completion_counts_by_its_tokens_or_as_one(name, share):
    samples = report(computed=[1.0, 1.0], tokens=[1.0, 3.0], clipped_low=[1.0, 0.0])
    args = SimpleNamespace(**vars(ObjectiveConfig()), importance_sampling_level="token")
    logged = metrics_of_samples(samples, OBJECTIVES[name](args), kl=False, bonus=False)
    assert logged["clip_ratio/region_mean"] == share


def test_the_effective_sample_size_is_that_of_ratios_of_whole_completions():
    """Also where the loss has the mean of their tokens."""
    logps = torch.tensor([[-1.0, -2.0], [-3.0, -1.0]])
    before = torch.tensor([[-1.5, -2.5], [-3.0, -1.0]])
    samples = Samples.of(logps, before, torch.ones(2, 2).bool(), torch.zeros(2), torch.tensor(1.0))
    loss = OPO(ObjectiveConfig(log_ratio_reduction="mean", log_ratio_clamp=9.0)).loss(samples)
    of_samples = SampleReport.of(samples, loss)
    assert of_samples.log_ratio.tolist() == [0.5, 0]
    assert of_samples.sequence_log_ratio.tolist() == [1, 0]
