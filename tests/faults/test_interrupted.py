"""Ctrl-C while a trainer trains that was made in Python."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launched_processes import launch, logs
from named_tensors import same_weights, snapshot
from recording_trainers import Recording, make_trainer, trained, without_times
from scripted_rollouts import even_tokens
from started_programs import wait_until
from transformers import TrainerCallback

from opo_trl.command.signals import StopOnSignal, StoppedBySignal
from opo_trl.resume.checkpoint import fault, last_complete


def run(model: str, folder: Path, meanwhile: Callable[[], None] = lambda: None, **options) -> Recording:
    """A trainer whose second rollout, for the steps 3 and 4, does something else while it is scored."""
    calls = []

    def reward(**columns) -> list[float]:
        calls.append(None)
        if len(calls) == 2:
            meanwhile()
        return even_tokens(**columns)

    arguments = {"reward_funcs": reward, "rollout_func": None}
    return make_trainer(model, folder, trainer_arguments=arguments, num_iterations=2, max_steps=5, **options)


def press(number: int = signal.SIGINT, times: int = 1, pause: float = 0.0) -> None:
    for _ in range(times):
        os.kill(os.getpid(), number)
        time.sleep(pause)


class Saves(TrainerCallback):
    """The steps of all saves."""

    def __init__(self):
        self.steps = []

    def on_save(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)


def test_the_step_is_finished_and_saved_once_and_the_trainer_goes_on(tiny_model: str, tmp_path: Path, capfd):
    whole = run(tiny_model, tmp_path / "whole")
    whole.train()
    # A launcher passes on what the terminal has sent to this process already.
    trainer, saves = run(tiny_model, tmp_path / "run", lambda: press(times=2)), Saves()
    trainer.callback_handler.callbacks.insert(0, saves)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert saves.steps == [3]
    assert last_complete(str(tmp_path / "run")) == str(tmp_path / "run" / "checkpoint-3")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    out, error = capfd.readouterr()
    assert error.count("SIGINT: the run saves a checkpoint after this optimizer step and ends. Another Ctrl-C") == 1
    assert "Ended by SIGINT after optimizer step 3." in out
    trainer.train(resume_from_checkpoint="last")
    one, other = snapshot(whole.model), snapshot(trainer.model)
    assert same_weights(one, other)
    logs_of_both = [[without_times(entry) for entry in each.state.log_history] for each in (whole, trainer)]
    assert logs_of_both[0] == logs_of_both[1]


@pytest.mark.parametrize("under_torchrun", [False, True])
def test_another_one_ends_it_at_once(tiny_model: str, tmp_path: Path, monkeypatch, under_torchrun: bool):
    """Under torch's launcher, which passes on the first one, however late Python handles it, the third."""
    if under_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    trainer = run(tiny_model, tmp_path, lambda: press(times=2 + under_torchrun, pause=1.1))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.global_step == 2
    assert last_complete(str(tmp_path)) is None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_that_torchs_launcher_passes_on_late_does_not_stop_the_save(tiny_model: str, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    trainer = run(tiny_model, tmp_path, lambda: press(times=2, pause=1.1))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert last_complete(str(tmp_path)) == str(tmp_path / "checkpoint-3")


def test_a_handler_of_ones_own_stays(tiny_model: str, tmp_path: Path):
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        trainer = run(tiny_model, tmp_path, press)
        trainer.train()
    finally:
        signal.signal(signal.SIGINT, before)
    assert received == [signal.SIGINT]
    assert trainer.state.global_step == 5
    assert last_complete(str(tmp_path)) is None


def test_a_thread_trains_without_handlers(tiny_model: str, tmp_path: Path):
    trainer = run(tiny_model, tmp_path)
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert trainer.state.global_step == 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_with_a_context_of_its_own_it_ends_by_status(tiny_model: str, tmp_path: Path, number: signal.Signals):
    """And saves once, whatever else comes."""
    trainer, saves = run(tiny_model, tmp_path, lambda: press(number, times=2, pause=1.1)), Saves()
    trainer.callback_handler.callbacks.insert(0, saves)
    with pytest.raises(StoppedBySignal) as stopped, StopOnSignal(trainer):
        trainer.train()
    assert stopped.value.code == 128 + number
    assert saves.steps == [3]
    assert fault(tmp_path / "checkpoint-3") is None


def train(model: str, folder: str) -> None:
    """In each of two processes, until Ctrl-C."""
    options = {"max_steps": 1000, "per_device_train_batch_size": 2, "logging_steps": 1000, "ddp_backend": "gloo"}
    started = Path(folder) / f"started_{os.environ['RANK']}"
    with pytest.raises(KeyboardInterrupt):
        trained(model, Path(folder), trainer_arguments={"callbacks": [Started(started)]}, **options)


class Started(TrainerCallback):
    def __init__(self, path: Path):
        self.path = path

    def on_step_end(self, args, state, control, **kwargs):
        self.path.touch()


@pytest.mark.slow
def test_ctrl_c_in_one_process_stops_all(tiny_model: str, tmp_path: Path):
    def stop(processes: list) -> None:
        wait_until(lambda: len([*tmp_path.glob("started_*")]) == 2)
        os.kill(processes[-1].pid, signal.SIGINT)

    where = {"config": "multi_gpu", "processes": 2, "folder": tmp_path, "meanwhile": stop}
    assert launch(train, tiny_model, str(tmp_path), **where) == [0, 0], logs(tmp_path)
    (saved,) = tmp_path.glob("checkpoint-*")
    assert fault(saved) is None
