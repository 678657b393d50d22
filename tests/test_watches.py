"""Watches: a bound on any metric of the log warns, or ends the run."""

import pytest
from helpers import logged, trained

from opo_trl import OPOConfig, checkpoint
from opo_trl.watches import Watch, Watches


@pytest.mark.parametrize(
    "text",
    [
        "entropy < 0.1",
        "warn if entropy = 0.1",
        "end if entropy < 0.1",
        "warn if entropy < little",
        {"stop if a > 1": 2},
    ],
    ids=str,
)
def test_what_is_no_watch_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match=r"which is no watch\. Write it as 'warn if entropy < 0\.1'"):
        OPOConfig("…", watches=[text], use_cpu=True, bf16=False)


def test_parts_of_a_watch():
    watch = Watch("stop if opo/chi2 > 2e-1")
    assert (watch.stops, watch.metric, watch.bound) == (True, "opo/chi2", 0.2)
    assert watch.beyond(0.3, watch.bound)
    assert not watch.beyond(0.1, watch.bound)


def test_warning_comes_once_after_three_entries(tiny_model, tmp_path, caplog):
    watches = ["warn if entropy < 100", "warn if entropy > 100"]
    trainer = trained(tiny_model, tmp_path, max_steps=5, watches=watches)
    warnings = [record.getMessage() for record in caplog.records if "Watch" in record.getMessage()]
    assert len(warnings) == 1
    assert "Watch 'warn if entropy < 100': entropy was 5." in warnings[0]
    assert "in step 3" in warnings[0]
    assert len(logged(trainer)) == 5


def entries(watch: Watch, values: list[float]) -> list[int]:
    """Entries of the log at which a watch fires."""
    watches = Watches([watch.text])
    return [i for i, value in enumerate(values) if watches._fires(watches.watches[0], {watch.metric: value})]


@pytest.mark.parametrize(
    ("values", "fired"),
    [
        ([5, 5, 0, 0, 0, 0, 0, 0, 0, 0, 5, 5], []),  # twice in ten
        ([5, 0, 5, 0, 5, 0], [4]),
        ([0, 5, 0, 0, 5, 0, 0, 5, 0, 0, 5, 0, 0, 5], [7]),  # every third step, and once told
        ([5] * 3 + [0] * 10 + [5] * 3, [2, 15]),
        ([float("nan")] * 5, []),
    ],
)
def test_watch_fires_when_three_of_ten_entries_are_beyond(values, fired):
    assert entries(Watch("warn if opo/chi2 > 2"), values) == fired


def test_run_ends_with_a_checkpoint(tiny_model, tmp_path, caplog):
    trainer = trained(tiny_model, tmp_path, max_steps=9, watches=["stop if opo/escort/ess > 0"])
    assert trainer.state.global_step == 3
    assert "The run ends at step 3, with a checkpoint." in caplog.text
    assert checkpoint.fault(tmp_path / "checkpoint-3") is None


def test_metric_that_does_not_exist_is_told_with_those_that_do(tiny_model, tmp_path, caplog):
    trained(tiny_model, tmp_path, max_steps=25, watches=["stop if opo/chi > 2"])
    warnings = [record.getMessage() for record in caplog.records if "Watch" in record.getMessage()]
    assert len(warnings) == 1
    assert "the first 10 entries of the log have no 'opo/chi'. The nearest metrics: opo/chi2" in warnings[0]
