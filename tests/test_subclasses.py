"""Overrides act as in a subclass of GRPOTrainer: the examples of docs/subclassing.md, and more."""

import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from named_tensors import all_finite, distance, norm, same_weights, snapshot
from recording_trainers import Recording, RecordingOPO, changed_weights, logged, make_trainer, metric
from scripted_rollouts import Script
from transformers import TrainerCallback

from opo_trl import OPOTrainer
from opo_trl.objective import OPO


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


# Rewards


def test_rewards_made_by_a_subclass_are_those_trained_on(tiny_model, tmp_path):
    rewards = [0.0, 1.0, None, 0.5, 2.0, 2.0, 2.0, 2.0]  # one unscored; a group that dynamic sampling replaces

    class Rewarding(RecordingOPO):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            values = [torch.nan if reward is None else reward for reward in rewards]
            return torch.tensor(values, device=self.accelerator.device)[: len(inputs), None]

    options = {"max_sampling_rounds": 3, "max_steps": 2}
    plain = trained(tiny_model, tmp_path / "0", RecordingOPO, rewards=rewards, **options)
    rewarding = trained(tiny_model, tmp_path / "1", Rewarding, **options)
    assert same_weights(snapshot(plain.model), snapshot(rewarding.model))
    assert changed_weights(plain)


def test_example_of_rewards(tiny_model, tmp_path):
    trainer = trained(tiny_model, tmp_path, example("HalvedReward"), scale_rewards="none", max_steps=2)
    whole, halved = (rollout.advantages for rollout in trainer.rollouts)
    assert torch.allclose(halved, whole / 2)


# Advantages


def test_rollout_made_by_a_subclass_is_trained_on(tiny_model, tmp_path):
    """With only the entries that TRL's loss reads; a sample whose advantage is NaN has no effect."""

    class Own(RecordingOPO):
        def _generate_and_score_completions(self, inputs):
            rollout = super()._generate_and_score_completions(inputs)
            names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
            advantages = rollout["advantages"].clone()
            advantages[1] = torch.nan
            return {name: rollout[name] for name in names} | {"advantages": advantages}

    trainer = trained(tiny_model, tmp_path, Own, steps_per_generation=4, max_steps=2)
    assert trainer.rollouts[0].opo_valid.tolist() == [i != 1 for i in range(16)]
    assert all_finite(snapshot(trainer.model))
    assert norm(trainer.steps[0].gradient) > 0.01


def test_example_of_advantages(tiny_model, tmp_path):
    trainer = trained(tiny_model, tmp_path, example("NoPush"))
    (rollout,) = trainer.rollouts
    assert (rollout.advantages == 0).sum() > 2
    for advantages, targets in zip(rollout.advantages.split(4), rollout.opo_target.split(4), strict=True):
        below = targets[advantages == 0]
        assert len(below.unique()) == 1  # all that are not better are treated alike


# The target


def test_example_of_the_target(tiny_model, tmp_path):
    rewards = [0.0, 1.0, None, 0.5, 2.0, 2.0, 2.0, 2.0]
    (lower,) = trained(tiny_model, tmp_path / "0", example("PessimisticTrainer"), rewards=rewards).rollouts
    (plain,) = trained(tiny_model, tmp_path / "1", RecordingOPO, rewards=rewards).rollouts
    torch.testing.assert_close(lower.opo_target, plain.opo_target - 0.1 * plain.opo_valid)
    assert lower.opo_target[2] == 0


# The loss


PARTS = {"max_tokens_per_micro_batch": 60, "steps_per_generation": 4, "max_steps": 2}


class Scaled(RecordingOPO):
    def compute_loss(self, *inputs, **named):
        return 0.5 * super().compute_loss(*inputs, **named)


class Own(OPO):
    """Reads the fields of OPO, as an objective of a user does."""


@pytest.mark.parametrize("field", ["objective", "loss_type"])
def test_a_loss_beside_the_objective_of_a_subclass_is_rejected(tiny_model, tmp_path, field):
    trainer_class = type("WithOwn", (RecordingOPO,), {"objective_class": Own})
    named = "objective='grpo' is not allowed. Set `objective` to 'opo', its default: WithOwn trains .* Own."
    with pytest.raises(ValueError, match=named):
        make_trainer(tiny_model, tmp_path, trainer_class=trainer_class, **{field: "grpo"})
    assert isinstance(make_trainer(tiny_model, tmp_path, trainer_class=trainer_class).policy_objective, Own)


def test_loss_of_a_subclass_is_trained(tiny_model, tmp_path):
    plain = trained(tiny_model, tmp_path / "0", RecordingOPO, **PARTS)
    scaled = trained(tiny_model, tmp_path / "1", Scaled, **PARTS)
    gradient = plain.steps[0].gradient
    half = {name: values / 2 for name, values in gradient.items()}
    assert distance(scaled.steps[0].gradient, half) < 1e-4
    # With the default: completions at rest in OPO's own loss have a gradient in this one.
    decayed = trained(tiny_model, tmp_path / "2", example("WithDecay"), skip_inert_rows=True, **PARTS)
    head = "lm_head.weight"
    weight = plain.initial[head]
    decay = 2 * weight / weight.numel()
    expected = {**gradient, head: gradient[head] + decay}
    for name, values in decayed.steps[0].gradient.items():
        assert torch.allclose(values, expected[name], atol=1e-5)


@pytest.mark.parametrize("method", ["compute_loss", "_compute_loss"])
def test_loss_that_never_calls_super_is_trained(tiny_model, tmp_path, method):
    """REINFORCE, as in a subclass of GRPOTrainer; samples with zero gradient in OPO are computed as well."""

    def reinforce(self, model, inputs, *others, **named):
        seen.append(inputs)
        logps, _, _ = self._token_logps(model, inputs, compute_entropy=True)
        weights = inputs["completion_mask"] * inputs["weight"]
        n_completions = self.args.per_device_train_batch_size * self.current_gradient_accumulation_steps
        return -(logps * weights).sum() / n_completions

    class Weighted(RecordingOPO):
        def _generate_and_score_completions(self, inputs):
            rollout = super()._generate_and_score_completions(inputs)
            rollout["weight"] = torch.rand(rollout["completion_mask"].shape)  # its own entry, with a column per token
            return rollout

    seen: list[dict] = []
    own = type("Own", (Weighted,), {method: reinforce})
    rewards = [1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0]  # a zero-variance group, which OPO would skip
    trainer = trained(tiny_model, tmp_path, own, rewards=rewards, skip_inert_rows=True, **PARTS)
    assert len(seen) == 4
    for inputs in seen:
        assert len(inputs["weight"]) == trainer.args.per_device_train_batch_size == 4
        assert inputs["weight"].shape == inputs["completion_mask"].shape
    assert norm(trainer.steps[0].gradient) > 0.1
    assert "opo/chi2" not in logged(trainer)[0]


def test_every_pass_gives_log_probabilities_to_an_override(tiny_model, tmp_path):
    class Bounded(RecordingOPO):
        def _get_per_token_logps_and_entropies(self, *args, **options):
            logps, *others = super()._get_per_token_logps_and_entropies(*args, **options)
            return logps.clamp(min=-30.0), *others

    bounded = snapshot(trained(tiny_model, tmp_path / "0", Bounded, **PARTS).model)
    plain = snapshot(trained(tiny_model, tmp_path / "1", RecordingOPO, **PARTS).model)
    for name, weight in plain.items():
        assert torch.allclose(bounded[name], weight, atol=1e-6)


def test_behaviour_policy_that_a_subclass_sets_is_used(tiny_model, tmp_path):
    class Anchored(RecordingOPO):
        def _generate_and_score_completions(self, inputs):
            rollout = super()._generate_and_score_completions(inputs)
            rollout["old_per_token_logps"] = torch.full(rollout["completion_ids"].shape, -5.0)
            return rollout

    trainer = trained(tiny_model, tmp_path, Anchored, skip_inert_rows=True, **PARTS)
    for step, entry in zip(trainer.steps, logged(trainer), strict=True):
        for batch in step.batches:
            assert (batch["old_per_token_logps"] == -5).all()
        assert entry["opo/log_ratio/absmax"] > 1
        assert entry["opo/frac_skipped"] == 0  # a sample without a target is pulled back to the behaviour policy


def test_completions_without_a_target_are_pulled_back_to_a_behaviour_policy_that_is_set(tiny_model, tmp_path):
    class Anchored(RecordingOPO):
        def _generate_and_score_completions(self, inputs):
            rollout = super()._generate_and_score_completions(inputs)
            logps, _ = self._policy_logps(rollout)
            rollout["old_per_token_logps"] = logps - 0.1
            return rollout

    trainer = trained(tiny_model, tmp_path, Anchored, rewards=[1.0] * 8)
    assert norm(trainer.steps[0].gradient) > 1e-3


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
                modes.append(self.optimizer.optimizer.mode)
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
    for prompts, _ in calls:
        assert len(prompts) == 16
        assert "prompt" in prompts[0]
    first, second = (loss.item() for _, loss in calls[:2])
    assert first + second == pytest.approx(sum(trainer.steps[0].losses), abs=1e-6)


# The order of prompts


def test_example_of_the_order_of_prompts(tiny_model, tmp_path):
    data = {"train_dataset": Dataset.from_dict({"prompt": [str(i) for i in range(6)]})}
    options = {"trainer_class": example("Curriculum"), "script": (script := Script()), "trainer_arguments": data}
    trainer = make_trainer(tiny_model, tmp_path, max_steps=4, **options)
    trainer.train()
    asked = [int(trainer.processing_class.decode(row.prompt)) for rows in script.calls for row in rows[::4]]
    assert asked == [0, 1, 2, 3, 4, 5, 0, 1]


# Callbacks


def test_example_of_stopping(tiny_model, tmp_path):
    arguments = {"callbacks": [classes_of_the_page()["Solved"]()]}
    options = {"script": Script([1.0] * 8), "trainer_arguments": arguments, "steps_per_generation": 8, "max_steps": 4}
    trainer = make_trainer(tiny_model, tmp_path, **options)
    trainer.train()
    assert trainer.state.global_step == 1
    assert (tmp_path / "checkpoint-1" / "trainer_state.json").exists()


class Stiffer(TrainerCallback):
    """Changes μ, and evaluates after the last optimizer step of a rollout."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        args.mu = 0.3 + state.global_step
        control.should_evaluate |= self.trainer.rollout_is_used_up


def test_what_callbacks_change_acts(tiny_model, tmp_path):
    """At once, or from the next rollout on: two rollouts, of two optimizer steps each."""
    data = {"eval_dataset": Dataset.from_dict({"prompt": ["1+1="]})}
    options = {"steps_per_generation": 4, "max_steps": 4, "per_device_eval_batch_size": 4}
    options |= {"script": Script(functions=2), "trainer_arguments": data, "reward_weights": [1.0, 2.0]}
    trainer = make_trainer(tiny_model, tmp_path, save_strategy="steps", save_steps=1, **options)
    for callback in (classes_of_the_page()["FadeOut"], Stiffer):
        trainer.add_callback(callback(trainer))
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [2, 4]
    assert metric(trainer, "opo/mu") == pytest.approx([0.3, 0.3, 2.3, 2.3])
    for entry in logged(trainer)[::2]:
        first, last = (entry[f"rewards/reward_{i}/mean"] for i in range(2))
        n_steps_before = entry["step"] - 1
        faded = 2 * (1 - n_steps_before / 100)
        assert entry["reward"] == pytest.approx(first + faded * last)
    make_trainer(tiny_model, tmp_path, **options).train(str(tmp_path / "checkpoint-3"))  # with the fields of its start


class Harder(TrainerCallback):
    factor = 1

    def on_step_begin(self, args, state, control, **kwargs):
        self.factor = 1 if state.global_step < 1 else 10

    def prompts(self, rows):
        return {"prompt": [f"{self.factor * number} + 1 =" for number in rows["number"]]}


def test_dynamic_sampling_reads_prompts_that_a_callback_changes_at_once(tiny_model, tmp_path):
    """The data loader has then read the prompts of two rollouts."""
    script, harder = Script(), Harder()
    problems = Dataset.from_dict({"number": [*range(1, 9)]})
    problems.set_transform(harder.prompts)
    arguments = {"callbacks": [harder], "train_dataset": problems}
    trainer = make_trainer(
        tiny_model, tmp_path, script=script, trainer_arguments=arguments, max_steps=4, max_sampling_rounds=2
    )
    trainer.train()
    factors = []
    for rows in script.calls:
        prompts = [trainer.processing_class.decode(row.prompt) for row in rows]
        numbers = [int(prompt.split()[0]) for prompt in prompts]
        factors.append(10 if min(numbers) >= 10 else 1)
    assert factors == [1, 10, 10, 10]
