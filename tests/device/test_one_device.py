"""One process with one device."""

import pytest
import torch
from peft import LoraConfig
from recording_trainers import logged, make_trainer
from runs_on_devices import (
    NUMBERS,
    OFF_POLICY,
    PASSES,
    ROUNDED,
    WithHostEntry,
    assert_complete,
    assert_follows_the_definition,
    assert_resumes_bitwise,
    assert_same_as_on_the_host,
    assert_same_gradients_on_the_host,
    check,
    generates,
    on_device,
    same_bits,
    shortened,
    to_host,
)
from scripted_rollouts import Script
from simulated_releases import untested_release
from transformers import TrainerCallback

from opo_trl.command.train import main
from opo_trl.evaluate import evaluate


pytestmark = pytest.mark.device(processes=1)


# Scripted runs: every gradient, the weights and the log


def weigh(rollout, trainer):
    """Add a sampler's log-probabilities and ratios, as vLLM's are, on the host."""
    mask = rollout["completion_mask"]
    ratios = torch.linspace(0, 3, len(mask)).unsqueeze(1)
    logps, _ = trainer._policy_logps(rollout)
    rollout["importance_sampling_ratio"] = ratios.expand(mask.shape)
    rollout["sampling_per_token_logps"] = (logps + 0.3).cpu()


RUNS = {
    "bfloat16": {**PASSES, "bf16": True, "learning_rate": 0.02, **ROUNDED},
    "reference that follows": {
        **OFF_POLICY,
        "beta": 0.1,
        "sync_ref_model": True,
        "ref_model_sync_steps": 1,
        "ref_model_mixup_alpha": 0.5,
        "use_bias_correction_kl": True,
    },
    "entropy": {
        **OFF_POLICY,
        "top_entropy_quantile": 0.5,
        "entropy_coef": 0.5,
    },
    "sampler's ratios": {**OFF_POLICY, "inject": weigh, "off_policy_mask_threshold": 0.02},
}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_scripted_run_is_that_of_the_host(tiny_model, tmp_path, options):
    assert_same_as_on_the_host(tiny_model, tmp_path, **options)


def test_short_completions_fill_fewer_passes(tiny_model, tmp_path):
    """One sample at a time on the host; on a device, as many as are no larger than the longest."""
    options = {**OFF_POLICY, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    device = on_device(tiny_model, tmp_path / "device", script=Script(max_length=40), **options)
    host = make_trainer(tiny_model, tmp_path / "host", script=Script(max_length=40), use_cpu=True, **options)
    host.train()
    assert_follows_the_definition(device)
    for filled, single in zip(device.steps, host.steps, strict=True):
        assert {len(part["row"]) for part in single.batches} == {1}
        assert len(filled.batches) < len(single.batches)


# Completions that the model writes, with the device's random numbers


@pytest.mark.slow  # by default, on two devices
def test_generated_run_follows_the_definition(tiny_model, tmp_path):
    trainer = on_device(tiny_model, tmp_path, **generates())
    assert_follows_the_definition(trainer)
    assert trainer.rollouts[0].completion_ids.unique().numel() > 20


def test_lora_has_the_gradients_of_the_host(tiny_model, tmp_path):
    arguments = generates(peft_config=LoraConfig(r=4, target_modules="all-linear"))
    trainer = on_device(tiny_model, tmp_path, beta=0.1, learning_rate=0.05, num_iterations=2, max_steps=4, **arguments)
    assert logged(trainer)[-1]["kl"] > 0
    host = make_trainer(tiny_model, tmp_path, beta=0.1, num_iterations=2, use_cpu=True, **arguments)
    assert_same_gradients_on_the_host(trainer, host)


# Random numbers of the device


class Evaluating(TrainerCallback):
    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **named):
        few = NUMBERS.select(range(5))
        first = evaluate(self.trainer, few, seed=1)
        second = evaluate(self.trainer, few, seed=1)
        assert first.samples == second.samples
        greedy = evaluate(self.trainer, NUMBERS, decoding="greedy")
        assert greedy.scored == len(NUMBERS)


def test_evaluations_do_not_touch_training(tiny_model, tmp_path):
    states = []
    for evaluates in (False, True):
        trainer = make_trainer(tiny_model, tmp_path, use_cpu=False, max_steps=3, **generates())
        if evaluates:
            trainer.add_callback(Evaluating(trainer))
        trainer.train()
        state = [trainer.model.state_dict(), torch.cuda.get_rng_state(), torch.get_rng_state()]
        states.append(to_host(state))
        check(trainer)
    assert same_bits(*states)


DROPOUT = {"peft_config": LoraConfig(r=4, lora_dropout=0.2, target_modules="all-linear")}
RESUMED = {
    "replay and dropout": {"at": 4, **PASSES, "beta": 0.1, "gradient_checkpointing": True, "arguments": DROPOUT},
    "inside a rollout": {
        **{"at": 3, "steps_per_generation": 4, "num_iterations": 2, "max_steps": 6, "bf16": True},
        **{"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "trainer_class": WithHostEntry},
    },
}


# By default, two processes resume with replay, dropout and more.
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(RESUMED["replay and dropout"], id="replay and dropout", marks=pytest.mark.slow),
        pytest.param(RESUMED["inside a rollout"], id="inside a rollout"),
    ],
)
def test_resumed_run_is_the_uninterrupted_one(tiny_model, tmp_path, options):
    arguments = generates(train_dataset=NUMBERS, **options.pop("arguments", {}))
    assert_resumes_bitwise(tiny_model, tmp_path, arguments=arguments, **options)


# The command


def test_recipe_is_trained_evaluated_reported_and_resumed(tmp_path):
    arguments = shortened(tmp_path / "run", "opo")
    assert main(arguments) == 0
    assert main([*arguments, "--max_steps", "5", "--resume_from_checkpoint", "last"]) == 0
    assert_complete(tmp_path / "run", steps=5, devices=1)


@pytest.mark.parametrize(
    "precision",
    [{"fp16": True}, *(pytest.param(easier, marks=pytest.mark.slow) for easier in ({}, {"bf16": True}))],
    ids=str,
)
def test_first_step_with_an_untested_release_is_checked(tiny_model, tmp_path, precision):
    """In float16, the loss is multiplied by a scale."""
    options = {"num_iterations": 2, "beta": 0.1, "max_steps": 2, **precision}
    with untested_release():
        trainer = on_device(tiny_model, tmp_path, **generates(), **options)
    assert trainer._first_step is None
