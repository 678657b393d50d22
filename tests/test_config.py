"""
`OPOConfig`: ranges, defaults, the command line, and a walk over every field of the installed `GRPOConfig`.

The walk guards against an option that looks set and does nothing. A field that a later TRL adds fails it by name,
until it is implemented with a test, rejected, or listed as one that does not affect the loss.
"""

import ast
import dataclasses
import inspect
import json
import math
from pathlib import Path

import pytest
from transformers import TrainingArguments
from trl import GRPOConfig, GRPOTrainer, TrlParser

from opo_trl import OPOConfig, OPOTrainer
from opo_trl.objectives import OBJECTIVES


OWN_FIELDS = sorted({f.name for f in dataclasses.fields(OPOConfig)} - {f.name for f in dataclasses.fields(GRPOConfig)})

# A value other than the default for every field that OPO rejects.
# Field that affects the loss -> the test that proves its effect.
IMPLEMENTED = {
    "beta": "test_trainer_options.py::test_kl_to_the_reference",
    "use_bias_correction_kl": "test_trainer_options.py::test_kl_to_the_reference",
    "sync_ref_model": "test_trainer_options.py::test_reference_model_follows_the_policy",
    "ref_model_mixup_alpha": "test_trainer_options.py::test_reference_model_follows_the_policy",
    "ref_model_sync_steps": "test_trainer_options.py::test_reference_model_follows_the_policy",
    "entropy_coef": "test_trainer_options.py::test_entropy_bonus",
    "use_adaptive_entropy": "test_trainer_options.py::test_entropy_controller_moves_to_its_bound",
    "entropy_coef_min": "test_trainer_options.py::test_entropy_controller_moves_to_its_bound",
    "entropy_coef_max": "test_trainer_options.py::test_entropy_controller_moves_to_its_bound",
    "entropy_coef_delta": "test_trainer_options.py::test_entropy_controller_moves_to_its_bound",
    "entropy_target": "test_trainer_options.py::test_entropy_controller_moves_to_its_bound",
    "top_entropy_quantile": "test_trainer_options.py::test_low_entropy_tokens_have_no_gradient",
    "off_policy_mask_threshold": "test_trainer_options.py::test_off_policy_mask_drops_samples",
    "vllm_importance_sampling_correction": "test_trainer_options.py::test_importance_sampling_ratio_weights_samples",
    "vllm_importance_sampling_mode": "test_trainer_options.py::test_importance_sampling_ratio_weights_samples",
    "vllm_importance_sampling_clip_max": "test_trainer_options.py::test_importance_sampling_ratio_weights_samples",
    "vllm_importance_sampling_clip_min": "test_trainer_options.py::test_importance_sampling_ratio_weights_samples",
    "vllm_importance_sampling_cap": "test_trainer_options.py::test_importance_sampling_ratio_weights_samples",
    "mask_truncated_completions": "test_trainer_options.py::test_truncated_completions_take_part_unless_masked",
    "router_aux_loss_coef": "test_trainer_options.py::test_router_auxiliary_loss",
    "num_iterations": "test_trainer_options.py::test_num_iterations_adds_off_policy_steps",
    "steps_per_generation": "test_trainer.py::test_gradient_is_the_definition",
    "generation_batch_size": "test_trainer_options.py::test_generation_batch_size_sets_the_off_policy_steps",
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
    known = {"label_smoothing_factor", *OF_LOSSES} | set(IMPLEMENTED) | set().union(*NO_EFFECT_ON_THE_LOSS.values())
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


def test_trainers_take_what_grpo_takes():
    shown, parent = inspect.signature(OPOTrainer), inspect.signature(GRPOTrainer)
    defaults = {name: parameter.default for name, parameter in parent.parameters.items()}
    assert [*shown.parameters] == [*defaults]
    assert {name: shown.parameters[name].default for name in defaults} == defaults


# Defaults and ranges


def test_defaults(config):
    values = {name: getattr(config(), name) for name in OWN_FIELDS}
    assert values == {
        "alpha": 0.4,
        "escort_temperature": 1.0,
        "adaptive_temperature": False,
        "temperature_range": [0.2, 1.5],
        "anchor_correction": "absorbed",
        "drive_scaling": "none",
        "mu": 0.3,
        "chi2_radius": None,
        "positivity": "none",
        "positivity_epsilon": 1e-3,
        "log_ratio_reduction": "sum",
        "log_ratio_clamp": 20.0,
        "ratio_form": "truncated",
        "objective": "opo",
        "push": "reward",
        "positive_bounds": [1.0, 1.0],
        "negative_bounds": [0.0, 1.0],
        "max_sampling_rounds": 1,
        "max_staleness": 0,
        "rollouts": None,
        "rollouts_model": None,
        "save_rollouts": False,
        "max_completions": None,
        "max_reward_failure_rate": 0.1,
        "max_skipped_steps": 10,
        "plan_micro_batches": True,
        "max_tokens_per_micro_batch": None,
        "skip_inert_rows": True,
    }


@pytest.mark.parametrize(
    ("given", "mu", "clamp"),
    [
        ({"log_ratio_reduction": "mean"}, 0.3, 5.0),
        ({"log_ratio_reduction": "mean", "log_ratio_clamp": 3.0}, 0.3, 3.0),
        ({"chi2_radius": 0.1}, None, 20.0),
        ({"mu": 0.7}, 0.7, 20.0),
    ],
)
def test_defaults_that_depend_on_other_fields(config, given, mu, clamp):
    made = config(**given)
    assert (made.mu, made.log_ratio_clamp) == (mu, clamp)


@pytest.mark.parametrize("alpha", [0, 0.0, 1, 1.0])
def test_ends_of_the_escort_path_are_allowed(config, alpha):
    assert config(alpha=alpha).alpha == alpha


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("alpha", -0.01, "[0, 1]"),
        ("alpha", 1.01, "[0, 1]"),
        ("alpha", math.nan, "[0, 1]"),
        *[
            (name, value, "positive")
            for name in ("escort_temperature", "mu", "chi2_radius", "log_ratio_clamp")
            for value in (0.0, -1.0, math.nan, math.inf)
        ],
        ("temperature_range", [1.5, 0.2], "the lower first"),
        ("temperature_range", [0.0, 1.0], "positive"),
        ("temperature_range", [0.2], "two"),
        ("temperature_range", [0.2, 0.5, 1.0], "two"),
        ("temperature_range", [0.2, math.inf], "positive"),
        ("temperature_range", [math.nan, 1.0], "positive"),
        ("positivity_epsilon", 0.0, "(0, 1)"),
        ("positivity_epsilon", 1.0, "(0, 1)"),
        *[("max_reward_failure_rate", value, "[0, 1]") for value in (-0.1, 1.1, math.nan)],
        ("max_skipped_steps", 0, "an integer of at least 1"),
        *[("max_staleness", value, "an integer from 0 to 2147483647") for value in (-1, 0.5, math.nan, True, 2**63)],
        *[("max_completions", value, "an integer of at least 1") for value in (0, -1, 1.5, True)],
        ("anchor_correction", "token", "absorbed, length_normalized, sequence"),
        ("drive_scaling", "rollout", "none, group, batch"),
        ("positivity", "clamp", "none, stiffen, clip, project"),
        ("log_ratio_reduction", "token", "sum, mean"),
        ("ratio_form", "linear", "truncated, log, exact"),
    ],
)
def test_value_out_of_range_is_rejected_with_field_value_and_fix(config, name, value, fix):
    with pytest.raises(ValueError, match="is not allowed") as error:
        config(**{name: value})
    for text in (f"{name}={value!r}", f"Set `{name}`", fix):
        assert text in str(error.value)


def test_what_cannot_be_resumed_exactly_is_rejected(config):
    with pytest.raises(ValueError, match=r"enable_jit_checkpoint=True is not allowed.*StopOnSignal"):
        config(enable_jit_checkpoint=True)
    with pytest.raises(ValueError, match=r"ignore_data_skip=True is not allowed.*Remove it"):
        config(ignore_data_skip=True)


def test_mu_and_radius_together_are_rejected(config):
    with pytest.raises(ValueError, match=r"mu=2\.0 and chi2_radius=0\.1 are both set.*Remove one"):
        config(mu=2.0, chi2_radius=0.1)


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


# Round trips


CHANGED = {
    "alpha": 0.25,
    "escort_temperature": 0.5,
    "adaptive_temperature": True,
    "temperature_range": [0.3, 1.2],
    "anchor_correction": "length_normalized",
    "drive_scaling": "group",
    "mu": None,
    "chi2_radius": 0.05,
    "positivity": "project",
    "positivity_epsilon": 0.01,
    "log_ratio_reduction": "mean",
    "log_ratio_clamp": 3.0,
    "ratio_form": "exact",
    "objective": "added_objective.Cautious",  # of somebody else, which may read all fields
    "push": "escort",
    "positive_bounds": [1.0, 2.0],
    "negative_bounds": [0.0, 2.0],
    "max_sampling_rounds": 3,
    "max_staleness": 4,
    "rollouts": None,
    "rollouts_model": None,
    "save_rollouts": True,
    "max_completions": 1000,
    "max_reward_failure_rate": 0.3,
    "max_skipped_steps": 3,
    "plan_micro_batches": True,
    "max_tokens_per_micro_batch": 4096,
    "skip_inert_rows": False,
}


# Values of TRL's fields that these need.
NEEDED = {"num_iterations": 2}


def test_these_values_change_every_field(config):
    assert sorted(CHANGED) == OWN_FIELDS
    unchanged = {name for name in OWN_FIELDS if getattr(config(), name) == CHANGED[name]}
    # `max_tokens_per_micro_batch` needs the first, `max_sampling_rounds` excludes the others.
    assert unchanged == {"plan_micro_batches", "rollouts", "rollouts_model"}


def test_round_trip_through_a_dictionary(config):
    made = config(**CHANGED, **NEEDED)
    restored = config(**{name: made.to_dict()[name] for name in (*OWN_FIELDS, *NEEDED)})
    assert {name: getattr(restored, name) for name in OWN_FIELDS} == CHANGED
    assert {name: json.loads(made.to_json_string())[name] for name in OWN_FIELDS} == CHANGED


def test_round_trip_through_the_command_line(tmp_path):
    words = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false"]
    for name, value in {**CHANGED, **NEEDED}.items():
        if value is not None:
            words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    (parsed,) = TrlParser((OPOConfig,)).parse_args_and_config(args=words)
    assert {name: getattr(parsed, name) for name in OWN_FIELDS} == CHANGED


def test_round_trip_through_yaml(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, **CHANGED, **NEEDED}))
    (parsed,) = TrlParser((OPOConfig,)).parse_args_and_config(args=["--config", str(recipe)])
    assert {name: getattr(parsed, name) for name in OWN_FIELDS} == CHANGED


@pytest.mark.parametrize("name", ["anchor_correction", "drive_scaling", "positivity", "ratio_form"])
def test_command_line_offers_only_the_choices(tmp_path, capsys, name):
    with pytest.raises(SystemExit):
        TrlParser((OPOConfig,)).parse_args_and_config(args=["--output_dir", str(tmp_path), f"--{name}", "other"])
    assert f"argument --{name}" in capsys.readouterr().err


def test_every_field_is_documented():
    assert all(field.metadata["help"] for field in dataclasses.fields(OPOConfig) if field.name in OWN_FIELDS)


@pytest.mark.parametrize(
    "options",
    [{"load_best_model_at_end": True}, {"save_strategy": "best"}, {"lr_scheduler_type": "reduce_lr_on_plateau"}],
    ids=lambda options: next(iter(options)),
)
def test_what_follows_a_metric_follows_the_reward(tmp_path, options):
    """Transformers would take the loss, which is 0 in every evaluation."""
    often = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "use_cpu": True}
    config = OPOConfig(str(tmp_path), **{**often, "bf16": False, **options})
    assert (config.metric_for_best_model, config.greater_is_better) == ("reward", True)
    schedule = {"mode": "max"} if "lr_scheduler_type" in options else None
    assert config.lr_scheduler_kwargs == schedule
    chosen = OPOConfig(str(tmp_path), **{**often, "bf16": False, **options, "metric_for_best_model": "length_loss"})
    assert (chosen.metric_for_best_model, chosen.greater_is_better) == ("length_loss", False)
    with pytest.raises(ValueError, match=r"metric_for_best_model='eval_loss' .* reward: the loss does not"):
        OPOConfig(str(tmp_path), **{**often, "bf16": False, **options, "metric_for_best_model": "eval_loss"})
    with pytest.raises(ValueError, match=r"greater_is_better=False .* `metric_for_best_model` is the reward"):
        OPOConfig(str(tmp_path), **{**often, "bf16": False, **options, "greater_is_better": False})
