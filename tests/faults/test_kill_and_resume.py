"""A run that is killed and resumed, again and again, is bitwise identical to an uninterrupted one."""

import random
import signal
from pathlib import Path

import pytest

from opo_trl.rollout import checkpoint

from .kill_and_resume import FSDP2, ONE, QUICK, differences, random_kill, start, train_without_state


@pytest.mark.parametrize(
    "form", [*QUICK, pytest.param(FSDP2, marks=pytest.mark.slow)], ids=lambda form: form.name.replace(", ", "-")
)
def test_a_run_killed_at_random_writes_repeats_itself(tiny_model: str, tmp_path: Path, form):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    start(form, tiny_model, whole)
    draw, steps = random.Random(form.name), []
    for _ in range(2):
        # After a checkpoint, and so that there is something left to kill.
        assert -signal.SIGKILL in start(form, tiny_model, killed, random_kill(form, whole, draw, share=(0.2, 0.5)))
        last = checkpoint.last_complete(str(killed))
        steps += [checkpoint.load_state(Path(last), 0)["position"]] if last else []
    start(form, tiny_model, killed)
    assert differences(killed, whole) == []
    assert any(steps), "none was resumed inside a rollout"


def test_without_the_rollout_state_the_run_is_another(tiny_model: str, tmp_path: Path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    start(ONE, tiny_model, whole)
    assert start(ONE, tiny_model, killed, (0, int((whole / "writes_0").read_text()) // 2)) == [-signal.SIGKILL]
    start(ONE, tiny_model, killed, target=train_without_state)
    assert differences(killed, whole) != []
