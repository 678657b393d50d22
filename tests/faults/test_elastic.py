"""
A run that is killed inside a rollout and goes on with another number of processes trains as if nothing had happened.

The run is the canonical one with recorded completions. It saves every optimizer step, and one of its processes kills
itself at the end of one.
"""

import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from canonical_run import REWARDS, Form, make_trainer, weights
from launched_processes import launch, logs
from named_tensors import distance
from recording_trainers import without_times
from scripted_rollouts import PROMPTS
from transformers import TrainerCallback

from opo_trl.resume.checkpoint import load_state


TOLERANCE = 1e-4
# Two passes of three steps over each rollout, the second one over groups of it and the two before. Four rollouts, and
# entries of the log that cover three steps.
REPLAY = {"num_iterations": 2, "max_staleness": 2, "max_steps": 24, "logging_steps": 3}
IN_REPLAY = 17  # of step 16 to 18, the second pass over the third rollout


class Killed(TrainerCallback):
    """Kills the process at the end of a step."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(form: Form, model: str, folder: str, killed: tuple[int, int] | None) -> None:
    """In each process: train, from the last checkpoint if there is one; the `killed` process dies after a step."""
    trainer = make_trainer(form, model, Path(folder))
    if killed and killed[0] == trainer.accelerator.process_index:
        trainer.add_callback(Killed(killed[1] + 1))
    trainer.train(resume_from_checkpoint="auto")
    process, run = trainer.accelerator.process_index, Path(folder)
    (run / f"seed_{process}").write_text(str(torch.initial_seed()))
    trainer.save_model(str(run / "end"))
    if process == 0:
        (run / "log.json").write_text(json.dumps(trainer.state.log_history))


def on(processes: int, rollouts: str, model: str, rows: int = 2, config: str = "multi_gpu", **options) -> Form:
    options = {
        "save_strategy": "steps",
        "save_steps": 1,
        "rollouts": rollouts,
        "rollouts_model": model,
        **REPLAY,
        **options,
    }
    of_several = {"processes": processes, "config": config} if processes > 1 else {}
    return Form(f"{processes} processes", rows=rows, **of_several, options=options)


def start(form: Form, model: str, folder: Path, killed: tuple[int, int] | None = None) -> None:
    where = {"config": form.config, "processes": form.processes, "folder": folder}
    status = launch(train, form, model, str(folder), killed, **where)
    as_expected = -signal.SIGKILL in status if killed else not any(status)
    assert as_expected, f"{status}\n{logs(folder)}"


@pytest.fixture(scope="module")
def rollouts(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Six groups of eight random completions, with the rewards of the canonical run."""
    draw = random.Random(0)
    lines = []
    for place in range(48):
        group = place // 8
        length = draw.randint(3, 11)
        ids = [draw.randrange(3, 259) for _ in range(length)]
        ids.append(2)  # the token that ends a turn
        row = {"prompt": PROMPTS[group], "completion_ids": ids, "reward": REWARDS[place % 24], "group": group}
        lines.append(json.dumps(row))
    path = tmp_path_factory.mktemp("recorded") / "rollouts.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture(scope="module")
def whole(rollouts: str, tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the uninterrupted run, on one process."""
    folder = tmp_path_factory.mktemp("whole")
    start(on(1, rollouts, tiny_model), tiny_model, folder)
    return folder


def assert_same(folder: Path, reference: Path, model: str) -> None:
    """The log, relative to the largest value of each metric; the weights, relative to the way that they have gone."""
    log = log_of(folder)
    expected_log = log_of(reference)
    assert [entry.keys() for entry in log] == [entry.keys() for entry in expected_log]
    assert all(entry.get("grad_norm", 1) for entry in expected_log)
    for name in set().union(*expected_log):
        values = np.array([entry[name] for entry in log if name in entry])
        expected = np.array([entry[name] for entry in expected_log if name in entry])
        largest = abs(expected).max()
        assert abs(values - expected).max() <= TOLERANCE * largest, (name, values, expected)
    start = weights(Path(model))
    end = weights(reference / "end")
    assert distance(weights(folder / "end"), end) < TOLERANCE * distance(end, start)


def log_of(folder: Path) -> list[dict]:
    entries = json.loads((folder / "log.json").read_text())
    return [without_times(entry) for entry in entries]


MOVES = [
    (1, 2, "multi_gpu"),
    *(
        pytest.param(*move, marks=pytest.mark.slow)
        for move in ((2, 4, "multi_gpu"), (2, 1, "multi_gpu"), (4, 2, "multi_gpu"), (2, 4, "fsdp2"), (4, 2, "fsdp2"))
    ),
]


@pytest.mark.parametrize(("before", "after", "config"), MOVES)
def test_run_with_replay_goes_on_with_other_processes(whole, rollouts, tiny_model, tmp_path, before, after, config):
    killed = tmp_path / "killed"
    start(on(before, rollouts, tiny_model, config=config), tiny_model, killed, (before - 1, IN_REPLAY))
    state = load_state(killed / f"checkpoint-{IN_REPLAY}", 0)
    assert len(state["replay"]["rollouts"]) == 3
    assert state["micro_batches"]
    start(on(after, rollouts, tiny_model, config=config), tiny_model, killed)
    output = (killed / "process_0.log").read_text()
    cuts = f"processes {before} → {after}, gradient_accumulation_steps {4 // before} → {4 // after}"
    assert f"Resuming with {cuts}" in output
    assert len({path.read_text() for path in killed.glob("seed_*")}) == after
    assert_same(killed, whole, tiny_model)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 4), (2, 1)])
def test_samples_that_were_left_out_of_a_step_stay_out(tiny_model, tmp_path, before, after):
    """
    Of a rollout that is used once, a checkpoint has nothing but micro-batches, of those of its samples whose advantage
    is not 0. On four processes, one has fewer than others, but as many micro-batches.
    """
    unlike_opo = {"chi2_radius": None, "adaptive_temperature": False, "anchor_correction": "absorbed", "beta": 0.0}
    saving = {"save_strategy": "steps", "save_steps": 1}
    options = {"objective": "dapo", **unlike_opo, **saving, "num_iterations": 1, "max_steps": 3}
    one, other = (
        Form("DAPO", rows=1, processes=n, config="multi_gpu" if n > 1 else None, options=options)
        for n in (before, after)
    )
    start(one, tiny_model, tmp_path / "whole")
    killed = tmp_path / "killed"
    start(one, tiny_model, killed, (before - 1, 1))
    skipped = [
        batch.get("opo_skipped") for call in load_state(killed / "checkpoint-1", 0)["micro_batches"] for batch in call
    ]
    assert any(each is not None and len(each) for each in skipped)
    start(other, tiny_model, killed)
    assert_same(killed, tmp_path / "whole", tiny_model)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"config": "zero1"}, {"config": "fsdp2", "sync_ref_model": True}], ids=str)
def test_shards_that_cannot_be_divided_are_rejected(rollouts, tiny_model, tmp_path, options):
    """DeepSpeed itself would name no fix, and for ZeRO-3 nothing at all."""
    options = {**options, "max_steps": 1, "save_steps": 1}
    start(on(2, rollouts, tiny_model, **options), tiny_model, tmp_path)
    form = on(4, rollouts, tiny_model, **options)
    status = launch(train, form, tiny_model, str(tmp_path), None, config=form.config, processes=4, folder=tmp_path)
    assert any(status)
    message = "checkpoint-1' holds shards of 2 processes, but this run has 4. Set `num_processes` to 2."
    assert message in logs(tmp_path)
