"""Checkpoints of asynchronous training: prompts are trained once, whatever is killed."""

import json
import os
import signal
from pathlib import Path

import pytest
import scripted
from datasets import Dataset
from helpers import wait_until
from invariance.launch import launch, logs
from transformers import TrainerCallback

from opo_trl import AsyncOPOTrainer
from opo_trl.asynchronous.trainer import TRAINED
from opo_trl.rollout.checkpoint import last_complete


PROMPTS = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i}+1="}], "place": i} for i in range(16)])
UNSCORED = 3  # a prompt whose completions have no score
STEPS = 10


def lengths(completion_ids, place, **named):
    return [None if i == UNSCORED else float(len(ids)) for i, ids in zip(place, completion_ids, strict=True)]


class Noted(AsyncOPOTrainer):
    """Notes the groups of each micro-batch that is trained, and their prompts' places in the stream."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.notes.append((self.state.global_step + 1, sorted(self._groups_of_step)))
        return loss


class Notes(TrainerCallback):
    """Writes the groups of a step before its checkpoint is saved."""

    def __init__(self, trainer, file: Path):
        self.trainer, self.file = trainer, file

    def on_step_end(self, args, state, control, **kwargs):
        with self.file.open("a") as out:
            for step, groups in self.trainer.notes:
                out.write(json.dumps({"step": step, "groups": groups}) + "\n")
        self.trainer.notes.clear()


def make(model: str, folder: Path, reward=lengths, **options) -> Noted:
    # Six samples in a micro-batch, four in a group: groups are divided.
    args = scripted.config(
        folder,
        **{
            "per_device_train_batch_size": 6,
            "max_completion_length": 4,
            "max_steps": STEPS,
            "learning_rate": 0.01,
            "save_strategy": "steps",
            "save_steps": 1,
            "save_total_limit": 2,
            **options,
        },
    )
    trainer, _ = scripted.in_process(model, args, PROMPTS, reward, Noted, staleness=1)
    trainer.notes = []
    trainer.callback_handler.callbacks.insert(0, Notes(trainer, folder / "trained.jsonl"))
    return trainer


def trained_groups(folder: Path) -> list[tuple[int, list[int]]]:
    """Step and groups of all micro-batches that count: steps after a resumed checkpoint replace earlier ones."""
    kept: list[tuple[int, list[int]]] = []
    for line in (folder / "trained.jsonl").read_text().splitlines():
        note = json.loads(line)
        kept = [(step, groups) for step, groups in kept if step < note["step"]] + [(note["step"], note["groups"])]
    return kept


def check_each_prompt_once(folder: Path):
    """No group is trained in two places of the run, but by neighbouring steps that divide it; none is left out."""
    notes = trained_groups(folder)
    assert [step for step, _ in notes] == list(range(1, STEPS + 1))
    places: dict[int, list[int]] = {}
    for step, groups in notes:
        for group in groups:
            places.setdefault(group, []).append(step)
    assert all(steps[-1] - steps[0] <= 1 for steps in places.values()), places
    last = max(places)
    assert {*places} == {group for group in range(last + 1) if group % len(PROMPTS) != UNSCORED}


def test_weights_are_sent_after_the_last_pass_however_a_run_is_resumed(tiny_model, tmp_path):
    passes = []
    for steps in (3, 6):
        trainer = make(tiny_model, tmp_path, max_steps=steps, num_iterations=2, weight_sync_steps=2)
        trainer.train(resume_from_checkpoint="auto")
        passes = [entry["opo/pass"] for entry in trainer.state.log_history if "opo/pass" in entry]
    assert passes == [1, 2, 1, 2, 1, 2]


def test_ctrl_c_saves_and_the_run_goes_on(tiny_model, tmp_path):
    def interrupting(place, **columns):
        if 7 in place:
            os.kill(os.getpid(), signal.SIGINT)
        return lengths(place=place, **columns)

    with pytest.raises(KeyboardInterrupt):
        make(tiny_model, tmp_path, interrupting, save_steps=1000).train()
    assert 0 < int(Path(last_complete(str(tmp_path))).name.removeprefix("checkpoint-")) < STEPS
    train_or_resume(tiny_model, tmp_path)
    check_each_prompt_once(tmp_path)


def test_killed_runs_train_each_prompt_once(tiny_model, tmp_path):
    """`kill -9` at any time, twice."""
    folder = tmp_path / "run"
    for pattern in ("checkpoint-2*", "checkpoint-6*"):

        def kill(processes, pattern=pattern):
            wait_until(lambda: any(folder.glob(pattern)) or not processes[0].is_alive())
            processes[0].kill()

        killed = launch(train_or_resume, tiny_model, folder, folder=tmp_path, meanwhile=kill)
        assert killed == [-signal.SIGKILL], logs(tmp_path)
    assert launch(train_or_resume, tiny_model, folder, folder=tmp_path) == [0], logs(tmp_path)
    check_each_prompt_once(folder)
    # What was collated ahead is not counted as trained, and what was trained behind a gap is.
    trained = {group for _, groups in trained_groups(folder) for group in groups}
    assert json.loads((folder / f"checkpoint-{STEPS}" / TRAINED).read_text()) == sorted(trained)


def train_or_resume(model: str, folder: Path) -> None:
    make(model, folder).train(resume_from_checkpoint="auto")


def lengths_of_most(completion_ids, place, **named):
    return [None if i % 4 == 3 else float(len(ids)) for i, ids in zip(place, completion_ids, strict=True)]


def lengths_of_all(completion_ids, **named):
    return [float(len(ids)) for ids in completion_ids]


MOST = {group for group in range(16) if group % 4 != 3}


@pytest.mark.parametrize(
    ("reward", "batch_size", "groups", "passes"),
    [
        (lengths, 8, {*range(17)} - {UNSCORED}, 2),  # filled with a prompt of the next epoch
        (lengths_of_most, 6, MOST, 1),  # eight steps, which divide groups
        (lengths_of_all, 9, {*range(18)}, 1),  # the eighth step has a completion of the last group, and eight others
    ],
)
def test_an_epoch_trains_all_scored_completions_in_every_pass(
    tiny_model, tmp_path, reward, batch_size, groups, passes
):
    """Unscored prompts, the last among them, are not replaced by others. TRL's bound on the steps is below that."""
    options = {"max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": batch_size}
    for resumed in (None, True):  # what is finished trains no more
        trainer = make(tiny_model, tmp_path, reward, **options, num_iterations=passes, max_tool_calling_iterations=0)
        trainer.train(resume_from_checkpoint=resumed)
        assert trainer.state.global_step == len(groups) * scripted.G // batch_size * passes
    assert {group for _, step in trained_groups(tmp_path) for group in step} == groups
