"""
Topics of configuration fields, declared where a field is defined: `alpha: Annotated[float, OBJECTIVE]`.

They cannot be part of the field's metadata: `HfArgumentParser` passes all of it on to argparse.
"""

import functools
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints


# Topics: what a field can decide.
DATA, MODEL, SAMPLING, REWARDS, OBJECTIVE, OPTIMIZER = "data", "model", "sampling", "rewards", "objective", "optimizer"


# Fields of TRL and Transformers. Ours are annotated where they are defined.
INHERITED = {
    DATA: "dataset_name dataset_config dataset_train_split dataset_test_split chat_template_kwargs",
    MODEL: "model_name_or_path model_revision dtype load_in_8bit load_in_4bit use_peft use_dora use_rslora",
    SAMPLING: "num_generations max_completion_length max_tool_calling_iterations temperature top_p top_k min_p "
    "repetition_penalty generation_kwargs vllm_structured_outputs_regex",
    REWARDS: "reward_weights scale_rewards multi_objective_aggregation",
    OBJECTIVE: "loss_type importance_sampling_level epsilon epsilon_high delta sapo_temperature_neg "
    "sapo_temperature_pos vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos beta use_bias_correction_kl "
    "sync_ref_model ref_model_sync_steps ref_model_mixup_alpha entropy_coef use_adaptive_entropy entropy_target "
    "entropy_coef_delta entropy_coef_min entropy_coef_max top_entropy_quantile off_policy_mask_threshold "
    "mask_truncated_completions router_aux_loss_coef vllm_importance_sampling_correction "
    "vllm_importance_sampling_mode vllm_importance_sampling_cap vllm_importance_sampling_clip_min "
    "vllm_importance_sampling_clip_max",
    OPTIMIZER: "optim learning_rate lr_scheduler_type adam_beta1 adam_beta2 adam_epsilon weight_decay",
}


@functools.cache
def hints(arguments: Any) -> Mapping[str, Any]:
    """Field of a dataclass → its type, without what `Annotated` adds."""
    found = get_type_hints(arguments)
    return {field.name: found[field.name] for field in fields(arguments)}


@functools.cache
def deciding(arguments: Any, topic: str) -> list[str]:
    """Fields of a dataclass that decide a topic, such as [`OBJECTIVE`]: annotated with it, or [`INHERITED`]."""
    found, inherited = get_type_hints(arguments, include_extras=True), INHERITED[topic].split()
    annotated = {name for name in found if topic in getattr(found[name], "__metadata__", ())}
    return [name for name in hints(arguments) if name in annotated or name in inherited]


def choices(arguments: type) -> dict[str, tuple[Any, ...]]:
    """Field of a dataclass → the values that it can have, for each field that is a `Literal`."""
    return {name: get_args(hint) for name, hint in hints(arguments).items() if get_origin(hint) is Literal}
