"""Zero-variance groups are replaced: by the right samples, up to the bound, and no prompt is lost."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from helpers import BACKEND, Script, logged, make_trainer
from invariance.launch import launch, logs


G = 4


class ScriptByPrompt(Script):
    """Prompts are numbers; the completions of those in `dead` all have the same reward. Records the prompts."""

    dead: frozenset[int] = frozenset()

    def rollout(self, prompts, trainer):
        self.rounds = [*getattr(self, "rounds", []), [int(prompt) for prompt in prompts[::G]]]
        return super().rollout(prompts, trainer)

    def reward_functions(self):
        def reward(prompts, row, **kwargs):
            return [1.0 if int(prompt) in self.dead else float(i % 2) for i, prompt in zip(row, prompts, strict=True)]

        return [reward]


def run(model, folder, *, dead, train=True, **options):
    """A run of rollouts of 2 prompts × 4 completions; returns the trainer and the script."""
    script = ScriptByPrompt()
    script.dead = frozenset(dead)
    data = {"train_dataset": Dataset.from_dict({"prompt": [str(i) for i in range(24)]})}
    options = {"max_sampling_rounds": 4, **options}
    trainer = make_trainer(model, folder, script=script, trainer_arguments=data, **options)
    if train:
        trainer.train()
    return trainer, script


def prompts_of(trainer, rollout) -> list[int]:
    """The prompt of each group of a rollout."""
    rows = zip(rollout.prompt_ids[::G], rollout.prompt_mask[::G], strict=True)
    return [int(trainer.processing_class.decode(ids[mask.bool()])) for ids, mask in rows]


# A rollout


def test_zero_variance_groups_are_replaced_and_no_prompt_of_an_epoch_is_lost_or_repeated(tiny_model, tmp_path):
    dead = {0, 3, 4, 9, 11, 17, 18, 22}
    trainer, script = run(tiny_model, tmp_path, dead=dead, max_steps=8, max_sampling_rounds=9)
    trained_on = [prompt for rollout in trainer.rollouts for prompt in prompts_of(trainer, rollout)]
    assert len(trained_on) == 8 * 2
    assert Counter(trained_on) == Counter(set(range(24)) - dead)  # an epoch: each of the 16 others once
    asked_for = [prompt for prompts in script.rounds for prompt in prompts]
    assert len(asked_for) == len(set(asked_for)) >= 22  # the epoch may end on dead prompts


def test_replaced_samples_are_those_of_the_further_round(tiny_model, tmp_path):
    plain, _ = run(tiny_model, tmp_path / "1", dead=(), train=False)
    order = plain._prompt_stream.draw(6)
    dead = {order[1], order[2]}  # the second place, and the first prompt offered to it
    trainer, script = run(tiny_model, tmp_path / "2", dead=dead, max_steps=1, steps_per_generation=2)
    assert script.rounds == [order[:2], [order[2]], [order[3]]]
    rollout = trainer.rollouts[0]
    assert prompts_of(trainer, rollout) == [order[0], order[3]]
    kept, replaced = script.calls[0][:G], script.calls[2]
    for i, row in enumerate([*kept, *replaced]):
        tokens = rollout.completion_mask[i].sum()
        assert rollout.completion_ids[i, :tokens].tolist() == row.completion
        assert rollout.prompt_ids[i][rollout.prompt_mask[i].bool()].tolist() == row.prompt
    assert rollout.num_items_in_batch == rollout.completion_mask.sum()
    assert rollout.opo_target[G:].abs().min() > 0.1


def test_metrics_are_those_of_the_first_round_and_counts_those_of_all(tiny_model, tmp_path):
    plain, _ = run(tiny_model, tmp_path / "1", dead=(), train=False)
    order = plain._prompt_stream.draw(6)
    trainer, _ = run(tiny_model, tmp_path / "2", dead=order[:3], max_steps=2)
    first, second = logged(trainer)
    assert first["reward"] == 1.0  # the first two prompts have zero variance
    assert first["frac_reward_zero_std"] == 1.0
    assert first["dynamic_sampling/rounds"] == 3
    assert first["dynamic_sampling/frac_replaced"] == 1.0
    assert first["dynamic_sampling/frac_without_spread"] == 0.0
    assert first["dynamic_sampling/epoch"] == pytest.approx(5 / 24)
    assert (first["completions/generated"], second["completions/generated"]) == (5 * G, 7 * G)
    assert second["reward"] == 0.5
    assert first["num_tokens"] < second["num_tokens"]


def test_bound_on_the_rounds_is_kept(tiny_model, tmp_path):
    trainer, script = run(tiny_model, tmp_path, dead=range(24), max_steps=2, max_sampling_rounds=3)
    assert [len(prompts) for prompts in script.rounds] == [2] * 6
    assert len({prompt for prompts in script.rounds for prompt in prompts}) == 12
    assert logged(trainer)[0]["dynamic_sampling/frac_without_spread"] == 1.0
    assert logged(trainer)[0]["grad_norm"] == 0.0


def test_variance_is_that_of_the_valid_completions(tiny_model, tmp_path):
    """All equal except for a completion that is masked as truncated: zero variance."""
    script = Script([1.0, 1.0, 1.0, 0.0, 0.1, 0.2, 0.3, 0.4], truncated=(3,))
    trainer = make_trainer(tiny_model, tmp_path, script=script, max_sampling_rounds=2, mask_truncated_completions=True)
    trainer.train()
    assert len(script.calls) == 2
    assert logged(trainer)[0]["dynamic_sampling/frac_without_spread"] == 0.5  # the further group has the same rewards


# Several processes


def odd_processes(model: str, folder: str) -> None:
    """Rollouts of 4 groups of 3, on 2 processes: a single group cannot be divided, so two are generated."""
    script = ScriptByPrompt()
    script.dead = frozenset(range(0, 40, 3))
    data = Dataset.from_dict({"prompt": [str(i) for i in range(40)]})
    trainer = make_trainer(
        model,
        Path(folder),
        script=script,
        trainer_arguments={"train_dataset": data},
        num_generations=3,
        per_device_train_batch_size=6,
        gradient_accumulation_steps=1,
        max_steps=6,
        max_sampling_rounds=9,
        ddp_backend=BACKEND,
    )
    trainer.train()
    seen = []
    for rollout in trainer.rollouts:
        rows = zip(rollout.prompt_ids, rollout.prompt_mask, strict=True)
        prompts = [int(trainer.processing_class.decode(ids[mask.bool()])) for ids, mask in rows]
        seen += trainer.accelerator.gather(torch.tensor(prompts, device=trainer.accelerator.device)).tolist()[::3]
    if trainer.accelerator.is_main_process:
        (Path(folder) / "seen.json").write_text(json.dumps(seen))


def test_groups_that_do_not_divide_by_processes_are_replaced(tiny_model, tmp_path):
    status = launch(odd_processes, tiny_model, str(tmp_path), config="multi_gpu", processes=2, folder=tmp_path)
    assert status == [0, 0], logs(tmp_path)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert len(seen) == len({*seen}) == 24
    assert {*seen} <= {i for i in range(40) if i % 3}
