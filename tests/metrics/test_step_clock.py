"""The phases of an optimizer step add up, and time between steps does not count."""

import time
from types import SimpleNamespace

import torch
from recording_trainers import logged, make_trainer

from opo_trl.metrics import step_clock
from opo_trl.metrics.log import PHASES
from opo_trl.metrics.step_clock import StepClock


PAUSE = 0.02  # seconds


def test_a_phase_inside_another_is_counted_once(monkeypatch):
    # Of the first step: update from 10, generate from 11, sync from 13, generate from 17, update from 25.
    seconds = iter([10.0, 11.0, 13.0, 17.0, 25.0, 41.0, 141.0, 145.0])
    monkeypatch.setattr(step_clock, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    clock = StepClock(torch.device("cpu"))
    clock.on_step_begin(None, None, None)
    with clock.phase("generate"), clock.phase("sync"):
        pass
    clock.on_optimizer_step(None, None, None)
    clock.on_step_begin(None, None, None)
    clock.on_optimizer_step(None, None, None)
    in_two_steps = dict.fromkeys(PHASES, 0.0) | {"generate": 2 + 8, "sync": 4, "update": 1 + 16 + 4}
    assert clock.seconds_per_step() == {phase: total / 2 for phase, total in in_two_steps.items()}


def test_every_step_of_a_run_logs_its_phases(tiny_model, tmp_path):
    def slow(prompts, **kwargs):
        time.sleep(PAUSE)
        return [0.0] * len(prompts)

    trainer = make_trainer(
        tiny_model, tmp_path, max_steps=2, steps_per_generation=4, trainer_arguments={"reward_funcs": slow}
    )
    trainer.train()
    first, second = logged(trainer)
    assert first["opo/time/score"] >= PAUSE
    for phase in ("generate", "anchor", "update"):
        assert first[f"opo/time/{phase}"] > 0
    update = second["opo/time/update"]
    assert [second[f"opo/time/{phase}"] for phase in PHASES] == [0, 0, 0, update, 0]
    assert update > 0
