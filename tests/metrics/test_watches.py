"""Watches: a bound on any metric of the log warns, or ends the run."""

import re

import pytest
from helpers import Script, even_tokens, logged, make_trainer, trained

from opo_trl import OPOConfig
from opo_trl.metrics.log import Watch
from opo_trl.metrics.watches import Watches
from opo_trl.rollout import checkpoint


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
def test_malformed_watch_is_rejected_with_an_example(text):
    with pytest.raises(ValueError, match=r"which is not a watch\. Write it as 'warn if entropy < 0\.1'"):
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
        ([5, 5, 0, 0, 0, 0, 0, 0, 0, 0, 5, 5], []),  # two of ten
        ([5, 0, 5, 0, 5, 0], [4]),
        ([0, 5, 0, 0, 5, 0, 0, 5, 0, 0, 5, 0, 0, 5], [7]),  # every third step, reported once
        ([5] * 3 + [0] * 10 + [5] * 3, [2, 15]),
        ([float("nan")] * 5, []),
        ([None] * 5, []),
        ([5, None, 5, float("nan"), 5], [4]),  # entries without a number do not count
        ([5, 5, "text", 5], [3]),
    ],
)
def test_watch_fires_when_three_of_ten_entries_are_beyond(values, fired):
    assert entries(Watch("warn if opo/chi2 > 2"), values) == fired


def test_run_ends_with_a_checkpoint(tiny_model, tmp_path, caplog):
    trainer = trained(tiny_model, tmp_path, max_steps=9, watches=["stop if opo/escort/ess > 0"])
    assert trainer.state.global_step == 3
    assert "The run ends at step 3, with a checkpoint." in caplog.text
    assert checkpoint.fault(tmp_path / "checkpoint-3") is None


def test_unknown_metric_is_reported_with_similar_ones(tiny_model, tmp_path, caplog):
    trained(tiny_model, tmp_path, max_steps=25, watches=["stop if opo/chi > 2"])
    warnings = [record.getMessage() for record in caplog.records if "Watch" in record.getMessage()]
    assert len(warnings) == 1
    assert "the first 10 entries of the log have no 'opo/chi'. The nearest metrics: opo/chi2" in warnings[0]


@pytest.mark.parametrize("rewards", [[1.0] * 8, [None] * 8], ids=["zero variance", "all unscored"])
@pytest.mark.parametrize("action", ["warn", "stop"])
def test_watch_accepts_metrics_without_a_value(tiny_model, tmp_path, rewards, action):
    metrics = ("opo/gradient_response_efficiency", "opo/escort/ess", "reward", "reward_std", "grad_norm", "never")
    watches = [f"{action} if {metric} {side} 50" for metric in metrics for side in "<>"]
    silent = [f"{action} if opo/gradient_response_efficiency > 50"]
    trainer = trained(tiny_model, tmp_path, script=Script(rewards), max_steps=5, watches=watches)
    entries = logged(trainer)
    assert None in {entry.get(name) for entry in entries for name in metrics[:3]}
    assert len(logged(trained(tiny_model, tmp_path, script=Script(rewards), max_steps=5, watches=silent))) == 5


def told(caplog, start: int = 0) -> list[str]:
    return [record.getMessage() for record in caplog.records[start:] if "Watch '" in record.getMessage()]


def last_number(text: str) -> int:
    """The step at which a watch fired, or the number of entries that did not have its metric."""
    return int(re.search(r"(?:in step|the first) (\d+)", text)[1])


def test_resumed_run_fires_when_the_uninterrupted_one_does(tiny_model, tmp_path, caplog):
    watches = [
        "warn if entropy < 100",  # in step 3
        "warn if opo/off_policy_steps > 0",  # in every second step
        "warn if reward > 100",
        "warn if opo/chi < 2",  # misspelt
        "warn if entropy < 101",
    ]
    sampled = {"reward_funcs": even_tokens, "rollout_func": None}
    options = {"max_steps": 12, "num_iterations": 2, "save_strategy": "steps", "save_steps": 2, "watches": watches}
    options["trainer_arguments"] = sampled
    trained(tiny_model, tmp_path, **options)
    uninterrupted = told(caplog)
    assert [last_number(text) for text in uninterrupted] == [3, 3, 6, 10]
    for step in (2, 4, 6, 8, 10):
        start = len(caplog.records)
        resumed = make_trainer(tiny_model, tmp_path, **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert told(caplog, start) == [text for text in uninterrupted if last_number(text) > step]


def test_run_that_a_watch_ended_is_guarded_when_resumed(tiny_model, tmp_path, caplog):
    options = {"max_steps": 12, "save_strategy": "steps", "save_steps": 100, "watches": ["stop if entropy < 100"]}
    trained(tiny_model, tmp_path, **options)
    resumed = make_trainer(tiny_model, tmp_path, **options)
    resumed.train(resume_from_checkpoint="last")
    assert resumed.state.global_step == 6
    assert "The run ends at step 6" in caplog.text


def test_new_watch_starts_fresh_and_a_removed_one_is_ignored(tiny_model, tmp_path, caplog):
    options = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2}
    trained(tiny_model, tmp_path, **options, watches=["warn if reward > 100"])
    resumed = make_trainer(tiny_model, tmp_path, **options, watches=["warn if entropy < 100"])
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    (warning,) = told(caplog)
    assert "in step 5" in warning
