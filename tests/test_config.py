"""
`OPOConfig`: ranges, defaults, the command line, and a walk over every field of the installed `GRPOConfig`.

The walk guards against an option that looks set and does nothing. A field that a later TRL adds fails it by name,
until it is implemented with a test, rejected, or listed as one that does not affect the loss.
"""

import ast
import dataclasses
import json
import math
import re
from pathlib import Path
from typing import get_type_hints

import pytest
from transformers import TrainingArguments
from trl import GRPOConfig, TrlParser

from opo_trl import OPOConfig
from opo_trl.arguments import OPOScriptArguments
from opo_trl.fields import default, field_problems
from opo_trl.launch.async_recipe import AsyncRecipeConfig
from opo_trl.objectives import OBJECTIVES


# Field that affects the loss -> the test that proves its effect.
IMPLEMENTED = {
    "beta": "test_trainer_options.py::test_kl_to_the_reference",
    "use_bias_correction_kl": "test_trainer_options.py::test_kl_to_the_reference",
    "sync_ref_model": "test_trainer_options.py::test_reference_model_follows_the_policy",
    "ref_model_mixup_alpha": "test_trainer_options.py::test_reference_model_follows_the_policy",
    "ref_model_sync_steps": "test_trainer_options.py::test_reference_model_follows_the_policy",
    "entropy_coef": "test_trainer_options.py::test_entropy_bonus",
    "top_entropy_quantile": "test_trainer_options.py::test_low_entropy_tokens_have_no_gradient",
    "off_policy_mask_threshold": "test_trainer_options.py::test_masked_values_have_no_effect_even_if_not_finite",
    "vllm_importance_sampling_correction": "test_trainer_options.py::test_importance_sampling_ratio_weights_samples",
    "vllm_importance_sampling_mode": "test_trainer_options.py::test_importance_sampling_ratio_weights_samples",
    "vllm_importance_sampling_clip_max": "test_trainer_options.py::test_importance_sampling_ratio_weights_samples",
    "vllm_importance_sampling_clip_min": "test_trainer_options.py::test_importance_sampling_ratio_weights_samples",
    "vllm_importance_sampling_cap": "test_trainer_options.py::test_importance_sampling_ratio_weights_samples",
    "mask_truncated_completions": "test_trainer.py::test_gradient_is_the_definition",
    "router_aux_loss_coef": "test_trainer_options.py::test_router_auxiliary_loss",
    "num_iterations": "test_trainer_options.py::test_num_iterations_adds_off_policy_steps",
    "steps_per_generation": "test_trainer.py::test_gradient_is_the_definition",
    "generation_batch_size": "test_trainer.py::test_split_into_micro_batches_changes_nothing",
    "num_generations": "test_trainer_options.py::test_group_size",
    "num_generations_eval": "test_trainer_options.py::test_evaluation",
    "reward_weights": "test_trainer.py::test_gradient_is_the_definition",
    "multi_objective_aggregation": "test_trainer.py::test_gradient_is_the_definition",
    "scale_rewards": "test_trainer.py::test_gradient_is_the_definition",
    "temperature": "test_trainer.py::test_gradient_is_the_definition",
    "cast_lm_head_to_fp32": "test_trainer_options.py::test_half_precision_model",
}

# Of TRL's losses, which `test_trl_losses.py` compares
OF_LOSSES = {"loss_type", "epsilon", "epsilon_high", "delta", "importance_sampling_level"} | {
    *("sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg"),
    "vespo_lambda_neg",
}

# Fields that do not affect the loss of given completions, by what they are about.
NO_EFFECT_ON_THE_LOSS = {
    "loading the model": {"model_init_kwargs", "trust_remote_code", "disable_dropout"},
    "the dataset": {"shuffle_dataset"},
    "padding": {"pad_to_multiple_of"},
    "what is rejected": {
        *("use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
    },
    "generation": {
        "max_completion_length",
        "ds3_gather_for_generation",
        "top_p",
        "top_k",
        "min_p",
        "generation_kwargs",
        "chat_template_kwargs",
        "repetition_penalty",
        "cache_implementation",
        "max_tool_calling_iterations",
        "use_transformers_continuous_batching",
        "transformers_continuous_batching_config",
        "use_transformers_paged",
    },
    "the vLLM engine": {
        "use_vllm",
        "vllm_mode",
        "vllm_model_impl",
        "vllm_enable_sleep_mode",
        "vllm_structured_outputs_regex",
        "vllm_server_base_url",
        "vllm_server_host",
        "vllm_server_port",
        "vllm_server_timeout",
        "vllm_group_port",
        "vllm_gpu_memory_utilization",
        "vllm_max_model_length",
        "vllm_tensor_parallel_size",
    },
    "logging": {
        "log_completions",
        "log_multimodal",
        "num_completions_to_print",
        "log_unique_prompts",
        "log_completions_hub_repo",
    },
}


@pytest.fixture
def config(tmp_path):
    def make(**overrides) -> OPOConfig:
        return OPOConfig(**{"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, **overrides})

    return make


def grpo_fields() -> set[str]:
    """GRPOConfig's own fields; those of TrainingArguments act outside the loss."""
    inherited = {f.name for f in dataclasses.fields(TrainingArguments)}
    return {f.name for f in dataclasses.fields(GRPOConfig)} - inherited


# The walk


def test_every_field_of_grpo_is_implemented_rejected_or_without_effect_on_the_loss():
    known = OF_LOSSES | set(IMPLEMENTED) | set().union(*NO_EFFECT_ON_THE_LOSS.values())
    unknown = sorted(grpo_fields() - known)
    assert not unknown, (
        f"GRPOConfig has fields that OPO does not know: {unknown}. Implement each with a test, or list it here "
        "as one that does not affect the loss."
    )


def test_no_field_is_in_two_lists():
    lists = [OF_LOSSES, set(IMPLEMENTED), *NO_EFFECT_ON_THE_LOSS.values()]
    assert sum(map(len, lists)) == len(set().union(*lists))


def test_the_tests_named_for_implemented_fields_exist():
    def tests_in(file: str) -> set[str]:
        tree = ast.parse((Path(__file__).parent / file).read_text(encoding="utf-8"))
        return {f"{file}::{node.name}" for node in tree.body if isinstance(node, ast.FunctionDef)}

    assert set(IMPLEMENTED.values()) <= tests_in("test_trainer.py") | tests_in("test_trainer_options.py")


@pytest.mark.parametrize("name", sorted(OF_LOSSES - {"loss_type"}))
def test_field_of_another_objective_is_rejected_with_those_that_read_it(config, name):
    value = {"importance_sampling_level": "sequence"}.get(name, 0.7)
    readers = [word for word, objective in OBJECTIVES.items() if name in objective.fields]
    with pytest.raises(ValueError, match=rf"{name}=.* has no effect with objective='opo'.*{' or '.join(readers)}"):
        config(**{name: value})
    assert getattr(config(objective=readers[0], **{name: value}), name) == value


def test_loss_type_names_an_objective(config):
    for name in ("grpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo"):
        assert config(loss_type=name).objective == name
        made = config(loss_type=name)
        fields = {each.name: getattr(made, each.name) for each in dataclasses.fields(made) if each.init}
        assert OPOConfig(**{**fields, "generation_batch_size": None}).objective == name  # made anew of its own fields
    with pytest.raises(ValueError, match=r"loss_type='bnpo' is not allowed.*nearest is dapo"):
        config(loss_type="bnpo")
    with pytest.raises(ValueError, match=r"objective='opo' and loss_type='grpo' are both set"):
        config(objective="opo", loss_type="grpo")


# Fields on their own


def test_defaults_that_depend_on_other_fields(config):
    cases = [({}, 0.3, 20.0), ({"log_ratio_reduction": "mean"}, 0.3, 5.0), ({"chi2_radius": 0.1}, None, 20.0)]
    for given, mu, clamp in cases:
        made = config(**given)
        assert (made.mu, made.log_ratio_clamp) == (mu, clamp)
        assert made.objective == "opo"


@pytest.mark.parametrize("kind", [OPOConfig, AsyncRecipeConfig, OPOScriptArguments])
def test_every_field_of_ours_is_documented_and_its_bound_holds(kind):
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if kind is not OPOScriptArguments:
        kind("…", use_cpu=True, bf16=False)
    for name, annotation in get_type_hints(kind, include_extras=True).items():
        bounds = getattr(annotation, "__metadata__", ())
        if name in fields and bounds:
            assert fields[name].metadata["help"]
            for value in (math.nan, -1, math.inf, True, "1"):
                found = field_problems(kind, {name: value})[name]
                assert found == f"{name}={value!r} is not allowed. Set `{name}` to {bounds[0].text}."
            assert not field_problems(kind, {name: default(fields[name])})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        # Alone
        ({"alpha": 1.01}, "alpha=1.01 is not allowed. Set `alpha` to a number in [0, 1]"),
        ({"mu": 0.0}, "Set `mu` to a positive"),
        ({"positivity": "clamp"}, "one of none, stiffen, clip, project"),
        ({"temperature_range": [1.5, 0.2]}, "the lower first"),
        ({"negative_bounds": [0.0, math.nan], "objective": "topr"}, "the lower first"),
        ({"max_steps": 0}, "or to -1 to use `num_train_epochs`"),
        ({"num_train_epochs": 0}, "a positive finite number"),
        ({"temperature": 0.0}, "Set `temperature` to a positive"),
        ({"top_p": 95.0}, "a number in (0, 1]"),
        ({"beta": -0.1}, "0 or more"),
        # Together
        ({"mu": 2.0, "chi2_radius": 0.1}, "mu=2.0 and chi2_radius=0.1 are both set"),
        ({"max_staleness": 2}, "max_staleness=2 replays nothing"),
        (
            {"max_staleness": 2, "num_iterations": 2, "steps_per_generation": 8, "gradient_accumulation_steps": 16},
            "`gradient_accumulation_steps` to at most 8",
        ),
        ({"scale_rewards": "batch", "max_sampling_rounds": 2}, "normalizes over groups that are replaced later"),
        ({"enable_jit_checkpoint": True}, "no run could be resumed exactly"),
        ({"ignore_data_skip": True}, "no run could be resumed exactly"),
        # Options that libraries would ignore, or sample otherwise with
        ({"optim_args": "lr=3"}, "optim_args='lr=3' has no effect on optim='adamw_torch_fused'"),
        ({"generation_kwargs": {"temprature": 2}}, "'temprature' is not an option of GenerationConfig"),
        ({"generation_kwargs": {"num_beams": 2}}, "'num_beams' would not sample one completion per row"),
        ({"generation_kwargs": {"temperature": 0.5}}, "contradicts temperature=1.0. Set `temperature`"),
        ({"generation_kwargs": {"max_new_tokens": 9}}, "Set `max_completion_length`"),
    ],
    ids=str,
)
def test_what_would_train_something_else_is_named(config, given, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        config(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"alpha": 0},
        {"alpha": 1.0},
        {"max_steps": -1},
        {"scale_rewards": "false"},
        {"reward_weights": [1.0, -0.5]},
        {"epsilon_high": 5.0, "loss_type": "cispo"},
        {"optim": "sgd", "optim_args": "momentum=0.9, nesterov=true"},
        {"generation_kwargs": {"top_k": 5, "eos_token_id": 3, "num_beams": 1, "temperature": 1.0}},
    ],
    ids=str,
)
def test_what_acts_is_accepted(config, given):
    config(**given)


# Optimizer steps per rollout


@pytest.mark.parametrize(
    ("given", "steps", "on_policy"),
    [
        ({"gradient_accumulation_steps": 2}, 1, True),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 8}, 4, False),
        ({"gradient_accumulation_steps": 2, "num_iterations": 2}, 2, False),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, 0.5, True),
        ({"gradient_accumulation_steps": 3, "steps_per_generation": 2}, 2 / 3, False),
    ],
)
def test_optimizer_steps_per_rollout(config, given, steps, on_policy):
    made = config(per_device_train_batch_size=8, **given)
    assert made.optimizer_steps_per_rollout == pytest.approx(steps)
    assert made.is_on_policy is on_policy


def test_process_that_sees_several_devices_uses_one(config, monkeypatch):
    """TRL would split the model over all of them."""
    monkeypatch.setattr(OPOConfig, "n_gpu", property(lambda args: vars(args).get("_seen", 2)))
    made = config()
    assert (made._n_gpu, made.model_init_kwargs) == (1, {"device_map": {"": 0}})


# Round trips


CHANGED = {
    "alpha": 0.25,
    "adaptive_temperature": True,
    "temperature_range": [0.3, 1.2],
    "mu": None,
    "chi2_radius": 0.05,
    "positivity": "project",
    "log_ratio_clamp": 3.0,
    "max_staleness": 4,
    "max_completions": 1000,
    "num_iterations": 2,
}


def test_round_trip_through_the_command_line_and_a_dictionary(tmp_path):
    words = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false"]
    for name, value in CHANGED.items():
        if value is not None:
            words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    (parsed,) = TrlParser((OPOConfig,)).parse_args_and_config(args=words)
    for name, value in CHANGED.items():
        assert getattr(parsed, name) == parsed.to_dict()[name] == json.loads(parsed.to_json_string())[name] == value


@pytest.mark.parametrize(
    "options",
    [{"load_best_model_at_end": True}, {"save_strategy": "best"}, {"lr_scheduler_type": "reduce_lr_on_plateau"}],
    ids=lambda options: next(iter(options)),
)
def test_what_follows_a_metric_follows_the_reward(tmp_path, options):
    """Transformers would take the loss, which is 0 in every evaluation."""
    often = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "use_cpu": True}
    options = {**often, "bf16": False, **options}
    config = OPOConfig(str(tmp_path), **options)
    assert (config.metric_for_best_model, config.greater_is_better) == ("reward", True)
    assert config.lr_scheduler_kwargs == ({"mode": "max"} if "lr_scheduler_type" in options else None)
    chosen = OPOConfig(str(tmp_path), **options, metric_for_best_model="length_loss")
    assert (chosen.metric_for_best_model, chosen.greater_is_better) == ("length_loss", False)
    with pytest.raises(ValueError, match=r"metric_for_best_model='eval_loss' .* reward: the loss does not"):
        OPOConfig(str(tmp_path), **options, metric_for_best_model="eval_loss")
