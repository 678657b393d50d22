"""Overrides act as in a subclass of GRPOTrainer: the examples of docs/subclassing.md, and more."""

import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from helpers import Recording, RecordingOPO, Script, distance, logged, make_trainer, norm, snapshot
from transformers import TrainerCallback

from opo_trl import OPOTrainer


PAGE = Path(__file__).resolve().parents[1] / "docs" / "subclassing.md"
REWARDS = [0.3, 1.7, 2.2, 0.1, 1.0, 0.6, 0.2, 0.7]


def classes_of_the_page() -> dict[str, type]:
    known = {"OPOTrainer": OPOTrainer, "__name__": "docs.subclassing"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, known)
    return known


def example(name: str) -> type[OPOTrainer]:
    """A trainer of the page that records what it trains on."""
    return type(name, (Recording, classes_of_the_page()[name]), {})


def trained(model, folder, trainer_class, *, rewards=REWARDS, **options):
    trainer = make_trainer(model, folder, trainer_class=trainer_class, script=Script(rewards), **options)
    trainer.train()
    return trainer


def same(one, other) -> bool:
    return all(torch.equal(tensor, snapshot(other.model)[name]) for name, tensor in snapshot(one.model).items())


# Rewards


@pytest.mark.parametrize("rounds", [1, 3])
def test_rewards_changed_or_made_by_a_subclass_are_those_trained_on(tiny_model, tmp_path, rounds):
    wanted = [0.0, 1.0, None, 0.5, 2.0, 2.0, 2.0, 2.0]  # one unscored; a group that dynamic sampling replaces

    def table(trainer, n: int) -> torch.Tensor:
        rewards = [torch.nan if r is None else r for r in wanted]
        return torch.tensor(rewards, device=trainer.accelerator.device)[:n, None]

    class Changed(RecordingOPO):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list) * 0 + table(
                self, len(inputs)
            )

    class Made(RecordingOPO):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            return table(self, len(inputs))

    options = {"max_sampling_rounds": rounds, "max_steps": 2}
    plain = trained(tiny_model, tmp_path / "0", RecordingOPO, rewards=wanted, **options)
    for name, trainer_class in (("1", Changed), ("2", Made)):
        assert same(trained(tiny_model, tmp_path / name, trainer_class, **options), plain)
    assert not same(trained(tiny_model, tmp_path / "3", RecordingOPO, **options), plain)
    assert "_calculate_rewards" not in vars(plain)


def test_example_of_rewards(tiny_model, tmp_path):
    trainer = trained(tiny_model, tmp_path, example("HalvedReward"), scale_rewards="none", max_steps=2)
    whole, halved = (rollout.advantages for rollout in trainer.rollouts)
    assert torch.allclose(halved, whole / 2)


# Advantages


def test_target_is_made_of_the_advantages_that_a_subclass_returns(tiny_model, tmp_path):
    class Negated(RecordingOPO):
        def _generate_and_score_completions(self, inputs):
            rollout = super()._generate_and_score_completions(inputs)
            return rollout | {"advantages": -rollout["advantages"]}

    options = {"max_sampling_rounds": 2, "steps_per_generation": 4, "max_steps": 3}
    negated = trained(tiny_model, tmp_path / "1", Negated, rewards=[-r for r in REWARDS], **options)
    plain = trained(tiny_model, tmp_path / "2", RecordingOPO, **options)
    moved = norm({name: tensor - plain.initial[name] for name, tensor in snapshot(plain.model).items()})
    assert distance(snapshot(negated.model), snapshot(plain.model)) < 1e-3 * moved


def test_rollout_made_by_a_subclass_is_trained_on(tiny_model, tmp_path):
    """With only the entries that TRL's loss reads; a sample whose advantage is NaN has no effect."""

    class Own(RecordingOPO):
        def _generate_and_score_completions(self, inputs):
            rollout = super()._generate_and_score_completions(inputs)
            names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
            own = {name: rollout[name] for name in names}
            own["advantages"] = own["advantages"].index_fill(0, torch.tensor([1], device=self.model.device), torch.nan)
            return own

    trainer = trained(tiny_model, tmp_path, Own, steps_per_generation=4, max_steps=2)
    assert trainer.rollouts[0].opo_valid.tolist() == [i != 1 for i in range(16)]
    assert all(tensor.isfinite().all() for tensor in snapshot(trainer.model).values())
    assert norm(trainer.steps[0].gradient) > 0.01


def test_example_of_advantages(tiny_model, tmp_path):
    trainer = trained(tiny_model, tmp_path, example("NoPush"))
    advantages, target = trainer.rollouts[0].advantages, trainer.rollouts[0].opo_target
    assert (advantages == 0).sum() > 2
    for group in range(2):
        rows = slice(4 * group, 4 * group + 4)
        below = advantages[rows] == 0
        assert len(target[rows][below].unique()) == 1  # all that are not better are treated alike


# The target


def test_example_of_the_target(tiny_model, tmp_path):
    rewards = [0.0, 1.0, None, 0.5, 2.0, 2.0, 2.0, 2.0]
    lower, plain = (
        trained(tiny_model, tmp_path / kind.__name__, kind, rewards=rewards).rollouts[0]
        for kind in (example("PessimisticTrainer"), RecordingOPO)
    )
    torch.testing.assert_close(lower.opo_target, plain.opo_target - 0.1 * plain.opo_valid)
    assert lower.opo_target[2] == 0


# The loss


def several_parts(trainer) -> bool:
    return any(len(step.batches) > trainer.args.gradient_accumulation_steps for step in trainer.steps)


PARTS = {"max_tokens_per_micro_batch": 60, "steps_per_generation": 4, "max_steps": 2}


@pytest.mark.parametrize("method", ["compute_loss", "_compute_loss"])
def test_scaled_loss_scales_all_of_the_gradient(tiny_model, tmp_path, method):
    seen, factor = [], 0.5

    def scaled(self, model, inputs, *others, **named):
        seen.append(inputs)
        return factor * getattr(super(Scaled, self), method)(model, inputs, *others, **named)

    Scaled = type("Scaled", (RecordingOPO,), {method: scaled})
    trainer = trained(tiny_model, tmp_path / "1", Scaled, **PARTS)
    plain = trained(tiny_model, tmp_path / "2", RecordingOPO, **PARTS)
    assert several_parts(plain)
    gradient, whole = trainer.steps[0].gradient, plain.steps[0].gradient
    assert distance(gradient, {name: factor * g for name, g in whole.items()}) < 1e-5 * norm(whole)
    assert all(isinstance(inputs, dict) and inputs["prompt_ids"].ndim == 2 for inputs in seen)
    assert len(seen) == sum(len(step.batches) for step in trainer.steps)


def test_examples_of_the_loss(tiny_model, tmp_path):
    plain = trained(tiny_model, tmp_path / "0", RecordingOPO, **PARTS)
    scaled = trained(tiny_model, tmp_path / "1", example("Scaled"), **PARTS)
    assert distance(scaled.steps[0].gradient, {n: g / 2 for n, g in plain.steps[0].gradient.items()}) < 1e-4
    # With the default: samples that OPO's own loss would skip have a gradient in this one.
    decayed = trained(tiny_model, tmp_path / "2", example("WithDecay"), skip_inert_rows=True, **PARTS)
    weight = plain.initial["lm_head.weight"]
    for name, gradient in decayed.steps[0].gradient.items():
        expected = plain.steps[0].gradient[name] + (2 * weight / weight.numel() if name == "lm_head.weight" else 0)
        assert torch.allclose(gradient, expected, atol=1e-5)


@pytest.mark.parametrize("method", ["compute_loss", "_compute_loss"])
def test_loss_that_never_calls_super_is_trained(tiny_model, tmp_path, method):
    """REINFORCE, as in a subclass of GRPOTrainer; samples with zero gradient in OPO are computed as well."""

    def reinforce(self, model, inputs, *others, **named):
        seen.append(inputs)
        logps, _, _ = self._token_logps(model, inputs, compute_entropy=True)
        kept = inputs["completion_mask"] * inputs["weight"]
        rows = self.args.per_device_train_batch_size * self.current_gradient_accumulation_steps
        return -(logps * kept).sum() / rows

    class Weighted(RecordingOPO):
        def _generate_and_score_completions(self, inputs):
            rollout = super()._generate_and_score_completions(inputs)
            rollout["weight"] = torch.rand(rollout["completion_mask"].shape)  # its own entry, with a column per token
            return rollout

    seen: list[dict] = []
    own = type("Own", (Weighted,), {method: reinforce})
    rewards = [1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0]  # a zero-variance group, which OPO would skip
    trainer = trained(tiny_model, tmp_path, own, rewards=rewards, skip_inert_rows=True, **PARTS)
    assert all(inputs["weight"].shape == inputs["completion_mask"].shape for inputs in seen)
    assert sum(len(inputs["weight"]) for inputs in seen) == 16
    assert norm(trainer.steps[0].gradient) > 0.1
    assert "opo/chi2" not in logged(trainer)[0]


def test_every_pass_gives_log_probabilities_to_an_override(tiny_model, tmp_path):
    class Bounded(RecordingOPO):
        def _get_per_token_logps_and_entropies(self, *args, **options):
            logps, *others = super()._get_per_token_logps_and_entropies(*args, **options)
            return logps.clamp(min=-30.0), *others

    own = snapshot(trained(tiny_model, tmp_path / "own", Bounded, **PARTS).model)
    package = snapshot(trained(tiny_model, tmp_path / "package", RecordingOPO, **PARTS).model)
    assert all(torch.allclose(own[name], package[name], atol=1e-6) for name in package)


def test_behaviour_policy_that_a_subclass_sets_is_used(tiny_model, tmp_path):
    class Anchored(RecordingOPO):
        def _generate_and_score_completions(self, inputs):
            rollout = super()._generate_and_score_completions(inputs)
            rollout["old_per_token_logps"] = torch.full(rollout["completion_ids"].shape, -5.0)
            return rollout

    trainer = trained(tiny_model, tmp_path, Anchored, skip_inert_rows=True, **PARTS)
    for step, entry in zip(trainer.steps, logged(trainer), strict=True):
        assert all((part["old_per_token_logps"] == -5).all() for part in step.batches)
        assert entry["opo/log_ratio/absmax"] > 1
        assert entry["opo/frac_skipped"] == 0  # a sample without a target is pulled back to the behaviour policy


def test_rollout_is_made_with_the_weights_that_a_schedule_free_optimizer_trains(tiny_model, tmp_path):
    """Transformers switches such an optimizer to other weights for an evaluation, and back in its training step."""
    modes = []

    class TwoModes(torch.optim.SGD):
        mode = "train"

        def train(self):
            self.mode = "train"

        def eval(self):
            self.mode = "eval"

    class Watched(RecordingOPO):
        def _generate_and_score_completions(self, inputs):
            if self.model.training:
                modes.append(getattr(self.optimizer, "optimizer", self.optimizer).mode)
            return super()._generate_and_score_completions(inputs)

        def create_optimizer(self, model=None):
            self.optimizer = TwoModes(self.model.parameters(), lr=0.1)
            return self.optimizer

    data = {"eval_dataset": Dataset.from_dict({"prompt": ["1", "2"]})}
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "trainer_arguments": data}
    trained(tiny_model, tmp_path, Watched, max_steps=3, **evaluated)
    assert modes == ["train"] * 3


def test_training_step_gets_prompts_and_returns_the_loss_of_its_micro_batches(tiny_model, tmp_path):
    calls = []

    class Counted(RecordingOPO):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, inputs, num_items_in_batch)
            calls.append((inputs, loss))
            return loss

    trainer = trained(tiny_model, tmp_path, Counted, **PARTS)
    assert len(calls) == 2 * trainer.args.gradient_accumulation_steps
    assert all(len(prompts) == 16 and "prompt" in prompts[0] for prompts, _ in calls)
    losses = [loss.item() for _, loss in calls]
    assert sum(losses[:2]) == pytest.approx(sum(trainer.steps[0].losses), abs=1e-6)


# The order of prompts


def prompts_asked_for(model, folder, trainer_class, **options) -> list[int]:
    class Asked(Script):
        def rollout(self, prompts, trainer):
            asked.extend(int(prompt) for prompt in prompts[::4])
            return super().rollout(prompts, trainer)

    asked: list[int] = []
    data = Dataset.from_dict({"prompt": [str(i) for i in range(6)]})
    make_trainer(
        model,
        folder,
        trainer_class=trainer_class,
        script=Asked(),
        trainer_arguments={"train_dataset": data},
        max_steps=4,
        **options,
    ).train()
    return asked


def test_example_of_the_order_of_prompts(tiny_model, tmp_path):
    assert prompts_asked_for(tiny_model, tmp_path / "example", example("Curriculum")) == [0, 1, 2, 3, 4, 5, 0, 1]


# Callbacks


def callback_of_the_page(name: str, *arguments) -> TrainerCallback:
    return classes_of_the_page()[name](*arguments)


@pytest.mark.parametrize(("reward", "steps"), [(0.9, 4), (1.0, 1)])
def test_example_of_stopping(tiny_model, tmp_path, reward, steps):
    trainer = make_trainer(
        tiny_model,
        tmp_path,
        script=Script([reward] * 8),
        trainer_arguments={"callbacks": [callback_of_the_page("Solved")]},
        steps_per_generation=8,
        max_steps=4,
    )
    trainer.train()
    assert trainer.state.global_step == steps
    assert (tmp_path / "checkpoint-1" / "trainer_state.json").exists() == (steps == 1)


def test_example_of_the_learning_rate(tiny_model, tmp_path):
    """Of the four steps of a rollout, the second and later ones are far enough; a resumed run keeps its rate."""
    options = {"steps_per_generation": 8, "learning_rate": 3.0, "save_strategy": "steps", "save_steps": 4}

    def run(max_steps: int, resume=None):
        arguments = {"callbacks": [callback_of_the_page("SlowDown")]}
        trainer = make_trainer(tiny_model, tmp_path, trainer_arguments=arguments, max_steps=max_steps, **options)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    trainer = run(4)
    entries = logged(trainer)
    far = [(entry["opo/chi2"] or 0) > 1 for entry in entries]
    assert far[0] is False
    assert any(far[:2]), [entry["opo/chi2"] for entry in entries]
    halved = [0, 0, *(sum(far[: i + 1]) for i in range(3))]
    assert [entry["learning_rate"] for entry in entries] == [3.0 / 2 ** halved[i] for i in range(4)]
    resumed = run(6, resume=tmp_path / "checkpoint-4")
    assert resumed.lr_scheduler.base_lrs[0] <= 3.0 / 2 ** sum(far)


def test_example_of_reward_weights(tiny_model, tmp_path):
    def run(max_steps: int, resume=None):
        options = {"save_strategy": "steps", "save_steps": 2, "reward_weights": [1.0, 2.0], "max_steps": max_steps}
        trainer = make_trainer(tiny_model, tmp_path, script=Script(functions=2), **options)
        trainer.add_callback(callback_of_the_page("FadeOut", trainer))
        trainer.train(resume_from_checkpoint=resume)
        return logged(trainer)

    for entries in (run(3), run(4, resume=tmp_path / "checkpoint-2")):
        for entry in entries:
            first, last = (entry[f"rewards/reward_{i}/mean"] for i in range(2))
            assert entry["reward"] == pytest.approx(first + 2 * (1 - (entry["step"] - 1) / 100) * last)


def test_example_of_rollouts(tiny_model, tmp_path):
    data = {"eval_dataset": Dataset.from_dict({"prompt": ["1+1="]})}
    options = {"steps_per_generation": 4, "max_steps": 4, "per_device_eval_batch_size": 4}
    trainer = make_trainer(tiny_model, tmp_path, trainer_arguments=data, **options)
    trainer.add_callback(callback_of_the_page("EvaluateEachRollout", trainer))
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [2, 4]


def test_example_of_a_curriculum(tiny_model, tmp_path):
    """Before the callback acts, the data loader has read two rollouts' prompts; dynamic sampling reads its own."""
    script, harder = Script(), callback_of_the_page("Harder")
    problems = Dataset.from_dict({"number": [*range(1, 9)]})
    problems.set_transform(harder.prompts)
    arguments = {"callbacks": [harder], "train_dataset": problems}
    trainer = make_trainer(
        tiny_model, tmp_path, script=script, trainer_arguments=arguments, max_steps=4, max_sampling_rounds=2
    )
    trainer.train()
    numbers = [[int(trainer.processing_class.decode(row.prompt).split()[0]) for row in rows] for rows in script.calls]
    assert [10 if min(asked) >= 10 else 1 for asked in numbers] == [1, 10, 10, 10]


def test_fields_that_a_callback_changes_act_from_the_next_rollout_on(tiny_model, tmp_path):
    class Stiffer(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            args.mu = 0.3 + state.global_step

    trainer = make_trainer(
        tiny_model, tmp_path, trainer_arguments={"callbacks": [Stiffer()]}, steps_per_generation=4, max_steps=4
    )
    trainer.train()
    assert [entry["opo/mu"] for entry in logged(trainer)] == pytest.approx([0.3, 0.3, 2.3, 2.3])
