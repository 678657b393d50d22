"""Accumulation windows of any length: every epoch that they do not divide ends with a short one."""

import pytest
import torch
from datasets import Dataset
from helpers import (
    EXACT,
    Reference,
    Script,
    assert_step_equals,
    distance,
    logged,
    make_trainer,
    norm,
    snapshot,
    trained,
)


GROUP = 2


@pytest.mark.parametrize(
    ("rows", "accumulation", "steps_per_generation", "prompts", "epochs", "iterations"),
    [(1, 4, 6, 9, 2, 1), (1, 1, 2, 3, 1, 2), (2, 3, 2, 8, 1, 2), (1, 5, 4, 5, 1, 2)],
)
def test_every_sample_trained_after_an_update_has_log_probabilities_from_before_it(
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
        trainer_arguments={"train_dataset": Dataset.from_dict({"prompt": [f"{i}+{i}=" for i in range(prompts)]})},
    )
    reference = Reference(trainer, script)
    for number, step in enumerate(trainer.steps):
        for part in step.batches:
            if int(part["opo_step"].min()) == number:
                continue
            for row, (k, i) in enumerate(zip(part["rollout"], part["row"], strict=True)):
                anchor = reference.anchor(int(k), int(i))
                assert torch.allclose(part["old_per_token_logps"][row, : len(anchor)].double(), anchor, atol=1e-4)
        expected = reference.step(number)
        if norm(expected.gradient) > 1e-3:
            assert_step_equals(step, expected)
        else:  # of a single completion, which the policy has made unlikely: it has almost no weight
            assert norm(step.gradient) < 1e-3
    assert sum(len(part["row"]) for step in trainer.steps for part in step.batches) == (
        len(script.calls) * rows * steps_per_generation * iterations
    )


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
        "trainer_arguments": {"train_dataset": Dataset.from_dict({"prompt": [f"{i}+{i}=" for i in range(9)]})},
    }
    rewards = [1, 1, 0, 1, 0.5, 0.5]  # two groups have zero gradient while the policy is the one that wrote them
    uninterrupted = trained(
        tiny_model, tmp_path / "uninterrupted", script=Script(rewards), save_strategy="steps", save_steps=1, **options
    )
    for step in (1, len(uninterrupted.steps) - 1):
        # The script counts its calls: a resumed one has made the earlier ones.
        script = Script(rewards)
        script.calls = [[]] * (1 + int(max(part["rollout"].max() for part in uninterrupted.steps[step - 1].batches)))
        resumed = make_trainer(tiny_model, tmp_path / str(step), script=script, **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "uninterrupted" / f"checkpoint-{step}"))
        end = snapshot(uninterrupted.model)
        moved = norm({name: end[name] - uninterrupted.initial[name] for name in end})
        assert distance(snapshot(resumed.model), end) < EXACT * moved
        skipped = [[entry["opo/frac_skipped"] for entry in logged(trainer)] for trainer in (uninterrupted, resumed)]
        assert skipped[0][-len(skipped[1]) :] == skipped[1]
        assert max(skipped[0]) > 0
