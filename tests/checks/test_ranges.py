"""
Every numeric field of the configurations: just outside its range, NaN, infinite, or of another type.

The tests go through the fields of the installed versions, so a field that a later release adds fails until it has a
range.
"""

import dataclasses
import math
import types
from typing import Union, get_args, get_origin

import numpy as np
import pytest
from transformers import TrainingArguments
from trl import ModelConfig

from opo_trl import OPOConfig
from opo_trl.arguments import OPOScriptArguments
from opo_trl.checks import ranges
from opo_trl.config import check_fields
from opo_trl.fields import Range, declared, hints
from opo_trl.launch.async_recipe import AsyncRecipeConfig


CONFIGURATIONS = (
    AsyncRecipeConfig,
    OPOConfig,
    OPOScriptArguments,
    ModelConfig,
)  # the last decides


def kinds(hint) -> set[type]:
    """The types that a hint admits, including those of list entries but not of mapping values."""
    if get_origin(hint) in (Union, types.UnionType, list):
        return set().union(*map(kinds, get_args(hint)))
    return {hint}


RANGES = {name: allowed for kind in CONFIGURATIONS for name, allowed in ranges.of(kind).items()}
NUMBERS = {name: kind for kind in CONFIGURATIONS for name, hint in hints(kind).items() if kinds(hint) & {int, float}}

# Other fields to set so that a field is checked.
TOGETHER = {
    "vllm_importance_sampling_clip_min": {"vllm_importance_sampling_clip_max": None},
    "eval_steps": {"eval_strategy": "steps"},
    "max_staleness": {"num_iterations": 2},
}


def make(name: str, value):
    """A configuration with one field set, checked as in use."""
    if NUMBERS[name] is OPOConfig:
        # OPO rejects some inherited fields altogether.
        kind = OPOConfig
        kind("…", use_cpu=True, bf16=False, **{name: value}, **TOGETHER.get(name, {}))
    elif NUMBERS[name] is AsyncRecipeConfig:
        AsyncRecipeConfig("…", use_cpu=True, bf16=False, **{name: value})
    else:
        check_fields(NUMBERS[name](**{name: value}))


def fields(kind: type) -> set[str]:
    return {f.name for f in dataclasses.fields(kind)}


def outside(name: str) -> list:
    """Values just outside a range, and values that are not numbers."""
    allowed = RANGES[name]
    step = 1 if allowed.integer else 1e-6
    values = [math.nan, -math.inf, "1", True]
    values += [] if allowed.integer else [1e-40, 1e40]
    values += [math.inf] if math.inf not in allowed else []
    if not math.isinf(allowed.low):
        values.append(allowed.low if allowed.ends[0] == "(" else allowed.low - step)
    if not math.isinf(allowed.high):
        values.append(allowed.high if allowed.ends[1] == ")" else allowed.high + step)
    if allowed.integer:
        values += [allowed.low + 0.5] if not math.isinf(allowed.low) else [0.5]
    if name == "pad_to_multiple_of":
        values.remove("1")  # allowed: command lines pass text
    return [value for value in values if value not in allowed.also]


def wrapped(name: str, value):
    return {"reward_weights": [1.0, value], "temperature_range": [0.1, value]}.get(name, value)


CASES = [(name, value) for name in sorted(RANGES) for value in outside(name)]


def test_every_number_of_the_configurations_has_a_range():
    unknown = sorted(NUMBERS.keys() - RANGES.keys())
    assert not unknown, (
        f"{unknown} are numbers without a range. Add it to their definition, or those of TRL to RANGES."
    )
    assert not ranges.RANGES.keys() - NUMBERS.keys(), "these are not fields"
    ours = {name for kind in CONFIGURATIONS for name, said in declared(kind).items() if said}
    assert not ranges.RANGES.keys() & ours - {"num_iterations", "max_staleness"}, "these are ours, or in one trainer"


def test_every_field_with_choices_is_a_field():
    assert not ranges.CHOICES.keys() - set().union(*map(fields, CONFIGURATIONS))


@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_integer_ranges_belong_to_integer_fields(name):
    hint = next(f.type for f in dataclasses.fields(NUMBERS[name]) if f.name == name)
    text = hint if isinstance(hint, str) else getattr(hint, "__name__", str(hint))
    assert RANGES[name].integer == ("float" not in str(text) and "float" not in str(hint))


@pytest.mark.parametrize(("name", "value"), CASES, ids=lambda part: str(part))
def test_number_out_of_range_is_rejected_with_field_value_and_fix(name, value):
    with pytest.raises(ValueError, match="is not allowed") as error:
        make(name, wrapped(name, value))
    assert f"{name}={wrapped(name, value)!r}" in str(error.value)
    assert f"Set `{name}` to {RANGES[name]}" in str(error.value)


@pytest.mark.parametrize("name", sorted(RANGES))
def test_included_ends_are_allowed(name):
    allowed = RANGES[name]
    for end, bracket in ((allowed.low, allowed.ends[0]), (allowed.high, allowed.ends[1])):
        if bracket in "[]" and not math.isinf(end):
            assert (int(end) if allowed.integer else end) in allowed


def test_defaults_of_all_configurations_are_allowed():
    OPOConfig("…", use_cpu=True, bf16=False)
    for kind in (OPOScriptArguments, ModelConfig):
        check_fields(kind())


@pytest.mark.parametrize(
    "given",
    [
        {"max_steps": -1},
        {"save_total_limit": None},
        {"save_total_limit": 0},
        {"entropy_coef": -0.01},
        {"save_steps": -1, "save_strategy": "epoch"},
        {"eval_steps": -1},
        {"scale_rewards": "no"},
        {"vllm_model_impl": "auto"},
        {"vllm_server_base_url": "http://[::1]:8000"},
        {"vllm_server_base_url": "https://user:secret@host:80/path"},
        {"learning_rate": 0},
        {"learning_rate": np.float32(1e-6)},
        {"seed": np.int64(7)},
        {"warmup_steps": 0.03},
        {"warmup_steps": 100.0},
        {"logging_steps": 0.1},
        {"logging_steps": 0, "logging_strategy": "epoch"},
        {"save_steps": 0, "save_strategy": "no"},
        {"eval_steps": 0},
        {"max_grad_norm": 0},
        {"max_grad_norm": math.inf},
        {"top_k": 0},
        {"top_k": None},
        {"top_k": -1, "use_vllm": True},
        {"top_p": None},
        {"min_p": 0.05},
        {"temperature": 2},
        {"max_completion_length": None},
        {"num_generations_eval": 1, "per_device_eval_batch_size": 3},
        {"epsilon_high": 5.0, "loss_type": "cispo"},
        {"pad_to_multiple_of": "auto"},
        {"pad_to_multiple_of": "none"},
        {"pad_to_multiple_of": "64"},
        {"scale_rewards": False},
        {"scale_rewards": "False"},
        {"reward_weights": [1.0, -0.5]},
        {"vllm_importance_sampling_clip_max": None},
        {"top_entropy_quantile": 0.0},
        {"ddp_timeout": 180_000_000},
    ],
    ids=str,
)
def test_values_with_a_meaning_in_transformers_or_trl_are_allowed(given):
    OPOConfig("…", use_cpu=True, bf16=False, **given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"entropy_coef_min": 0.5, "entropy_coef_max": 0.1}, ["entropy_coef_min=0.5", "entropy_coef_max=0.1"]),
        ({"sync_ref_model": True}, ["sync_ref_model=True", "beta=0.0", "Set `beta`"]),
        ({"scale_rewards": "groups"}, ["scale_rewards='groups'", "group, batch, none"]),
        ({"vllm_mode": "colocated"}, ["vllm_mode='colocated'", "colocate, server"]),
        ({"loss_type": "ppo"}, ["loss_type='ppo'", "dapo"]),
        ({"reward_weights": [0.0, 0.0]}, ["reward_weights=[0.0, 0.0]", "other than 0"]),
        ({"run_name": "a\0"}, ["run_name='a\\x00'", "NUL"]),
        ({"train_sampling_strategy": "group_by_length"}, ["train_sampling_strategy=", "random"]),
        ({"temperature": 1e300}, ["temperature=1e+300", "and 1e+30 in magnitude"]),
        ({"vllm_server_base_url": "http://a@b@c"}, ["vllm_server_base_url='http://***@c'"]),
        ({"watches": ["stop if reward < nan"]}, ["watches=", "nan", "finite"]),
    ],
    ids=str,
)
def test_contradictions_and_unknown_words_are_rejected(given, says):
    with pytest.raises(ValueError, match="=") as error:
        OPOConfig("…", use_cpu=True, bf16=False, **given)
    for text in says:
        assert text in str(error.value)


def test_seed_plus_rank_stays_in_range(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ValueError, match=r"seed=4294967295 is not allowed.*from 0 to 4294967288"):
        OPOConfig("…", use_cpu=True, bf16=False, per_device_train_batch_size=8, seed=2**32 - 1)


def test_integer_temperature_becomes_a_float():
    args = OPOConfig("…", use_cpu=True, bf16=False, temperature=2, repetition_penalty=2)
    assert isinstance(args.temperature, float)
    assert isinstance(args.repetition_penalty, float)


def test_ranges_describe_themselves():
    assert str(Range(0, 1, ends="[)")) == "a number in [0, 1)"
    assert 0.0 in Range(0, 1)
    assert True not in Range(0, 1)
    assert 10**400 not in Range(0, integer=True)
    assert fields(TrainingArguments) & NUMBERS.keys()
