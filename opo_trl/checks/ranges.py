"""
The allowed values of every numeric field of a configuration, and of every field with a fixed set of words.

One table for [`OPOConfig`], the script's arguments and TRL's `ModelConfig`, including inherited fields. Transformers
and TRL check few of theirs: a run trains silently with a meaningless value, or fails after minutes. A test fails
if the installed versions have a numeric field without a range.
"""

import functools
import math
import numbers
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Union, get_args, get_origin

from ..fields import hints
from ..rewards import LEAST_MEMORY
from .text import shortened


# Limits for the magnitude of non-zero floats: a value beyond them is a typo, and its float32 square is 0 or infinity.
SMALLEST, LARGEST = 1e-30, 1e30


@dataclass(frozen=True)
class Range:
    """The allowed numbers of a field."""

    low: float = -math.inf
    high: float = math.inf  # an infinite end is never included
    ends: str = "[]"  # whether each end is included, as in "[)"
    integer: bool = False
    also: tuple[float, ...] = ()  # numbers outside the interval with a special meaning
    text: str = ""  # what the message asks for, if the interval does not say it

    def __contains__(self, value: Any) -> bool:
        # `bool` is an integer to Python, but `max_steps: true` is a mistake.
        if isinstance(value, bool) or not isinstance(value, numbers.Integral if self.integer else numbers.Real):
            return False
        number: Any = value
        if number in self.also:
            return True
        above = number > self.low if self.ends[0] == "(" else number >= self.low
        below = number < self.high if self.ends[1] == ")" else number <= self.high
        # Counts have at most 64 bits; the limits for floats also reject NaN and infinity.
        sized = abs(number) < 2**64 if self.integer else number == 0 or SMALLEST <= abs(number) <= LARGEST
        return bool(above and below and sized)

    def __str__(self) -> str:
        if self.text:
            return self.text
        if math.isinf(self.high) and self.integer:
            return f"an integer of at least {self.low:g}"
        if self.integer:
            return f"an integer from {self.low:.0f} to {self.high:.0f}"
        if math.isinf(self.high):
            if self.low != 0:
                return "a finite number"
            return "a positive finite number" if self.ends[0] == "(" else "a finite number, 0 or more"
        return f"a number in {self.ends[0]}{self.low:g}, {self.high:g}{self.ends[1]}"


@dataclass(frozen=True)
class Steps(Range):
    """Optimizer steps: their number, or a fraction of all steps in (0, 1)."""

    text: str = "a whole number of steps, at least 1, or a fraction of all steps in (0, 1)"

    def __contains__(self, value: Any) -> bool:
        return super().__contains__(value) and (value < 1 or value == int(value))


def _integer(low: float, high: float = math.inf, **more: Any) -> Range:
    return Range(low, high, integer=True, **more)


_POSITIVE, _NOT_NEGATIVE, _FINITE = Range(0, ends="(]"), Range(0), Range()
_COUNT, _COUNT_OR_ZERO = _integer(1), _integer(0)
_FRACTION = Range(0, 1)
_BELOW_ONE = Range(0, 1, ends="[)")
_PORT = _integer(1, 65_535)

# Field → its range. A field whose type admits `None` may also be `None`.
RANGES: dict[str, Range] = {
    # Durations
    "max_steps": _integer(1, also=(-1,), text="an integer of at least 1, or to -1 to use `num_train_epochs`"),
    "num_train_epochs": _POSITIVE,
    "logging_steps": Steps(0, ends="(]"),
    "save_steps": Steps(0, ends="(]"),
    "eval_steps": Steps(0),  # 0 stands for `logging_steps`
    "eval_delay": _NOT_NEGATIVE,
    "warmup_steps": Steps(0, text="a whole number of steps, at least 0, or a fraction of all steps in (0, 1)"),
    "save_total_limit": _integer(0, text="an integer of at least 1, or to 0 to keep every checkpoint"),
    "torch_empty_cache_steps": _COUNT,
    "ref_model_sync_steps": _COUNT,
    "max_skipped_steps": _COUNT,
    "validation_steps": _integer(1, text="a positive integer, or leave it out"),
    # Batches and rollouts
    "per_device_train_batch_size": _COUNT,
    "per_device_eval_batch_size": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "eval_accumulation_steps": _COUNT,
    "num_iterations": _COUNT,
    "steps_per_generation": _COUNT,
    "generation_batch_size": _COUNT,
    "num_generations": _integer(2, text="at least 2: advantages compare the completions of a group"),
    "num_generations_eval": _COUNT,
    "max_completion_length": _COUNT,
    "max_prompt_length": _COUNT,
    "max_sampling_rounds": _COUNT,
    "max_staleness": _integer(0, 2**31 - 1),  # the length of a queue
    "max_completions": _COUNT,
    "max_tokens_per_micro_batch": _integer(1, text="a positive number of tokens"),
    "max_tool_calling_iterations": _COUNT_OR_ZERO,
    "pad_to_multiple_of": _COUNT,
    # Asynchronous training
    "in_process_staleness": _COUNT_OR_ZERO,
    "token_budget": _integer(0, text="a positive number of tokens, or to 0 for `per_device_train_batch_size` samples"),
    "max_inflight_tasks": _integer(1, also=(-1,), text="an integer of at least 1, or to -1 for what is useful"),
    "queue_maxsize": _COUNT_OR_ZERO,
    "weight_sync_steps": _COUNT,
    "fork_threshold_tokens": _COUNT_OR_ZERO,
    "request_timeout": _COUNT,
    "weight_sync_timeout": _COUNT,
    "heartbeat_stale_after_s": _POSITIVE,
    # Optimizer
    "learning_rate": _NOT_NEGATIVE,
    "weight_decay": _NOT_NEGATIVE,
    "adam_beta1": _BELOW_ONE,
    "adam_beta2": _BELOW_ONE,
    "adam_epsilon": _POSITIVE,  # with 0, unused embeddings become NaN: their gradients are all 0
    "max_grad_norm": Range(0, also=(math.inf,), text="a positive number, or to 0 for no clipping"),
    "neftune_noise_alpha": _NOT_NEGATIVE,
    "label_smoothing_factor": _FRACTION,
    # Sampling
    "temperature": _POSITIVE,
    "top_p": Range(0, 1, ends="(]"),
    "top_k": _integer(0, text="an integer of at least 1, or to 0 for all tokens"),
    "min_p": _FRACTION,
    "repetition_penalty": _POSITIVE,
    # Objective
    "alpha": _FRACTION,
    "escort_temperature": _POSITIVE,
    "temperature_range": Range(0, ends="(]", text="two positive numbers, the lower first"),
    "mu": _POSITIVE,
    "chi2_radius": _POSITIVE,
    "positivity_epsilon": Range(0, 1, ends="()"),
    "log_ratio_clamp": _POSITIVE,
    "beta": _NOT_NEGATIVE,
    "ref_model_mixup_alpha": _FRACTION,
    "entropy_coef": _FINITE,  # below 0, a penalty
    "entropy_coef_min": _FINITE,  # the controller may take it below 0, where it is a penalty
    "entropy_coef_max": _FINITE,
    "entropy_coef_delta": _NOT_NEGATIVE,
    "entropy_target": _NOT_NEGATIVE,
    "top_entropy_quantile": _FRACTION,
    "router_aux_loss_coef": _NOT_NEGATIVE,
    "off_policy_mask_threshold": _NOT_NEGATIVE,
    "vllm_importance_sampling_clip_max": _POSITIVE,
    "vllm_importance_sampling_cap": _POSITIVE,
    "vllm_importance_sampling_clip_min": _NOT_NEGATIVE,
    # Clipping and shapes of TRL's losses; above 1, CISPO has `epsilon_high: 5.0`
    "epsilon": _NOT_NEGATIVE,
    "epsilon_high": _NOT_NEGATIVE,
    "delta": _POSITIVE,
    "sapo_temperature_neg": _POSITIVE,
    "sapo_temperature_pos": _POSITIVE,
    "vespo_k_pos": _NOT_NEGATIVE,
    "vespo_lambda_pos": _NOT_NEGATIVE,
    "vespo_k_neg": _NOT_NEGATIVE,
    "vespo_lambda_neg": _NOT_NEGATIVE,
    # Rewards
    "reward_weights": Range(text="a list of finite numbers"),  # below 0 is a penalty
    "max_reward_failure_rate": _FRACTION,
    "reward_workers": _integer(0, text="an integer, 0 or more"),
    "reward_timeout": _POSITIVE,
    "reward_memory": _integer(LEAST_MEMORY, 2**30, text=f"a whole number of MiB, {LEAST_MEMORY} or more"),
    "overlong_cache": _integer(1, text="a positive number up to `max_completion_length`"),
    # Data, validation and report
    "fraction": Range(0, 1, ends="(]", text="a number in (0, 1]. Use 1.0 for all rows"),
    "test_fraction": Range(0, 1, ends="()", text="a share of the rows, such as 0.2"),
    "test_split_size": Range(0, ends="()", text="a number of rows, or a fraction of them below 1"),
    "validation_size": _COUNT,
    "report_size": _COUNT,
    "report_samples": _COUNT,
    "num_completions_to_print": _COUNT_OR_ZERO,
    # Seeds: NumPy's global generator takes 32 bits, PyTorch's 64, a dataset's any number
    "seed": _integer(0, 2**32 - 1),
    "data_seed": _integer(-(2**63), 2**64 - 1),
    "subset_seed": _COUNT_OR_ZERO,
    # vLLM
    "vllm_server_port": _PORT,
    "vllm_group_port": _PORT,
    "vllm_server_timeout": _NOT_NEGATIVE,
    "vllm_gpu_memory_utilization": Range(0, 1, ends="(]"),
    "vllm_max_model_length": _COUNT,
    "vllm_tensor_parallel_size": _COUNT,
    # LoRA
    "lora_r": _COUNT,
    "lora_alpha": _COUNT,
    "lora_dropout": _BELOW_ONE,
    # Processes
    "dataloader_num_workers": _COUNT_OR_ZERO,
    "dataloader_prefetch_factor": _COUNT,
    "ddp_bucket_cap_mb": _COUNT,
    "ddp_timeout": _integer(1, 2**31 - 1),  # seconds, in a C `int`
    "local_rank": _integer(-1),  # set by the launcher
}

# Required fields whose type admits `None`.
_REQUIRED = {"num_generations"}

# `scale_rewards` as command lines and recipes spell it.
SCALES = dict.fromkeys(("true", "yes", "on"), "group") | dict.fromkeys(("false", "no", "off"), "none")

_LOG_LEVELS = ("detail", "debug", "info", "warning", "error", "critical", "passive")

# Field of TRL or Transformers → its allowed words, unless its type is an enumeration, which checks itself.
CHOICES: dict[str, tuple[Any, ...]] = {
    "scale_rewards": ("group", "batch", "none", True, False),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "loss_type": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
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
    return f"{shortened(f'{name}={value!r}')} is not allowed. Set `{name}` to {wanted}."


def require(condition: bool, name: str, value: object, wanted: object) -> None:
    """Unless a condition holds, raise a `ValueError` with [`not_allowed`]."""
    if not condition:
        raise ValueError(not_allowed(name, value, wanted))


def reject(field: str, options: Mapping[str, Any], key: str, problem: str, fix: str) -> NoReturn:
    """Raise a `ValueError` about one option of a field."""
    raise ValueError(shortened(f"{field}={options!r}: {key!r} {problem}. {fix}."))


@functools.cache
def numeric_fields(arguments: Any) -> Mapping[str, bool]:
    """Fields of a dataclass whose type admits a number: name → whether it also admits `None`."""
    kinds = {name: _kinds(hint) for name, hint in hints(arguments).items()}
    return {name: type(None) in kind for name, kind in kinds.items() if kind & {int, float}}


def _kinds(hint: Any) -> set[type]:
    """The types that a hint admits, including those of list entries but not of mapping values."""
    if get_origin(hint) in (Union, types.UnionType, list):
        return set().union(*map(_kinds, get_args(hint)))
    return {hint}


def check(arguments: Any) -> None:
    """
    Check the numbers and words of a dataclass.

    Raises:
        `ValueError`: values are out of range, not finite, or of the wrong type. The message names each field, its
            value and what to set it to.
    """
    kind: Any = type(arguments)
    if found := problems(kind, {name: getattr(arguments, name) for name in hints(kind)}):
        raise ValueError("\n".join(found.values()))


def problems(kind: Any, values: Mapping[str, Any]) -> dict[str, str]:
    """Field → what is wrong with its number or word, of a dataclass with these values."""
    found = {}
    for name, admits_none in numeric_fields(kind).items():
        value, allowed = values.get(name), RANGES.get(name)
        if allowed is None or _is_exempt(values, name, value):
            continue  # a subclass checks its own fields
        if value is None:
            fits = admits_none and name not in _REQUIRED
        elif name in ("temperature_range", "reward_weights"):
            fits = all(entry in allowed for entry in (value if isinstance(value, list | tuple) else [value, None]))
        else:
            fits = value in allowed
        if not fits:
            found[name] = not_allowed(name, value, _wanted(allowed, value))
    for name, words in CHOICES.items():
        value = values.get(name, words[0]) if name in hints(kind) else words[0]
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
