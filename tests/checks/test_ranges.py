"""Numbers out of their range: ours, and those of TRL and Transformers that would train without a word."""

import dataclasses
import math

import pytest
from trl import ModelConfig

from opo_trl import OPOConfig
from opo_trl.arguments import OPOScriptArguments
from opo_trl.checks import ranges
from opo_trl.config import check_fields
from opo_trl.fields import Range
from opo_trl.launch.async_recipe import AsyncRecipeConfig


CONFIGURATIONS = (AsyncRecipeConfig, OPOConfig, OPOScriptArguments, ModelConfig)
# The last decides.
KINDS = {field.name: kind for kind in CONFIGURATIONS for field in dataclasses.fields(kind)}
KINDS |= {name: kind for kind in CONFIGURATIONS for name in ranges.of(kind)}
RANGES = {name: allowed for kind in CONFIGURATIONS for name, allowed in ranges.of(kind).items()}


def outside(allowed: Range) -> list:
    values = [math.nan, "1", True]
    if not math.isinf(allowed.low):
        values.append(allowed.low if allowed.ends[0] == "(" else allowed.low - (1 if allowed.integer else 1e-6))
    return [value for value in values if value not in allowed.also]


def test_every_range_is_that_of_a_field():
    assert (ranges.RANGES.keys() | ranges.CHOICES.keys()) <= KINDS.keys()


@pytest.mark.parametrize("name", sorted(RANGES))
def test_number_out_of_range_is_rejected_with_field_value_and_fix(name):
    for value in outside(RANGES[name]):
        given = {"reward_weights": [1.0, value], "temperature_range": [0.1, value]}.get(name, value)
        found = ranges.problems(KINDS[name], {name: given})
        assert f"{name}={given!r} is not allowed. Set `{name}` to {RANGES[name]}" in found[name]


def test_defaults_of_all_configurations_are_allowed():
    OPOConfig("…", use_cpu=True, bf16=False)
    for kind in (OPOScriptArguments, ModelConfig):
        check_fields(kind())


@pytest.mark.parametrize(
    "given",
    [
        {"max_steps": -1},
        {"scale_rewards": "no"},
        {"learning_rate": 0},
        {"max_grad_norm": math.inf},
        {"temperature": 2},
        {"epsilon_high": 5.0, "loss_type": "cispo"},
        {"reward_weights": [1.0, -0.5]},
        {"vllm_importance_sampling_clip_max": None},
        {"vllm_server_base_url": "https://user:secret@host:80/path/"},
    ],
    ids=str,
)
def test_values_with_a_meaning_in_transformers_or_trl_are_allowed(given):
    OPOConfig("…", use_cpu=True, bf16=False, **given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"num_generations": 1}, "at least 2"),
        ({"top_p": 95.0}, "to a number in .0, 1"),
        ({"max_steps": 0}, "or to -1 to use `num_train_epochs`"),
        ({"sync_ref_model": True}, "sync_ref_model=True with beta=0.0"),
        ({"reward_weights": [0.0, 0.0]}, "other than 0"),
        ({"train_sampling_strategy": "group_by_length"}, "to one of random"),
    ],
    ids=str,
)
def test_contradictions_and_unknown_words_are_rejected(given, says):
    with pytest.raises(ValueError, match=says):
        OPOConfig("…", use_cpu=True, bf16=False, **given)
