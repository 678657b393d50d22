"""Zero-variance groups are replaced: by the right samples, up to the bound, and no prompt is lost."""

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from device_fields import BACKEND
from launched_processes import launch, logs
from recording_trainers import logged, make_trainer, metric
from scripted_rollouts import Script


G = 4


class ScriptByPrompt(Script):
    """Prompts are numbers; the completions of those in `dead` all have the same reward. Records the prompts."""

    def __init__(self, dead, **options):
        super().__init__(**options)
        self.dead = frozenset(dead)
        self.rounds: list[list[int]] = []  # the prompts of each

    def rollout(self, prompts, trainer):
        self.rounds.append([int(prompt) for prompt in prompts[::G]])
        return super().rollout(prompts, trainer)

    def reward_functions(self):
        def score(prompt: str, index: int) -> float:
            return 1.0 if int(prompt) in self.dead else float(index % 2)

        def reward(prompts, row, **kwargs):
            return [score(prompt, index) for prompt, index in zip(prompts, row, strict=True)]

        return [reward]


def run(model, folder, *, dead, train=True, **options):
    """A run of rollouts of 2 prompts × 4 completions; returns the trainer and the script."""
    script = ScriptByPrompt(dead)
    data = {"train_dataset": Dataset.from_dict({"prompt": [str(i) for i in range(24)]})}
    options = {"max_sampling_rounds": 4, **options}
    trainer = make_trainer(model, folder, script=script, trainer_arguments=data, **options)
    if train:
        trainer.train()
    return trainer, script


def prompts_of(trainer, rollout) -> list[int]:
    """The prompt of each group of a rollout."""
    return [read_prompt(trainer, rollout, index) for index in range(0, len(rollout.prompt_ids), G)]


def read_prompt(trainer, rollout, index: int) -> int:
    """The prompt of a completion."""
    return int(trainer.processing_class.decode(prompt_tokens(rollout, index)))


def prompt_tokens(rollout, index: int) -> list[int]:
    mask = rollout.prompt_mask[index].bool()
    return rollout.prompt_ids[index][mask].tolist()


# A rollout


def test_zero_variance_groups_are_replaced_and_no_prompt_of_an_epoch_is_lost_or_repeated(tiny_model, tmp_path):
    dead = {0, 3, 4, 9, 11, 17, 18, 22}
    trainer, script = run(tiny_model, tmp_path, dead=dead, max_steps=8, max_sampling_rounds=9)
    trained_on = [prompt for rollout in trainer.rollouts for prompt in prompts_of(trainer, rollout)]
    assert sorted(trained_on) == [prompt for prompt in range(24) if prompt not in dead]  # an epoch: each other once
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
    first_round, _, last_round = script.calls
    for i, row in enumerate([*first_round[:G], *last_round]):
        length = rollout.completion_mask[i].sum()
        assert rollout.completion_ids[i, :length].tolist() == row.completion
        assert prompt_tokens(rollout, i) == row.prompt
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
    assert len(set().union(*script.rounds)) == 12
    first, _ = logged(trainer)
    assert first["dynamic_sampling/frac_without_spread"] == 1.0
    assert first["grad_norm"] == 0.0


def test_variance_is_that_of_the_valid_completions(tiny_model, tmp_path):
    """All equal except for a completion that is masked as truncated: zero variance."""
    script = Script([1.0, 1.0, 1.0, 0.0, 0.1, 0.2, 0.3, 0.4], truncated=(3,))
    trainer = make_trainer(tiny_model, tmp_path, script=script, max_sampling_rounds=2, mask_truncated_completions=True)
    trainer.train()
    assert len(script.calls) == 2
    assert metric(trainer, "dynamic_sampling/frac_without_spread") == [0.5]  # the further group has the same rewards


def test_variance_is_that_of_the_weighted_rewards(tiny_model, tmp_path):
    script = Script([(1.0, float(row)) for row in range(8)], functions=2)
    trainer = make_trainer(tiny_model, tmp_path, script=script, max_sampling_rounds=2, reward_weights=[1.0, 0.0])
    trainer.train()
    assert metric(trainer, "dynamic_sampling/frac_without_spread") == [1.0]


# Several processes


def odd_processes(model: str, folder: str) -> None:
    """Rollouts of 4 groups of 3, on 2 processes: a single group cannot be divided, so two are generated."""
    script = ScriptByPrompt(dead=range(0, 40, 3))
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
        prompts = [read_prompt(trainer, rollout, index) for index in range(len(rollout.prompt_ids))]
        of_all = trainer.accelerator.gather(torch.tensor(prompts, device=trainer.accelerator.device))
        seen += of_all[::3].tolist()
    if trainer.accelerator.is_main_process:
        (Path(folder) / "seen.json").write_text(json.dumps(seen))


def test_groups_that_do_not_divide_by_processes_are_replaced(tiny_model, tmp_path):
    status = launch(odd_processes, tiny_model, str(tmp_path), config="multi_gpu", processes=2, folder=tmp_path)
    assert status == [0, 0], logs(tmp_path)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert len(seen) == len({*seen}) == 24
    assert not {*seen} & {*range(0, 40, 3)}
