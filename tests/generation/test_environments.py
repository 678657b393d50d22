"""
Conversations with an environment: what is trained, reuse, dynamic sampling and exact resumption.

A small model plays real games of several turns (`guessing_game`). `float64_reference.Reference` computes each gradient
from the definition, over what the model wrote.
"""

import json
import random
import re
import sys

import pytest
import torch
from float64_reference import Reference, assert_step_equals
from guessing_game import GAMES, TOOL_WROTE, Guessing, guess
from named_tensors import relative_error, same_weights, snapshot
from recording_trainers import logged, make_trainer, trained, without_times
from scripted_rollouts import Script
from transformers import TrainerCallback

from opo_trl.evaluate import evaluate


# Two optimizer steps per pass.
OFF_POLICY = {"steps_per_generation": 4, "max_steps": 2}


class Drawn(Guessing):
    """A game whose number the environment draws, from Python's generator."""

    def reset(self, **row):
        super().reset(**row)
        self.number = random.randint(1, 6)


class Greeting(Guessing):
    """A game that asks with words of its own, which are in the prompt."""

    def reset(self, **row):
        super().reset(**row)
        return f" Game {random.randint(0, 9)}."


class OwnGenerator(Guessing):
    """A game that draws its numbers from a generator of its own; counts its objects."""

    made = 0

    def __init__(self):
        self.rng = random.Random(OwnGenerator.made % 16)
        OwnGenerator.made += 1

    def reset(self, **row):
        super().reset(**row)
        self.number = self.rng.randint(1, 6)


class Evaluating(TrainerCallback):
    """Plays games after every step, for which the environment draws, too."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        assert evaluate(self.trainer, GAMES.select(range(4)), seed=state.global_step).scored == 4


def messages(completions, **columns) -> list[float]:
    return [float(len(turns)) for turns in completions]


def playing(player, folder, *, train=True, environment=Guessing, tools=None, reward_funcs=None, **options):
    """A trainer on games of at most four calls, trained or not."""
    arguments = {"rollout_func": None, "reward_funcs": reward_funcs, "train_dataset": GAMES}
    arguments |= {"tools": tools} if tools else {"environment_factory": environment}
    options = {
        "max_completion_length": 60,
        "max_tool_calling_iterations": 4,
        "learning_rate": 0.5,
        **OFF_POLICY,
        **options,
    }
    return (trained if train else make_trainer)(player, folder, trainer_arguments=arguments, **options)


def reference_of(trainer) -> Reference:
    script = Script()
    script.calls = [Script.observed(rollout, rollout.rewards_per_func.tolist()) for rollout in trainer.rollouts]
    return Reference(trainer, script)


def turns(mask: torch.Tensor) -> int:
    """How often the model begins to write, in a row of the mask of its tokens."""
    return int((mask[1:] > mask[:-1]).sum() + mask[0])


# What is trained


@pytest.mark.parametrize(
    "options",
    [
        {"tools": [guess], "reward_funcs": [messages]},
        {"max_tokens_per_micro_batch": 120, "ratio_form": "exact", "beta": 0.1},
        # Most games are cut: in groups of eight, some are not, and differ.
        {
            "mask_truncated_completions": True,
            "max_completion_length": 23,
            "reward_funcs": [messages],
            "num_generations": 8,
            "per_device_train_batch_size": 8,
        },
        {"num_iterations": 2, "max_staleness": 1, "max_steps": 12, "max_sampling_rounds": 3, "beta": 0.1},
    ],
    ids=" ".join,
)
def test_gradient_of_conversations_is_the_definition(player, tmp_path, options):
    trainer = playing(player, tmp_path, **options)
    reference = reference_of(trainer)
    for number, step in enumerate(trainer.steps):
        assert_step_equals(step, reference.step(number))
    for rollout in trainer.rollouts:
        mask = rollout.completion_mask
        assert max(turns(row) for row in rollout.tool_mask * mask) >= 3
        # The mask is what it says, whichever round of generation a sample is of.
        tokenizer = trainer.processing_class
        for ids, own, kept in zip(rollout.completion_ids, rollout.tool_mask, mask.bool(), strict=True):
            heard = tokenizer.convert_ids_to_tokens(ids[kept & (own == 0)])
            assert {*heard} <= {*TOOL_WROTE}
            assert re.fullmatch(r"(<tool_response>[^<]+</tool_response>)*", "".join(heard))  # whole messages
    if options.get("max_sampling_rounds"):
        assert sum(entry.get("dynamic_sampling/frac_replaced", 0) for entry in logged(trainer)) > 0
    if options.get("mask_truncated_completions"):
        assert (~mask.bool().any(dim=1)).any()
    if options.get("max_tokens_per_micro_batch"):  # the tool's tokens take room, too
        parts = [batch for step in trainer.steps for batch in step.batches]
        for batch in parts:
            assert batch["prompt_ids"].numel() + batch["completion_ids"].numel() <= 120
        assert len(parts) > 2 * len(trainer.steps)


@pytest.mark.parametrize(
    "options",
    [{"num_iterations": 2, "max_staleness": 1}, {"tools": [guess], "reward_funcs": [messages], "loss_type": "grpo"}],
    ids=" ".join,
)
def test_training_on_its_recorded_conversations_repeats_a_run(player, tmp_path, options):
    """With an environment, which has words of its own in the prompt, or with tools."""
    fields = {"max_steps": 6, "shuffle_dataset": False, "learning_rate": 0.1}
    run = playing(player, tmp_path, save_rollouts=True, environment=Greeting, **fields, **options)
    mine = dict.fromkeys(("rollout_func", "reward_funcs", "train_dataset"))
    options = {name: value for name, value in options.items() if name not in ("tools", "reward_funcs")}
    fields |= {"max_completion_length": 60, "steps_per_generation": 4, "rollouts": str(tmp_path / "rollouts")}
    again = trained(player, tmp_path / "again", trainer_arguments=mine, **fields, **options)
    for one, other in zip(run.rollouts, again.rollouts, strict=True):
        for name in ("prompt_ids", "completion_ids", "tool_mask", "completion_mask"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert max(turns(row) for rollout in again.rollouts for row in rollout.tool_mask * rollout.completion_mask) >= 3
    assert relative_error(way(again), way(run)) < 1e-3
    for entry, same in zip(logged(run), logged(again), strict=True):
        for name in {"completions/mean_length", "completions/clipped_ratio", "reward", "entropy"} & entry.keys():
            assert same[name] == pytest.approx(entry[name], abs=1e-4)


def way(trainer) -> dict[str, torch.Tensor]:
    """How far training has moved each weight."""
    return {name: weight.double() - trainer.initial[name] for name, weight in snapshot(trainer.model).items()}


# What a run is made of


def test_environment_alone_gives_the_reward_and_accuracies_count_it(player, tmp_path):
    trainer = playing(player, tmp_path, train=False, reward_funcs=[])
    assert trainer.reward_func_names == ["Guessing"]
    held_out = GAMES.select(range(24))
    result = evaluate(trainer, held_out)
    are_won = ["right" in [message["content"] for message in sample["completion"]] for sample in result.samples]
    assert [sample["reward"] for sample in result.samples] == [float(is_won) for is_won in are_won]
    assert 0 < result.correct == sum(are_won) < 24
    # With a function in `reward_funcs`, that one decides, and the environment's is added to it in training.
    other = playing(player, tmp_path, train=False, reward_funcs=[lambda completions, **_: [1.0] * len(completions)])
    assert evaluate(other, held_out).correct == 24


class Exiting(Guessing):
    def reset(self, **row):
        sys.exit(0)


def test_environment_that_exits_fails_the_run(player, tmp_path):
    """Not with its status, 0, as if the run had finished."""
    with pytest.raises(RuntimeError, match="A tool or an environment has exited, with status 0"):
        playing(player, tmp_path, environment=Exiting)


def test_evaluations_do_not_touch_the_environments_of_training(player, tmp_path):
    """Not even those that have a generator of their own, which goes on from one conversation to the next."""
    options = {"environment": OwnGenerator, "max_steps": 5}
    alone = playing(player, tmp_path / "1", **options)
    trainer = playing(player, tmp_path / "2", train=False, **options)
    trainer.add_callback(Evaluating(trainer))
    trainer.train()
    assert same_weights(snapshot(alone.model), snapshot(trainer.model))
    # One for each conversation of a rollout, and of an evaluation.
    assert OwnGenerator.made == 16 + 16 + 4


def test_run_resumes_bitwise_although_its_environment_draws_random_numbers(player, tmp_path):
    options = {"environment": Drawn, "max_steps": 8, "optim": "adamw_torch", "learning_rate": 1e-3}
    options |= {"save_strategy": "steps", "save_steps": 1}
    options |= {"num_iterations": 3, "max_staleness": 2, "max_sampling_rounds": 3}
    whole = playing(player, tmp_path, **options)
    expected = snapshot(whole.model)
    resumed = playing(player, tmp_path / "resumed", train=False, **options)
    resumed.add_callback(Evaluating(resumed))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))  # in the middle of a rollout and pass
    own = snapshot(resumed.model)
    assert same_weights(own, expected)
    one, other = ([without_times(entry) for entry in t.state.log_history] for t in (whole, resumed))
    assert json.dumps(one[:8], sort_keys=True) == json.dumps(other[:8], sort_keys=True)
