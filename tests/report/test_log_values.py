"""Readers of a log accept NaN, and `None`, which TRL logs if all values were NaN."""

import warnings

from helpers import Script, trained
from transformers import TrainerControl, TrainerState

from opo_trl.checks.files import read_lines
from opo_trl.launch.callbacks import LogFile, ProgressBar
from opo_trl.report.run_folder import LOG
from opo_trl.report.verdicts import judge


def test_run_without_any_reward_is_judged(tiny_model, tmp_path):
    script = Script([None] * 8)
    arguments = {"callbacks": [LogFile(tmp_path)], "rollout_func": script.rollout}
    arguments["reward_funcs"] = script.reward_functions()
    trainer = trained(tiny_model, tmp_path, max_steps=4, trainer_arguments=arguments)
    log = read_lines(tmp_path / LOG)
    assert len(log) >= 4
    assert all(entry.get("opo/target_fit") is None for entry in log)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # NumPy's, of a mean of nothing
        assert judge(log, trainer.args.to_dict())


def test_progress_bar_accepts_it():
    bar, state = ProgressBar(), TrainerState(max_steps=2, is_world_process_zero=True)
    bar.on_train_begin(None, state, TrainerControl())
    names = ("reward", "validation/accuracy", "entropy", "grad_norm")
    bar.on_log(None, state, TrainerControl(), logs=dict.fromkeys(names))
    bar.on_train_end(None, state, TrainerControl())


def test_a_metric_named_step_does_not_hide_the_optimizer_step(tmp_path):
    state = TrainerState(global_step=3, is_world_process_zero=True)
    LogFile(tmp_path).on_log(None, state, None, logs={"reward": 1.0, "step": 0.25})
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 3, "reward": 1.0}\n'
