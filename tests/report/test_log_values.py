"""Readers of a log accept NaN, and `None`, which TRL logs if all values were NaN."""

import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from helpers import Script, logged, trained
from transformers import TrainerControl, TrainerState

from opo_trl.checks.files import append_lines, read_lines, write_json
from opo_trl.launch.callbacks import LogFile, ProgressBar
from opo_trl.report.figures import draw_progress, draw_run
from opo_trl.report.run_folder import LOG, RECIPE
from opo_trl.report.run_report import write_report
from opo_trl.report.verdicts import judge


VALIDATION = {"validation/accuracy": 0.5, "validation/low": 0.4, "validation/high": 0.6, "validation/unscorable": 0}


@pytest.fixture(scope="module")
def real(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], dict]:
    """Log of a run, and its settings."""
    trainer = trained(tiny_model, tmp_path_factory.mktemp("run"), max_steps=8, num_iterations=2)
    log = trainer.state.log_history
    return [*log, *({"step": step, **VALIDATION} for step in (0, 4, 8))], trainer.args.to_dict()


def read(log: list[dict], settings: dict, folder: Path, *, figures: bool = True) -> None:
    """Everything that reads a log."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # NumPy's, of a mean of nothing
        judge(log, settings)
        if not figures:
            return
        plt.close(draw_progress(log, 8))
        folder.mkdir()
        append_lines(folder / LOG, log)
        assert len(draw_run(folder)) >= 2
        (folder / RECIPE).touch()
        write_json(folder / "settings.json", settings)
        write_report(folder)


@pytest.mark.parametrize("value", [None, float("nan")], ids=str)
def test_any_value_may_be_missing(real, tmp_path: Path, value):
    log, settings = real
    names = sorted({name for row in log for name in row} - {"step", "epoch"})
    assert {"grad_norm", "opo/off_policy_steps", "opo/time/update", "validation/accuracy"} <= set(names)
    read([{name: row[name] if name == "step" else value for name in row} for row in log], settings, tmp_path / "all")
    for name in names:
        for first in (0, 3):  # everywhere, and from the fourth entry on
            changed = [{**row, name: value} if name in row and i >= first else row for i, row in enumerate(log)]
            read(changed, settings, tmp_path, figures=False)
    half = [{**row, **(dict.fromkeys(row.keys() - {"step"}, value) if i % 2 else {})} for i, row in enumerate(log)]
    read(half, settings, tmp_path / "half")


@pytest.mark.parametrize("rewards", [[1.0] * 8, [None] * 8], ids=["zero variance", "all unscored"])
def test_run_without_anything_to_learn_is_reported(tiny_model: str, tmp_path: Path, rewards: list):
    files = {"callbacks": [LogFile(tmp_path)], "reward_funcs": None, "rollout_func": None}
    script = Script(rewards)
    files |= {"reward_funcs": script.reward_functions(), "rollout_func": script.rollout}
    trainer = trained(tiny_model, tmp_path, max_steps=4, trainer_arguments=files)
    assert all(entry.get("opo/target_fit") is None for entry in logged(trainer))
    log = read_lines(tmp_path / LOG)
    assert len(log) >= 4
    read(log, trainer.args.to_dict(), tmp_path / "again")


@pytest.mark.parametrize("value", [None, float("nan")], ids=str)
def test_progress_bar_accepts_it(value):
    bar, state = ProgressBar(), TrainerState(max_steps=2, is_world_process_zero=True)
    bar.on_train_begin(None, state, TrainerControl())
    names = ("reward", "validation/accuracy", "entropy", "grad_norm")
    bar.on_log(None, state, TrainerControl(), logs=dict.fromkeys(names, value))
    bar.on_train_end(None, state, TrainerControl())


def test_progress_bar_ends_with_the_budget_of_completions(tiny_model: str, tmp_path: Path):
    class Bar(ProgressBar):
        def on_train_end(self, args, state, control, **kwargs):
            self.shown = self.training_bar.n, self.training_bar.total
            super().on_train_end(args, state, control, **kwargs)

    bar = Bar()
    trained(tiny_model, tmp_path, max_steps=50, max_completions=20, trainer_arguments={"callbacks": [bar]})
    assert bar.shown[0] == bar.shown[1] < 50


def test_a_metric_named_step_does_not_hide_the_optimizer_step(tmp_path):
    state = TrainerState(global_step=3, is_world_process_zero=True)
    LogFile(tmp_path).on_log(None, state, None, logs={"reward": 1.0, "step": 0.25})
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 3, "reward": 1.0}\n'
