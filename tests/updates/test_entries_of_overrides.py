"""Entries that an override adds to a rollout arrive in the loss, each beside its completion."""

from pathlib import Path

import pytest
import torch
from canonical_run import COMPLETIONS_PER_STEP, Form, make_trainer
from launched_processes import launch, logs

from opo_trl import OPOTrainer
from opo_trl.resume.checkpoint import load_state


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
