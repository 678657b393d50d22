"""
`OPOConfig`: ranges, defaults, the command line, and a walk over every field of the installed `GRPOConfig`.

The walk guards against an option that looks set and does nothing. A field that a later TRL adds fails it by name,
until it is implemented with a test, rejected, or listed as one that does not affect the loss.
"""

import dataclasses
import inspect
import json
import math
import re
from pathlib import Path
from typing import get_type_hints

import numpy
import pytest
from transformers import TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available
from trl import GRPOConfig, ScriptArguments, TrlParser

from opo_trl import OPOConfig
from opo_trl.command.arguments import OPOScriptArguments
from opo_trl.fields import default, described, field_problems, hints
from opo_trl.objectives import OBJECTIVES


ROOT = Path(__file__).resolve().parents[1]

# Fields whose effect on the loss the tests of the trainer, and of parity with TRL, show.
OF_THE_LOSS = """
    beta use_bias_correction_kl sync_ref_model ref_model_mixup_alpha ref_model_sync_steps entropy_coef
    top_entropy_quantile off_policy_mask_threshold vllm_importance_sampling_correction vllm_importance_sampling_mode
    vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min vllm_importance_sampling_cap
    mask_truncated_completions router_aux_loss_coef num_iterations steps_per_generation generation_batch_size
    num_generations num_generations_eval reward_weights multi_objective_aggregation scale_rewards temperature
    cast_lm_head_to_fp32 loss_type
"""

# What an objective of TRL reads, and OPO does not.
OF_OTHERS = """
    epsilon epsilon_high delta importance_sampling_level sapo_temperature_neg sapo_temperature_pos vespo_k_pos
    vespo_lambda_pos vespo_k_neg vespo_lambda_neg
"""

# Loading, data, generation, the vLLM engine and logging; of the adaptive entropy bonus, which is rejected.
WITHOUT_EFFECT_ON_THE_LOSS = """
    model_init_kwargs trust_remote_code disable_dropout shuffle_dataset pad_to_multiple_of
    use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target
    max_completion_length ds3_gather_for_generation top_p top_k min_p generation_kwargs chat_template_kwargs
    repetition_penalty cache_implementation max_tool_calling_iterations use_transformers_continuous_batching
    transformers_continuous_batching_config use_transformers_paged
    use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url
    vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization
    vllm_max_model_length vllm_tensor_parallel_size
    log_completions log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo
"""


@pytest.fixture
def config(tmp_path):
    def make(**overrides) -> OPOConfig:
        return OPOConfig(**{"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, **overrides})

    return make


def test_every_field_of_grpo_is_known():
    """Those of TrainingArguments act outside the loss."""
    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    fields = {field.name for field in dataclasses.fields(GRPOConfig)} - inherited
    unknown = fields - {*OF_THE_LOSS.split(), *OF_OTHERS.split(), *WITHOUT_EFFECT_ON_THE_LOSS.split()}
    assert not unknown, "Implement each with a test, or list it here as one that does not affect the loss."


@pytest.mark.parametrize("name", OF_OTHERS.split())
def test_field_of_another_objective_is_rejected_with_those_that_read_it(config, name):
    value = {"importance_sampling_level": "sequence"}.get(name, 0.7)
    readers = [word for word, objective in OBJECTIVES.items() if name in objective.fields]
    with pytest.raises(ValueError, match=rf"{name}=.* has no effect with objective='opo'.*{' or '.join(readers)}"):
        config(**{name: value})
    assert getattr(config(objective=readers[0], **{name: value}), name) == value


@pytest.mark.skipif(is_torch_bf16_gpu_available(), reason="a GPU with bfloat16 takes TRL's default")
def test_precision_follows_the_hardware(tmp_path):
    assert OPOConfig(str(tmp_path)).bf16 is False  # TRL's default would be an error
    with pytest.raises(ValueError, match="bf16"):
        OPOConfig(str(tmp_path), bf16=True)
    assert OPOConfig(str(tmp_path), use_cpu=True).bf16  # as in TRL


def test_loss_type_names_an_objective(config):
    for name in ("grpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo"):
        args = config(loss_type=name)
        assert args.objective == name
        fields = {field.name: getattr(args, field.name) for field in dataclasses.fields(args) if field.init}
        fields["generation_batch_size"] = None
        copy = OPOConfig(**fields)
        assert copy.objective == name


def test_defaults_that_depend_on_other_fields(config):
    cases = [({}, 0.3, 20.0), ({"log_ratio_reduction": "mean"}, 0.3, 5.0), ({"chi2_radius": 0.1}, None, 20.0)]
    for fields, mu, clamp in cases:
        args = config(**fields)
        assert (args.mu, args.log_ratio_clamp) == (mu, clamp)
        assert args.objective == "opo"


OURS = [(OPOConfig, GRPOConfig), (OPOScriptArguments, ScriptArguments)]


@pytest.mark.parametrize(("kind", "of_trl"), OURS)
def test_docstring_describes_every_field_of_ours_with_its_default(kind, of_trl):
    """The default in words where it depends on other fields; and each names its page."""
    texts = {}
    for texts_of_heading in described(kind).values():
        texts |= texts_of_heading
    ours = hints(kind).keys() - hints(of_trl).keys()
    assert texts.keys() - {"loss_type"} == ours  # which has another meaning here
    docstring = inspect.getdoc(kind)
    for field in dataclasses.fields(kind):
        if field.name in texts:
            assert field.metadata["help"] == texts[field.name].replace("%", "%%")
            page = re.search(r" See (docs/\S+\.md)\.$", texts[field.name])[1]
            assert (ROOT / page).is_file()
            usual = default(field)
            shown = json.dumps(usual) if isinstance(usual, str) else repr(usual)
            has_default = "" if usual is None else f", defaults to `{shown}`"
            assert re.search(rf"^    {field.name} \(`.*`, \*optional\*{re.escape(has_default)}\):$", docstring, re.M)


@pytest.mark.parametrize("kind", [OPOConfig, OPOScriptArguments])
def test_bound_of_every_field_holds(kind):
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if kind is not OPOScriptArguments:
        kind("…", use_cpu=True, bf16=False)
    for name, annotation in get_type_hints(kind, include_extras=True).items():
        bounds = getattr(annotation, "__metadata__", ())
        if name in fields and bounds:
            for value in (math.nan, -1, math.inf, True, "1"):
                problem = field_problems(kind, {name: value})[name]
                assert problem == f"{name}={value!r} is not allowed. Set `{name}` to {bounds[0].text}."
            assert not field_problems(kind, {name: default(fields[name])})


TOPR = {"objective": "topr"}


@pytest.mark.parametrize(
    ("given", "names"),
    [
        # Alone
        ({"alpha": 1.01}, "alpha"),
        ({"positivity": "clamp"}, "none, stiffen, clip, project"),
        ({"temperature_range": [1.5, 0.2]}, "temperature_range"),
        ({"negative_bounds": [0.0, math.nan], **TOPR}, "negative_bounds"),
        ({"max_steps": 0}, "num_train_epochs"),
        ({"temperature": 0.0}, "temperature"),
        ({"objective": "torp"}, "opo, topr"),
        ({"objective": "json.loads"}, "opo, topr"),
        ({"loss_type": "bnpo"}, "nearest is dapo"),
        # Together
        ({"objective": "opo", "loss_type": "grpo"}, "loss_type"),
        ({"mu": 2.0, "chi2_radius": 0.1}, "chi2_radius"),
        ({"mu": 0.3, **TOPR}, "`mu`"),
        ({"mu": 0.3, "objective": "opo_trl.objectives.TOPR"}, "`mu`"),
        ({"alpha": 0.2, **TOPR}, "push='reward'"),
        ({"push": "escort"}, "objective='opo'"),
        ({"max_staleness": 2}, "num_iterations"),
        ({"scale_rewards": "batch", "max_sampling_rounds": 2}, "max_sampling_rounds"),
        ({"ignore_data_skip": True}, "resumed exactly"),
        # Options that libraries would ignore, or sample otherwise with
        ({"optim_args": "lr=3"}, "adamw_torch_fused"),
        ({"lr_scheduler_kwargs": {"min_lr": 1e-7}, "lr_scheduler_type": "constant"}, "constant learning rate"),
        ({"generation_kwargs": {"temprature": 2}}, "GenerationConfig"),
        ({"generation_kwargs": {"num_beams": 2}}, "'num_beams' must be 1"),
        ({"generation_kwargs": {"guidance_scale": 1.5}}, "guidance_scale"),
        ({"generation_kwargs": {"stop": ["END"]}, "use_vllm": True, "mask_truncated_completions": True}, "stop"),
        ({"optim": "galore_adamw_layerwise", "max_tokens_per_micro_batch": 64}, "every backward pass"),
        ({"generation_kwargs": {"temperature": 0.5}}, "must be 1.0: `temperature`"),
        ({"generation_kwargs": {"max_new_tokens": 9}}, "max_completion_length"),
        ({"generation_kwargs": {"seed": 1}, "use_vllm": True}, "same random numbers"),
        ({"generation_kwargs": {"logprobs": 1}, "use_vllm": True}, "'logprobs' puts other tokens' log-probabilities"),
        ({"accelerator_config": {"split_batches": True}}, "{'split_batches': False}"),
        ({"loss_type": "grpo", "importance_sampling_level": "Sequence"}, "'token' or 'sequence'"),
    ],
    ids=str,
)
def test_what_would_train_something_else_is_named(config, given, names):
    with pytest.raises(ValueError, match=re.escape(names)):
        config(**given)


def test_what_acts_is_accepted(config):
    config(alpha=0, scale_rewards="false", reward_weights=[1.0, -0.5], optim="sgd", optim_args="momentum=0.9")
    config(generation_kwargs={"top_k": 5, "eos_token_id": 3, "num_beams": 1, "temperature": 1.0})


def test_numbers_have_the_type_of_their_field(config):
    """Transformers samples with no temperature of 2, and counts with no 4.0."""
    numbers = {"temperature": 2, "learning_rate": 1, "beta": 1, "top_p": numpy.float32(1), "max_steps": 3.0}
    args = config(**numbers, generation_kwargs={"repetition_penalty": 2, "top_k": 5})
    values = {name: getattr(args, name) for name in numbers}
    assert values == numbers
    assert set(map(type, values.values())) == {float, int}
    assert type(args.max_steps) is int
    assert type(args.generation_kwargs["repetition_penalty"]) is float
    assert type(args.generation_kwargs["top_k"]) is int
    usual = config()
    unset = config(temperature=None, top_k=None, learning_rate=None)
    for name in ("temperature", "top_k", "learning_rate"):
        assert getattr(unset, name) == getattr(usual, name)
    assert (usual.logging_steps, type(usual.logging_steps)) == (10, int)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"learning_rate": "1e-5"}, "a number"),
        ({"weight_decay": [0.1]}, "a number"),
        ({"max_completion_length": "12"}, "an integer"),
        ({"max_completion_length": 12.5}, "an integer"),
        ({"seed": True}, "an integer"),
        ({"gradient_checkpointing": "false"}, "true or false"),
    ],
)
def test_values_of_another_type_are_named(config, given, wanted):
    (name, value), *_ = given.items()
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} is not allowed. Set `{name}` to {wanted}.")):
        config(**given)


def test_warmup_of_a_constant_rate_is_named(config, caplog):
    for schedule, warned in (("constant_with_warmup", False), ("constant", True)):
        config(warmup_steps=3, lr_scheduler_type=schedule)
        assert ("warmup_steps=3 has no effect" in caplog.text) is warned


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
    args = config(per_device_train_batch_size=8, **given)
    assert args.optimizer_steps_per_rollout == pytest.approx(steps)
    assert args.is_on_policy is on_policy


def test_process_that_sees_several_devices_uses_one(config, monkeypatch):
    """TRL would split the model over all of them."""
    monkeypatch.setattr(OPOConfig, "n_gpu", property(lambda args: vars(args).get("_seen", 2)))
    args = config()
    assert (args._n_gpu, args.model_init_kwargs) == (1, {"device_map": {"": 0}})


def test_round_trip_through_the_command_line_and_a_dictionary(tmp_path):
    fields = {
        "alpha": 0.25,
        "adaptive_temperature": True,
        "temperature_range": [0.3, 1.2],
        "chi2_radius": 0.05,
        "positivity": "project",
        "max_completions": 1000,
    }
    words = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false"]
    for name, value in fields.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name}", *map(str, values)]
    (parsed,) = TrlParser((OPOConfig,)).parse_args_and_config(args=words)
    of_dictionary = parsed.to_dict()
    of_json = json.loads(parsed.to_json_string())
    fields["mu"] = None
    for name, value in fields.items():
        assert getattr(parsed, name) == value
        assert of_dictionary[name] == value
        assert of_json[name] == value


@pytest.mark.parametrize(
    "follows",
    [{"load_best_model_at_end": True}, {"save_strategy": "best"}, {"lr_scheduler_type": "reduce_lr_on_plateau"}],
)
def test_the_best_model_has_the_best_reward(tmp_path, follows):
    """Transformers would take the loss, which is 0 in every evaluation."""
    often = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "use_cpu": True}
    options = {**often, "bf16": False, **follows}
    config = OPOConfig(str(tmp_path), **options)
    assert (config.metric_for_best_model, config.greater_is_better) == ("reward", True)
    chosen = OPOConfig(str(tmp_path), **options, metric_for_best_model="length_loss")
    assert (chosen.metric_for_best_model, chosen.greater_is_better) == ("length_loss", False)
    if "lr_scheduler_type" in follows:
        assert (config.lr_scheduler_kwargs, chosen.lr_scheduler_kwargs) == ({"mode": "max"}, {"mode": "min"})
    with pytest.raises(ValueError, match="metric_for_best_model='eval_loss'"):
        OPOConfig(str(tmp_path), **options, metric_for_best_model="eval_loss")
