"""Callbacks accept what trainers may log: also `None`, which TRL logs if all values were NaN."""

from transformers import TrainerControl, TrainerState

from opo_trl.launch.callbacks import LogFile, ProgressBar


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
