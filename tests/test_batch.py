"""The entries of a rollout and of a micro-batch: what is done with all of them, and that an override's own arrive."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from canonical_run import COMPLETIONS_PER_STEP, Form, make_trainer
from launched_processes import launch, logs

from opo_trl import OPOTrainer
from opo_trl.batch import Batch, concatenate, resize, take
from opo_trl.contract import KNOWN_KEYS
from opo_trl.groups import own_samples
from opo_trl.resume.checkpoint import load_state


DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.mark.pages
def test_the_table_of_the_page_has_every_entry_of_a_batch():
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    _, section = page.split("## Entries of a batch")
    table, _, _ = section.partition("\n## ")
    names = []
    for first_cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
        names += re.findall(r"`(\w+)`", first_cell)
    assert sorted(names) == sorted(Batch.__annotations__)


def test_a_batch_has_every_entry_of_the_tested_releases_of_trl():
    assert Batch.__annotations__.keys() >= set(KNOWN_KEYS)


def entries_of(first: int, *, width: int) -> dict:
    """Two completions, with a tensor, a table and a list of a user's own that tell them apart."""
    numbers = torch.tensor([first, first + 1])
    column = numbers.unsqueeze(1)
    table = column.repeat(1, width)
    return {
        "prompt_ids": column,
        "prompt_mask": column,
        "completion_ids": table,
        "completion_mask": torch.ones_like(table),
        "rewards_per_func": column.float(),
        "tensor": numbers,
        "table": table.unsqueeze(2),
        "list": [str(first), str(first + 1)],
    }


def test_entries_of_a_users_own_travel_with_their_completions():
    batches = [entries_of(1, width=2), entries_of(3, width=3)]
    all_completions = concatenate(batches)
    batch = take(all_completions, np.array([3, 0]))
    assert batch["tensor"].tolist() == [4, 1]
    assert batch["list"] == ["4", "1"]
    assert batch["completion_ids"].tolist() == [[4, 4, 4], [1, 1, 0]]
    table = batch["table"].squeeze(2)
    assert torch.equal(table, batch["completion_ids"])


def test_tables_of_a_users_own_are_as_wide_as_the_completions():
    batch = resize(entries_of(1, width=2), prompt=2, completion=1)
    assert batch["prompt_ids"].tolist() == [[0, 1], [0, 2]]
    assert batch["table"].shape == (2, 1, 1)
    assert batch["rewards_per_func"].shape == (2, 1)


# Whole runs: an override's entries arrive in the loss, each beside its completion


# Two passes of three steps over each rollout, the second one over groups of two rollouts.
RUN = {"num_iterations": 2, "max_staleness": 1, "max_steps": 14, "save_strategy": "steps", "save_steps": 11}
IN_REPLAY = 11  # a step inside the second pass over the second rollout


def tokens(batch: dict) -> torch.Tensor:
    """Of the completions, 0 for padding, `[B, T]`; their sum tells completions apart."""
    return batch["completion_ids"] * batch["completion_mask"]


def texts(numbers: torch.Tensor) -> list[str]:
    return [str(number) for number in numbers.tolist()]


class WithTensors(OPOTrainer):
    """Adds a number and a table of numbers to each completion, and compares them with it in the loss."""

    n_compared = 0

    def _generate_and_score_completions(self, inputs):
        rollout = super()._generate_and_score_completions(inputs)
        rollout["number"] = tokens(rollout).sum(dim=1)
        rollout["table"] = tokens(rollout).unsqueeze(2)
        return rollout

    def _sample_losses(self, inputs, logps, entropies):
        assert torch.equal(inputs["number"], tokens(inputs).sum(dim=1))
        assert torch.equal(inputs["table"].squeeze(2), tokens(inputs))
        self.n_compared += len(inputs["number"])
        return super()._sample_losses(inputs, logps, entropies)


class WithList(WithTensors):
    """Adds a text, too, as an element of a list."""

    def _generate_and_score_completions(self, inputs):
        rollout = super()._generate_and_score_completions(inputs)
        rollout["texts"] = texts(rollout["number"])
        return rollout

    def _sample_losses(self, inputs, logps, entropies):
        assert inputs["texts"] == texts(inputs["number"])
        return super()._sample_losses(inputs, logps, entropies)


def form(processes: int) -> Form:
    several = {"processes": processes, "config": "multi_gpu"} if processes > 1 else {}
    return Form(f"{processes} processes", rows=2, **several, options=RUN)


def resume(trainer_class: type[WithTensors], model: str, folder: str, checkpoint: str) -> None:
    """In each of two processes: train from a checkpoint to the end, and write how many completions were compared."""
    trainer = make_trainer(form(2), model, Path(folder), trainer_class)
    trainer.train(resume_from_checkpoint=checkpoint)
    path = Path(folder) / f"compared_{trainer.accelerator.process_index}"
    path.write_text(str(trainer.n_compared))


@pytest.mark.parametrize("trainer_class", [WithTensors, WithList])
def test_entries_arrive_in_the_loss_also_of_a_resumed_run_on_two_processes(
    tiny_model: str, tmp_path: Path, trainer_class: type[WithTensors]
):
    whole = make_trainer(form(1), tiny_model, tmp_path / "one", trainer_class)
    whole.train()
    assert whole.n_compared == RUN["max_steps"] * COMPLETIONS_PER_STEP
    checkpoint = tmp_path / "one" / f"checkpoint-{IN_REPLAY}"
    state = load_state(checkpoint, 0)
    assert state["replay"]
    assert len(state["replay"]["rollouts"]) == 2
    n_left = (RUN["max_steps"] - IN_REPLAY) * COMPLETIONS_PER_STEP

    resumed = make_trainer(form(1), tiny_model, tmp_path / "resumed", trainer_class)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.n_compared == n_left

    folder = tmp_path / "two"
    arguments = (trainer_class, tiny_model, str(folder), str(checkpoint))
    statuses = launch(resume, *arguments, config="multi_gpu", processes=2, folder=folder)
    assert statuses == [0, 0], logs(folder)
    n_compared = [int(path.read_text()) for path in folder.glob("compared_*")]
    assert sum(n_compared) == n_left


def test_each_process_gets_its_part_of_columns_over_all():
    rollout = {"advantages": torch.zeros(3)}
    columns = {"target": torch.arange(6.0), "valid": torch.tensor([True, False, True, False, True, False])}
    parts = [own_samples(rollout, columns, SimpleNamespace(process_index=index)) for index in range(2)]
    for name, column in columns.items():
        assert torch.cat([part[name] for part in parts]).equal(column.float())
