"""Accumulation windows of any length: every epoch that they do not divide ends with a short one."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from float64_reference import EXACT, Reference, assert_step_equals
from named_tensors import distance, norm, snapshot
from recording_trainers import RecordingOPO, logged, make_trainer, trained
from scripted_rollouts import Script


GROUP = 2


def sums(n_prompts: int) -> dict:
    """Arguments of a trainer of so many prompts."""
    return {"train_dataset": Dataset.from_dict({"prompt": [f"{i}+{i}=" for i in range(n_prompts)]})}


@pytest.mark.parametrize(
    ("rows", "accumulation", "steps_per_generation", "prompts", "epochs", "iterations"),
    [(1, 4, 6, 9, 2, 1), (1, 1, 2, 3, 1, 2), (2, 3, 2, 8, 1, 2), (1, 5, 4, 5, 1, 2)],
)
def test_every_completion_trained_after_an_update_has_log_probabilities_from_before_it(
    tiny_model, tmp_path, rows, accumulation, steps_per_generation, prompts, epochs, iterations
):
    script = Script()
    trainer = trained(
        tiny_model,
        tmp_path,
        script=script,
        per_device_train_batch_size=rows,
        num_generations=GROUP,
        steps_per_generation=steps_per_generation,
        gradient_accumulation_steps=accumulation,
        num_iterations=iterations,
        num_train_epochs=epochs,
        max_steps=-1,
        skip_inert_rows=True,
        learning_rate=0.05,
        trainer_arguments=sums(prompts),
    )
    reference = Reference(trainer, script)
    n_trained = 0
    for number, step in enumerate(trainer.steps):
        for micro_batch in step.batches:
            n_trained += len(micro_batch["row"])
            if int(micro_batch["opo_step"].min()) < number:
                assert_logps_are_those_of_the_anchor(micro_batch, reference)
        expected = reference.step(number)
        if norm(expected.gradient) > 1e-3:
            assert_step_equals(step, expected)
        else:  # of a single completion, which the policy has made unlikely: it has almost no weight
            assert norm(step.gradient) < 1e-3
    assert n_trained == len(script.calls) * rows * steps_per_generation * iterations


class Counting(RecordingOPO):
    """Notes how many completions each log entry is about."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.n_logged = []

    def _log_step(self, reports):
        self.n_logged.append(sum(len(report.tokens) for report in reports))
        super()._log_step(reports)


def trained_on_a_short_stream(model: str, folder: Path, script: Script, **options) -> RecordingOPO:
    """A trainer after three epochs of a stream of three rollouts, two of which are an optimizer step."""
    prompts = Dataset.from_dict({"prompt": ["0+0=", "1+1=", "2+2="]}).to_iterable_dataset()
    return trained(
        model,
        folder,
        script=script,
        per_device_train_batch_size=GROUP,
        num_generations=GROUP,
        steps_per_generation=1,
        gradient_accumulation_steps=2,
        max_steps=3,
        learning_rate=0.05,
        trainer_arguments={"train_dataset": prompts},
        **options,
    )


def test_an_optimizer_step_in_which_a_stream_ends_is_not_taken(tiny_model, tmp_path):
    """The third rollout of each epoch leaves nothing behind."""
    script = Script()
    trainer = trained_on_a_short_stream(tiny_model, tmp_path, script, trainer_class=Counting)
    assert trainer.n_logged == [2 * GROUP] * 3
    reference = Reference(trainer, script)
    for number, step in enumerate(trainer.steps):
        step.batches, step.losses = step.batches[-2:], step.losses[-2:]  # without those of the third rollout
        assert [int(batch["rollout"][0]) for batch in step.batches] == [3 * number, 3 * number + 1]
        assert_step_equals(step, reference.step(number))
        assert logged(trainer)[number]["loss"] == pytest.approx(sum(step.losses), abs=1e-6)


def test_the_loss_of_an_epoch_is_that_of_the_steps_that_were_taken(tiny_model, tmp_path):
    """Logged at the end of each epoch of such a stream, in which the last rollout is no step."""
    options = {"logging_strategy": "epoch", "beta": 0.5}  # without `beta`, the loss of such steps is 0
    trainer = trained_on_a_short_stream(tiny_model, tmp_path, Script(), **options)
    losses = [sum(step.losses[-2:]) for step in trainer.steps]  # without those of the third rollout
    entries = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert entries == pytest.approx(losses, abs=1e-6)
    assert losses[-1] > 1e-3


def assert_logps_are_those_of_the_anchor(micro_batch: dict, reference: Reference) -> None:
    """Of the policy from before the update, as the reference computes them."""
    columns = ("rollout", "row", "old_per_token_logps")
    for rollout, row, logps in zip(*(micro_batch[name] for name in columns), strict=True):
        anchor = reference.anchor(int(rollout), int(row))
        assert torch.allclose(logps[: len(anchor)].double(), anchor, atol=1e-4)


def first_calls(trainer: RecordingOPO, n_steps: int) -> list[list]:
    """Stands for the calls of a script that a run has made in its first steps."""
    last = max(micro_batch["rollout"].max() for micro_batch in trainer.steps[n_steps - 1].batches)
    return [[]] * (1 + int(last))


def test_run_resumed_in_an_epoch_of_short_windows_is_the_uninterrupted_one(tiny_model, tmp_path):
    """Transformers draws the first window of a resumed run before it restores its position."""
    options = {
        "per_device_train_batch_size": 1,
        "num_generations": GROUP,
        "steps_per_generation": 6,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 2,
        "max_steps": -1,
        "learning_rate": 0.05,
        "skip_inert_rows": True,
        "trainer_arguments": sums(9),
    }
    rewards = [1, 1, 0, 1, 0.5, 0.5]  # two groups have zero gradient while the policy is the one that wrote them
    uninterrupted = trained(
        tiny_model, tmp_path / "uninterrupted", script=Script(rewards), save_strategy="steps", save_steps=1, **options
    )
    for step in (1, len(uninterrupted.steps) - 1):
        # The script counts its calls: a resumed one has made the earlier ones.
        script = Script(rewards)
        script.calls = first_calls(uninterrupted, step)
        resumed = make_trainer(tiny_model, tmp_path / str(step), script=script, **options)
        checkpoint = tmp_path / "uninterrupted" / f"checkpoint-{step}"
        resumed.train(resume_from_checkpoint=str(checkpoint))
        end = snapshot(uninterrupted.model)
        moved = distance(end, uninterrupted.initial)
        assert distance(snapshot(resumed.model), end) < EXACT * moved
        expected = [entry["opo/frac_skipped"] for entry in logged(uninterrupted)]
        skipped = [entry["opo/frac_skipped"] for entry in logged(resumed)]
        assert skipped == expected[-len(skipped) :]
        assert max(expected) > 0
