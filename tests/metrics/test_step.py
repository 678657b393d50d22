"""Reports of samples: gathered in one call under their names; skipped samples; a low effective sample size."""

import dataclasses
import logging
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState

from opo_trl.metrics.step import SampleReport, count_low_ess


NAMES = [field.name for field in dataclasses.fields(SampleReport)]


class TwoProcesses:
    """An accelerator whose other process reports the same."""

    calls = 0

    def gather(self, table):
        self.calls += 1
        return torch.cat([table, table])


def report(*first: int) -> SampleReport:
    """Of samples whose values are 100 · the sample's number + the number of the field."""
    rows = 100 * torch.tensor(first)
    return SampleReport(**{name: rows + i for i, name in enumerate(NAMES)})


def test_reports_of_a_step_are_gathered_in_one_call_under_their_names():
    accelerator = TwoProcesses()
    samples = SampleReport.gather([report(1, 2), report(3)], accelerator)
    assert accelerator.calls == 1
    for i, name in enumerate(NAMES):
        assert getattr(samples, name).tolist() == [100 + i, 200 + i, 300 + i] * 2


def test_report_keeps_no_graph():
    weight = torch.ones(2, requires_grad=True)
    samples = SampleReport(**dict.fromkeys(NAMES, weight.double() * 2))
    assert not any(getattr(samples, name).requires_grad for name in NAMES)
    assert all(getattr(samples, name).dtype == torch.float32 for name in NAMES)


def test_skipped_samples_have_only_a_weight_and_mu():
    skipped = SampleReport.of_skipped(torch.tensor([True, False]), torch.tensor(0.3))
    assert skipped.weights.tolist() == [1, 0]
    assert skipped.mu.tolist() == pytest.approx([0.3, 0.3])
    assert not any(getattr(skipped, name).any() for name in set(NAMES) - {"weights", "mu"})


def test_count_of_low_sample_sizes_starts_again_and_warns_at_ten(caplog):
    PartialState()  # for the logger
    args = SimpleNamespace(num_generations=8, alpha=0.0, escort_temperature=1.0, anchor_correction="sequence")
    count = 0
    with caplog.at_level(logging.WARNING, logger="opo_trl"):
        for ess in [1.5] * 9 + [2.0] + [1.5] * 9:
            count = count_low_ess(count, ess, args)
        assert (count, caplog.messages) == (9, [])
        count = count_low_ess(count_low_ess(count, 1.5, args), 1.5, args)
    assert count == 11
    assert len(caplog.messages) == 1
    # A group of two cannot have a larger one.
    args.num_generations = 2
    assert count_low_ess(0, 1.5, args) == 0
