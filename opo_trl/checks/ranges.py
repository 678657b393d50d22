"""
The allowed values of numeric fields, and of fields with a fixed set of words.

Our fields have their range where they are defined. Here are those of TRL and Transformers, which check few of them: a
run trains silently with a meaningless value, or fails after minutes. A test fails if the installed versions have a
numeric field without a range.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, Literal, NoReturn, get_args, get_origin

from ..fields import COUNT, COUNT_OR_ZERO, FRACTION, LARGEST, POSITIVE, SMALLEST, Range, declared, hints, integer


class Steps(Range):
    """Optimizer steps: their number, or a fraction of all steps in (0, 1)."""

    def __contains__(self, value: Any) -> bool:
        return super().__contains__(value) and (value < 1 or value == int(value))


_STEPS = "a whole number of steps, at least {}, or a fraction of all steps in (0, 1)"
_NOT_NEGATIVE = Range(0, text="a finite number, 0 or more")

# Field of TRL or Transformers → its range. A field whose type admits `None` may also be `None`.
_GROUPED = {
    COUNT: "torch_empty_cache_steps ref_model_sync_steps per_device_train_batch_size per_device_eval_batch_size "
    "gradient_accumulation_steps eval_accumulation_steps num_iterations steps_per_generation generation_batch_size "
    "num_generations_eval max_completion_length pad_to_multiple_of weight_sync_steps request_timeout "
    "weight_sync_timeout vllm_max_model_length vllm_tensor_parallel_size lora_r lora_alpha "
    "dataloader_prefetch_factor ddp_bucket_cap_mb",
    COUNT_OR_ZERO: "max_tool_calling_iterations queue_maxsize fork_threshold_tokens num_completions_to_print "
    "dataloader_num_workers",
    # With an `adam_epsilon` of 0, unused embeddings become NaN: their gradients are all 0.
    POSITIVE: "num_train_epochs heartbeat_stale_after_s adam_epsilon temperature repetition_penalty delta "
    "vllm_importance_sampling_clip_max vllm_importance_sampling_cap sapo_temperature_neg sapo_temperature_pos",
    # Above 1, CISPO has `epsilon_high: 5.0`.
    _NOT_NEGATIVE: "eval_delay learning_rate weight_decay neftune_noise_alpha beta entropy_coef_delta entropy_target "
    "router_aux_loss_coef off_policy_mask_threshold vllm_importance_sampling_clip_min epsilon epsilon_high "
    "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg vllm_server_timeout",
    # Below 0 it is a penalty, to which the controller may take it as well.
    Range(text="a finite number"): "entropy_coef entropy_coef_min entropy_coef_max",
    FRACTION: "label_smoothing_factor min_p ref_model_mixup_alpha top_entropy_quantile",
    Range(0, 1, ends="[)"): "adam_beta1 adam_beta2 lora_dropout",
    Range(0, 1, ends="(]"): "top_p vllm_gpu_memory_utilization",
    integer(1, 65_535): "vllm_server_port vllm_group_port",
    Steps(0, ends="(]", text=_STEPS.format(1)): "logging_steps save_steps",
}
RANGES: dict[str, Range] = {name: allowed for allowed, names in _GROUPED.items() for name in names.split()} | {
    "max_steps": integer(1, also=(-1,), text="an integer of at least 1, or to -1 to use `num_train_epochs`"),
    "eval_steps": Steps(0, text=_STEPS.format(1)),  # 0 stands for `logging_steps`
    "warmup_steps": Steps(0, text=_STEPS.format(0)),
    "save_total_limit": integer(0, text="an integer of at least 1, or to 0 to keep every checkpoint"),
    "num_generations": integer(2, text="at least 2: advantages compare the completions of a group"),
    "max_staleness": integer(0, 2**31 - 1),  # the length of a queue
    "token_budget": integer(0, text="a positive number of tokens, or to 0 for `per_device_train_batch_size` samples"),
    "max_inflight_tasks": integer(1, also=(-1,), text="an integer of at least 1, or to -1 for what is useful"),
    "max_grad_norm": Range(0, also=(math.inf,), text="a positive number, or to 0 for no clipping"),
    "top_k": integer(0, text="an integer of at least 1, or to 0 for all tokens"),
    "reward_weights": Range(text="a list of finite numbers"),  # below 0 is a penalty
    # NumPy's global generator takes 32 bits, PyTorch's 64
    "seed": integer(0, 2**32 - 1),
    "data_seed": integer(-(2**63), 2**64 - 1),
    "ddp_timeout": integer(1, 2**31 - 1),  # seconds, in a C `int`
    "local_rank": integer(-1),  # set by the launcher
}

# `scale_rewards` as command lines and recipes spell it.
SCALES = dict.fromkeys(("true", "yes", "on"), "group") | dict.fromkeys(("false", "no", "off"), "none")

_LOG_LEVELS = ("detail", "debug", "info", "warning", "error", "critical", "passive")

# Field of TRL or Transformers → its allowed words, unless its type is an enumeration, which checks itself.
CHOICES: dict[str, tuple[Any, ...]] = {
    "scale_rewards": ("group", "batch", "none", True, False),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "importance_sampling_level": ("token", "sequence"),
    "vllm_mode": ("colocate", "server"),
    "vllm_model_impl": ("vllm", "transformers", "auto"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "log_level": _LOG_LEVELS,
    "log_level_replica": _LOG_LEVELS,
    "include_num_input_tokens_seen": ("all", "non_padding", "no", True, False),
    "train_sampling_strategy": ("random",),  # TRL's sampler reads `shuffle_dataset` instead
    "dataloader_multiprocessing_context": (None, "fork", "spawn", "forkserver"),
    "torch_compile_mode": (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    "lora_task_type": ("CAUSAL_LM",),  # the other adapters cannot generate
    "bnb_4bit_quant_type": ("nf4", "fp4"),
    "dtype": (None, "auto", "bfloat16", "float16", "float32"),
}


def not_allowed(name: str, value: object, wanted: object) -> str:
    """Message that names a field, its value and what to set it to."""
    return f"{name}={value!r} is not allowed. Set `{name}` to {wanted}."


def require(condition: bool, name: str, value: object, wanted: object) -> None:
    """Unless a condition holds, raise a `ValueError` with [`not_allowed`]."""
    if not condition:
        raise ValueError(not_allowed(name, value, wanted))


def reject(field: str, options: Mapping[str, Any], key: str, problem: str, fix: str) -> NoReturn:
    """Raise a `ValueError` about one option of a field."""
    raise ValueError(f"{field}={options!r}: {key!r} {problem}. {fix}.")


@functools.cache
def of(arguments: Any) -> Mapping[str, Range]:
    """Field of a dataclass → its range, from its definition or from [`RANGES`]."""
    own = {name: part for name, said in declared(arguments).items() for part in said if isinstance(part, Range)}
    return {name: RANGES[name] for name in hints(arguments) if name in RANGES} | own


def problems(kind: Any, values: Mapping[str, Any]) -> dict[str, str]:
    """Field → what is wrong with its number or word, of a dataclass with these values."""
    found = {}
    for name, allowed in of(kind).items():
        value = values.get(name)
        if _is_exempt(values, name, value):
            continue
        if value is None:
            # Of `num_generations`, which TRL needs, the type admits `None`, too.
            fits = type(None) in get_args(hints(kind)[name]) and name != "num_generations"
        elif name in ("temperature_range", "reward_weights", "positive_bounds", "negative_bounds"):
            fits = isinstance(value, list | tuple) and all(entry in allowed for entry in value)
        else:
            fits = value in allowed
        if not fits:
            found[name] = not_allowed(name, value, _wanted(allowed, value))
    own = {name: get_args(hint) for name, hint in hints(kind).items() if get_origin(hint) is Literal}
    for name, words in (own | {name: CHOICES[name] for name in CHOICES if name in hints(kind)}).items():
        value = values.get(name, words[0])
        known = any(value is word or (isinstance(value, str) and value == word) for word in words)
        if not known and not (name == "scale_rewards" and str(value).lower() in SCALES):
            named = [word for word in words if isinstance(word, str)]
            found[name] = not_allowed(name, value, named[0] if len(named) == 1 else f"one of {', '.join(named)}")
    return found


def _wanted(allowed: Range, value: Any) -> str:
    if isinstance(value, float) and value and math.isfinite(value) and not SMALLEST <= abs(value) <= LARGEST:
        return f"{allowed}: 0, or between {SMALLEST:g} and {LARGEST:g} in magnitude"
    return str(allowed)


def _is_exempt(values: Mapping[str, Any], name: str, value: Any) -> bool:
    """Whether TRL or Transformers give a value a special meaning, or do not read the field."""
    if name == "pad_to_multiple_of":
        return isinstance(value, str)  # "auto", "none", or digits
    if name in ("logging_steps", "save_steps", "eval_steps"):
        strategy = values.get(name.replace("_steps", "_strategy"))
        return getattr(strategy, "value", strategy) != "steps"
    use_vllm = values.get("use_vllm", False)
    if name == "top_k":  # no filter: -1 in vLLM, `None` in Transformers
        return (value == -1 and use_vllm) or (value is None and not use_vllm)
    return name in ("top_p", "repetition_penalty") and value is None and not use_vllm
