"""Two processes with a device each."""

import functools

import pytest
from device_processes import call
from guessing_game import GAMES, Guessing
from peft import LoraConfig
from recording_trainers import logged
from runs_on_devices import (
    NUMBERS,
    OFF_POLICY,
    PASSES,
    HalfDead,
    assert_complete,
    assert_follows_the_definition,
    assert_resumes_bitwise,
    assert_same_as_on_the_host,
    generates,
    on_device,
    shortened,
)
from scripted_rollouts import Script
from simulated_releases import untested_release
from waits_and_gathers import assert_no_more_than_grpo

from opo_trl.command.train import main


pytestmark = pytest.mark.device(processes=2)

# Three groups of four in a rollout: the second one is divided between the processes.
DIVIDED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}

RUNS = {
    "DAPO": {"loss_type": "dapo", "epsilon_high": 0.28, **PASSES},
    "dynamic sampling": {**PASSES, **DIVIDED, "script": HalfDead, "max_sampling_rounds": 4},
    "temperature": {
        **OFF_POLICY,
        "adaptive_temperature": True,
        "anchor_correction": "length_normalized",
        "chi2_radius": 0.5,
        "log_ratio_reduction": "mean",
        "mask_truncated_completions": True,
        "script": functools.partial(Script, truncated=(2, 9), tool_tokens={1: (1, 2)}),
    },
}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, marks=[pytest.mark.slow] * (name in ("DAPO", "dynamic sampling")))
        for name, options in RUNS.items()
    ],
    ids=RUNS,
)
def test_scripted_run_is_that_of_one_process_on_the_host(tiny_model, tmp_path, options):
    assert_same_as_on_the_host(tiny_model, tmp_path, **options)


def test_generated_run_follows_the_definition(tiny_model, tmp_path):
    trainer = on_device(tiny_model, tmp_path, **generates(), **DIVIDED, max_sampling_rounds=3, max_steps=3)
    assert_follows_the_definition(trainer)


def test_conversations_follow_the_definition(player, tmp_path):
    options = {"max_completion_length": 60, "per_device_train_batch_size": 2, **OFF_POLICY, "max_steps": 2}
    arguments = generates(reward=None, train_dataset=GAMES, environment_factory=Guessing)
    trainer = on_device(player, tmp_path, **arguments, **options)
    assert_follows_the_definition(trainer)
    assert any((rollout.tool_mask < rollout.completion_mask).any() for rollout in trainer.rollouts)


RESUMED = {
    "replay, dropout and dynamic sampling": {
        "at": 4,
        **PASSES,
        **DIVIDED,
        "max_sampling_rounds": 3,
        "beta": 0.1,
        "arguments": {"peft_config": LoraConfig(r=4, lora_dropout=0.2, target_modules="all-linear")},
    },
    "inside a rollout": {
        "at": 3,
        "steps_per_generation": 4,
        "num_iterations": 2,
        "max_steps": 6,
        "beta": 0.1,
        "sync_ref_model": True,
        "ref_model_sync_steps": 2,
    },
}


# By default, one process resumes inside a rollout.
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(RESUMED["replay, dropout and dynamic sampling"], id="replay, dropout and dynamic sampling"),
        pytest.param(RESUMED["inside a rollout"], id="inside a rollout", marks=pytest.mark.slow),
    ],
)
def test_resumed_run_is_the_uninterrupted_one(tiny_model, tmp_path, options):
    arguments = generates(train_dataset=NUMBERS, **options.pop("arguments", {}))
    assert_resumes_bitwise(tiny_model, tmp_path, arguments=arguments, **options)


def test_an_optimizer_step_waits_and_gathers_no_more_often_than_grpo(tiny_model, tmp_path):
    assert_no_more_than_grpo(tiny_model, tmp_path, num_iterations=2, max_staleness=2)


def succeed(arguments: list[str]) -> None:
    assert main(arguments) == 0


@pytest.mark.device  # which starts its processes itself, as `accelerate launch` does for each command
def test_recipe_is_trained_evaluated_and_reported(tmp_path, library):
    arguments = shortened(tmp_path / "run", "opo")
    call(succeed, arguments, processes=2, devices=2, library=library, folder=tmp_path)
    assert_complete(tmp_path / "run", steps=4, devices=2)


@pytest.mark.device(processes=1, devices=2)
def test_one_process_that_sees_two_devices_trains_on_the_first(tiny_model, tmp_path):
    trainer = on_device(tiny_model, tmp_path, max_steps=2)
    assert logged(trainer)[-1]["grad_norm"] > 0
    assert "one of 2 GPUs" in trainer.plan


def test_first_step_with_an_untested_release_is_checked(tiny_model, tmp_path):
    with untested_release():
        trainer = on_device(tiny_model, tmp_path, **generates(), num_iterations=2, beta=0.1, max_steps=2)
    assert trainer._first_step is None
