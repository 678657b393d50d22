"""Reports of samples: gathered in one call under their names; skipped samples."""

import dataclasses

import pytest
import torch

from opo_trl.metrics.step import SampleReport


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


def test_skipped_samples_have_only_a_weight_and_mu():
    skipped = SampleReport.of_skipped(torch.tensor([True, False]), torch.tensor(0.3), on_policy=True)
    assert skipped.weights.tolist() == [1, 0]
    assert skipped.mu.tolist() == pytest.approx([0.3, 0.3])
    assert not any(getattr(skipped, name).any() for name in set(NAMES) - {"weights", "mu"})
    moved = SampleReport.of_skipped(torch.tensor([True, False]), torch.tensor(0.3), on_policy=False)
    assert moved.log_ratio.isnan().all()
