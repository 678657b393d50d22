"""The phases of an optimizer step add up, and time between steps does not count."""

import time

import pytest
import torch
from recording_trainers import logged, make_trainer

from opo_trl.metrics.log import PHASES
from opo_trl.metrics.step_clock import StepClock


PAUSE = 0.02  # seconds, far more than the clock itself takes


def test_a_phase_inside_another_is_counted_once():
    clock = StepClock(torch.device("cpu"))
    began = time.perf_counter()
    clock.on_step_begin(None, None, None)
    with clock.phase("generate"):
        time.sleep(PAUSE)
        with clock.phase("sync"):
            time.sleep(2 * PAUSE)
    clock.on_optimizer_step(None, None, None)
    whole = time.perf_counter() - began
    seconds = clock.seconds_per_step()
    assert seconds.keys() == set(PHASES)
    assert PAUSE <= seconds["generate"] < 2 * PAUSE <= seconds["sync"]
    assert sum(seconds.values()) == pytest.approx(whole, abs=PAUSE / 2)


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
