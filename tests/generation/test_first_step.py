"""Checks of the first rollout and optimizer step, which a release of TRL gets that has not been tested."""

import logging
import math
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from device_fields import BACKEND
from launched_processes import launch, logs
from recording_trainers import RecordingOPO, make_trainer, trained
from scripted_rollouts import PROMPTS, Script, even_tokens
from simulated_releases import untested_release
from transformers import GenerationMixin
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from opo_trl.generation.first_step import FirstStep, advantages_of


GENERATES = {"trainer_arguments": {"reward_funcs": even_tokens, "rollout_func": None}, "max_completion_length": 40}
SCRIPTS = {
    "masks": {
        "script": partial(Script, truncated=(2,), tool_tokens={1: (1,), 6: (0, 2)}),
        "mask_truncated_completions": True,
    },
    "all of a rollout masked, prompts of one token": {
        "script": partial(Script, truncated=range(8)),
        "mask_truncated_completions": True,
        "trainer_arguments": {"train_dataset": Dataset.from_dict({"prompt": ["7", "9"]})},
    },
    "scores": {
        "script": partial(Script, rewards=[(1.0, None), (0.5, 2.0), (None, None), (0.25, 1.0)], functions=2),
        "reward_weights": [1.0, 0.5],
        "scale_rewards": "batch",
    },
    "scores of each": {"script": partial(Script, functions=2), "multi_objective_aggregation": "normalize_then_sum"},
    "equal rewards": {"script": partial(Script, rewards=[0.1] * 4 + [0.1, 0.7, 0.3, 0.7]), "scale_rewards": "none"},
    "KL": {"beta": 0.1, "temperature": 0.7},
    "passes": {"num_iterations": 2, "steps_per_generation": 4, "max_steps": 3},
    "generates": GENERATES,
    "dynamic sampling": {**GENERATES, "max_sampling_rounds": 3},
}


def trainer_with(model: str, folder: Path, options: dict[str, Any]) -> Any:
    """A trainer with one of these options and a script of its own."""
    script = options.get("script", Script)()
    return make_trainer(model, folder, **{**options, "script": script})


@pytest.fixture
def untested():
    with untested_release():
        yield


# Changes of TRL and of what is below it


def changed(name: str, change: Callable) -> Callable[[pytest.MonkeyPatch], None]:
    """A patch of a method of TRL's trainer: `change` gets the trainer, and what the method returns."""
    method = getattr(GRPOTrainer, name)

    def patched(self, *args, **named):
        return change(self, method(self, *args, **named))

    return lambda patch: patch.setattr(GRPOTrainer, name, patched)


def entry(name: str, change: Callable) -> Callable[[pytest.MonkeyPatch], None]:
    """A patch that changes an entry of TRL's rollouts, or removes it."""

    def change_entry(trainer: Any, rollout: dict[str, Any]) -> dict[str, Any]:
        others = {key: value for key, value in rollout.items() if key != name}
        value = change(rollout[name])
        return others if value is None else others | {name: value}

    return changed("_generate_and_score_completions", change_entry)


def scaled_loss(patch: pytest.MonkeyPatch) -> None:
    backward = Accelerator.backward
    patch.setattr(Accelerator, "backward", lambda self, loss, **named: backward(self, loss / 2, **named))


def biased(patch: pytest.MonkeyPatch) -> None:
    """Standard deviations of four rewards over n instead of n − 1."""
    nanstd = grpo_trainer.nanstd
    factor = math.sqrt(3 / 4)
    patch.setattr(grpo_trainer, "nanstd", lambda values, **named: nanstd(values, **named) * factor)


def longer(patch: pytest.MonkeyPatch) -> None:
    generate = GenerationMixin.generate

    def generated(self, *args, generation_config=None, **named):
        generation_config.max_new_tokens = 50
        generation_config.eos_token_id = None
        return generate(self, *args, generation_config=generation_config, **named)

    patch.setattr(GenerationMixin, "generate", generated)
    patch.setattr(GRPOTrainer, "eos_token_ids", property(lambda self: [999], lambda *_: None), raising=False)


def hotter(patch: pytest.MonkeyPatch) -> None:
    generate = GenerationMixin.generate

    def generated(self, *args, generation_config=None, **named):
        generation_config.temperature = 1.5
        return generate(self, *args, generation_config=generation_config, **named)

    patch.setattr(GenerationMixin, "generate", generated)


def other_columns(patch: pytest.MonkeyPatch) -> None:
    """Reward functions get the columns of other rows."""
    method = GRPOTrainer._calculate_rewards
    patch.setattr(
        GRPOTrainer, "_calculate_rewards", lambda self, inputs, *lists: method(self, [*reversed(inputs)], *lists)
    )


def fewer_repeats(trainer: Any, sampler: Any) -> Any:
    sampler.repeat_count = 1
    return sampler


def tempered_reference(patch: pytest.MonkeyPatch) -> None:
    method = GRPOTrainer._get_per_token_logps_and_entropies

    def scored(self, model, *args, **named):
        logps, *others = method(self, model, *args, **named)
        called = model.args[0] if isinstance(model, partial) else model
        return (0.7 * logps if called is self.ref_model else logps, *others)

    patch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", scored)


# What entries of a rollout become.


def shifted(mask: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(mask[:, :-1], (1, 0))


def rotated(mask: torch.Tensor) -> torch.Tensor:
    return mask.roll(1, dims=1)


def of_the_one_before(logps: torch.Tensor) -> torch.Tensor:
    return logps.roll(1, dims=0)


def in_reverse(ids: torch.Tensor) -> torch.Tensor:
    return ids.flip(0)


def too_large(values: torch.Tensor) -> torch.Tensor:
    return 1.01 * values


def one_fewer(values: torch.Tensor) -> torch.Tensor:
    return values[1:]


def missing(_: torch.Tensor) -> None:
    return None


# What methods of TRL's trainer return.


def reversed_rewards(_: Any, rewards: torch.Tensor) -> torch.Tensor:
    return rewards.flip(0)


def reversed_turn(_: Any, turn: tuple) -> tuple:
    completion_ids, logps = turn
    return completion_ids[::-1], logps


def shortened_turn(_: Any, turn: tuple) -> tuple:
    completion_ids, logps = turn
    return [ids[:-1] for ids in completion_ids], logps


def reversed_prompts(_: Any, tokenized: tuple) -> tuple:
    prompt_ids, *others = tokenized
    return prompt_ids[::-1], *others


def rotated_logps(_: Any, result: tuple) -> tuple:
    logps, *others = result
    return logps.roll(1, dims=1), *others


def hotter_logps(_: Any, result: tuple) -> tuple:
    logps, *others = result
    return 0.9 * logps, *others


OTHER_COMPLETION = "prompt and completion 0 are not what the model has got and written"
BREAKS: dict[str, tuple[Callable, str, dict[str, Any]]] = {
    "entry": (entry("tool_mask", missing), "entries of a rollout: 'tool_mask' is missing", SCRIPTS["masks"]),
    "rows": (entry("advantages", one_fewer), "'advantages' has 7 rows for 8 completions", {}),
    "completion mask": (entry("completion_mask", shifted), "tokens and masks: the mask of completion 0, of ", {}),
    "prompt mask": (entry("prompt_mask", rotated), "tokens and masks: the mask of prompt", {}),
    "truncation": (entry("completion_mask", torch.ones_like), "the mask of completion", SCRIPTS["masks"]),
    "tool mask": (entry("tool_mask", torch.ones_like), "the mask of tool output in completion 1", SCRIPTS["masks"]),
    "tokens": (entry("completion_ids", in_reverse), "are not those that were generated", {}),
    "advantages": (entry("advantages", too_large), "advantages: that of completion 0 is", {}),
    "deviations": (biased, "advantages: that of completion", {}),
    "deviations of the batch": (biased, "advantages: that of completion", SCRIPTS["scores"]),
    "deviations of each": (biased, "advantages: that of completion", SCRIPTS["scores of each"]),
    "order of rewards": (changed("_calculate_rewards", reversed_rewards), "rewards: reward_0 returned [", {}),
    "columns of rewards": (
        other_columns,
        "did not get the column 'number' in the order of the completions",
        {
            "trainer_arguments": {
                "train_dataset": Dataset.from_dict({"prompt": PROMPTS, "number": range(len(PROMPTS))})
            }
        },
    ),
    "repeated prompts": (
        changed("_get_train_sampler", fewer_repeats),
        "the order of prompts: 'repeat_count' of the sampler is 1, not 8",
        SCRIPTS["passes"],
    ),
    "sampling": (hotter, "the model samples at a temperature of 1.5, not 1.0", GENERATES),
    "temperature of the reference": (tempered_reference, "the one by the reference model's logits", SCRIPTS["KL"]),
    "order of completions": (changed("_generate_single_turn", reversed_turn), OTHER_COMPLETION, GENERATES),
    "end of completions": (changed("_generate_single_turn", shortened_turn), OTHER_COMPLETION, GENERATES),
    "longest completion": (longer, "completion 0 has 50 tokens, more than 40", GENERATES),
    "order of prompts": (
        changed("_tokenize_prompts", reversed_prompts),
        "prompts: the tokens of prompt 0 are those of another one",
        GENERATES,
    ),
    "log-probabilities": (
        changed("_get_per_token_logps_and_entropies", rotated_logps),
        "log-probabilities: that of a token is ",
        {},
    ),
    "temperature": (
        changed("_get_per_token_logps_and_entropies", hotter_logps),
        "log-probabilities: that of a token is ",
        {},
    ),
    "reference": (
        entry("ref_per_token_logps", of_the_one_before),
        "the reference policy: they are ",
        SCRIPTS["KL"],
    ),
    "loss": (scaled_loss, "the loss of an optimizer step: its gradient is multiplied by [0.5], not once by 1.0", {}),
}


@pytest.mark.parametrize(("change", "text", "options"), BREAKS.values(), ids=BREAKS)
def test_change_of_trl_ends_the_run(change, text, options, untested, monkeypatch, tiny_model, tmp_path):
    trainer = trainer_with(tiny_model, tmp_path, options)
    change(monkeypatch)
    with pytest.raises(RuntimeError, match=r"With trl 1\.17\.0, OPO would train something else: ") as error:
        trainer.train()
    assert text in str(error.value)


@pytest.mark.parametrize("options", SCRIPTS.values(), ids=SCRIPTS)
def test_checks_change_nothing(options, untested, monkeypatch, tiny_model, tmp_path):
    checked = trainer_with(tiny_model, tmp_path / "checked", {"max_steps": 2, **options})
    assert isinstance(checked._first_step, FirstStep)
    checked.train()
    assert checked._first_step is None
    plain = trainer_with(tiny_model, tmp_path / "plain", {"max_steps": 2, **options})
    monkeypatch.setattr("opo_trl.generation.rollouts.untested", dict)
    plain.train()
    for weight, plain_weight in zip(checked.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(weight, plain_weight)


class Shortened(RecordingOPO):
    """A subclass that changes what is generated, as its user wants it."""

    def _generate(self, prompts):
        prompt_ids, completion_ids, *others = super()._generate(prompts)
        return prompt_ids, [ids[:3] for ids in completion_ids], *others


def test_what_a_subclass_changes_is_not_taken_for_a_fault(untested, tiny_model, tmp_path):
    trainer = trained(tiny_model, tmp_path, trainer_class=Shortened, **GENERATES)
    assert trainer.rollouts[0].completion_mask.sum() == 8 * 3


# For rollouts of eight completions, in two groups.
ENTRIES = {
    "a row each": torch.zeros(8, 3),
    "numbers": torch.arange(8),
    "a number": torch.tensor(3.0),
    "rows of groups": torch.zeros(2, 3),
    "a list": [[0], [1], [2], [3], [4], [5], [6], [7]],
    "another list": ["one", "two"],
    "a text": "text",
    "nothing": None,
}


@pytest.mark.parametrize("kind", ENTRIES)
def test_unknown_entries_travel_or_are_left_out_with_a_note(kind, untested, monkeypatch, tiny_model, tmp_path, caplog):
    def add(trainer, rollout):
        assert len(rollout["advantages"]) == 8
        return rollout | {"novelty": ENTRIES[kind]}

    changed("_generate_and_score_completions", add)(monkeypatch)
    travels = kind in ("a row each", "numbers")
    with caplog.at_level(logging.WARNING):
        trainer = trained(tiny_model, tmp_path, **GENERATES, max_sampling_rounds=2, num_iterations=2, max_steps=4)
    notes = [record.getMessage() for record in caplog.records if "novelty" in record.getMessage()]
    where = "travels with its samples" if travels else "is left out"
    assert notes == [f"[RANK 0] A rollout has an entry 'novelty' that opo_trl does not read. It {where}."]
    assert all(("novelty" in vars(rollout)) == travels for rollout in trainer.rollouts)


def test_advantages_follow_the_definition():
    """Two groups of three and two functions, one without a score of one completion; the last has none at all."""
    nan = float("nan")
    rewards = torch.tensor([[1, 4], [3, 4], [2, nan], [5, 1], [7, 0], [nan, nan]], dtype=torch.float64)
    weights = torch.tensor([1.0, 0.5], dtype=torch.float64)

    def of(scale: str, aggregation: str = "sum_then_normalize") -> list[float]:
        return advantages_of(rewards, weights, 3, scale=scale, aggregation=aggregation).tolist()

    group, other_group = [3.0, 5.0, 2.0], [5.5, 7.0]  # weighted sums
    centred = [value - statistics.fmean(group) for value in group]
    other_centred = [value - statistics.fmean(other_group) for value in other_group]
    assert of("none") == pytest.approx([*centred, *other_centred, 0])
    deviation = statistics.stdev(group) + 1e-4
    other_deviation = statistics.stdev(other_group) + 1e-4
    normalized = [value / deviation for value in centred]
    other_normalized = [value / other_deviation for value in other_centred]
    assert of("group") == pytest.approx([*normalized, *other_normalized, 0])
    deviation = statistics.stdev([*group, *other_group]) + 1e-4
    assert of("batch") == pytest.approx([value / deviation for value in [*centred, *other_centred]] + [0])
    half = math.sqrt(0.5)  # two values have normalized differences of ± √½ from their mean
    sums = [-1, 1, 0, -half + 0.5 * half, half - 0.5 * half]  # each function normalized; the second one weighs ½
    expected = [(value - statistics.fmean(sums)) / statistics.stdev(sums) for value in sums]
    assert of("group", "normalize_then_sum") == pytest.approx([*expected, 0], abs=1e-3)


def train_in_two_processes(model: str, folder: str, is_broken: bool) -> None:
    """Runs in each process; in the second one, a mask is shifted."""
    options = {"per_device_train_batch_size": 2, "ddp_backend": BACKEND, "beta": 0.1, "scale_rewards": "batch"}
    with untested_release(), pytest.MonkeyPatch.context() as patch:
        trainer = make_trainer(model, Path(folder), **options)
        if is_broken and trainer.accelerator.process_index == 1:
            entry("completion_mask", shifted)(patch)
        error = pytest.raises(RuntimeError, match="tokens and masks: the mask of completion 0")
        with error if is_broken else nullcontext():
            trainer.train()
    assert trainer.state.global_step == (0 if is_broken else 1)


@pytest.mark.parametrize("is_broken", [False, True])
def test_two_processes_raise_the_same_error(is_broken, tiny_model, tmp_path):
    arguments = (tiny_model, str(tmp_path), is_broken)
    status = launch(train_in_two_processes, *arguments, config="cpu", processes=2, folder=tmp_path / "logs")
    assert status == [0, 0], logs(tmp_path / "logs")
