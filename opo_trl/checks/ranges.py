"""
The allowed values of numeric fields, and of fields with a fixed set of words.

Our fields have their range where they are defined. Here are those of TRL and Transformers with which a run would train
something meaningless without a word; they reject the others themselves, within the first step.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, Literal, NoReturn, get_args, get_origin

from ..fields import COUNT, FRACTION, POSITIVE, Range, declared, hints, integer


_NOT_NEGATIVE = Range(0, text="a finite number, 0 or more")

# Field of TRL or Transformers → its range. A field whose type admits `None` may also be `None`.
_GROUPED = {
    COUNT: "per_device_train_batch_size gradient_accumulation_steps num_iterations steps_per_generation "
    "generation_batch_size weight_sync_steps",
    # With an `adam_epsilon` of 0, unused embeddings become NaN: their gradients are all 0.
    POSITIVE: "num_train_epochs adam_epsilon temperature delta vllm_importance_sampling_clip_max "
    "vllm_importance_sampling_cap save_steps",
    _NOT_NEGATIVE: "learning_rate weight_decay beta epsilon epsilon_high off_policy_mask_threshold "
    "router_aux_loss_coef vllm_importance_sampling_clip_min",
    FRACTION: "ref_model_mixup_alpha top_entropy_quantile",
}
RANGES: dict[str, Range] = {name: allowed for allowed, names in _GROUPED.items() for name in names.split()} | {
    "max_steps": integer(1, also=(-1,), text="an integer of at least 1, or to -1 to use `num_train_epochs`"),
    "num_generations": integer(2, text="at least 2: advantages compare the completions of a group"),
    "max_staleness": integer(0),
    "max_grad_norm": Range(0, also=(math.inf,), text="a positive number, or to 0 for no clipping"),
    "reward_weights": Range(text="a list of finite numbers"),  # below 0 is a penalty
}
_LISTS = ("temperature_range", "reward_weights", "positive_bounds", "negative_bounds")

# `scale_rewards` as command lines and recipes spell it.
SCALES = dict.fromkeys(("true", "yes", "on"), "group") | dict.fromkeys(("false", "no", "off"), "none")

# Field of TRL or Transformers → its allowed words. TRL's sampler reads `shuffle_dataset` instead.
CHOICES: dict[str, tuple[Any, ...]] = {"train_sampling_strategy": ("random",)}


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
        if value is None:
            # Of `num_generations`, which TRL needs, the type admits `None`, too.
            fits = type(None) in get_args(hints(kind)[name]) and name != "num_generations"
        elif name in _LISTS:
            fits = isinstance(value, list | tuple) and all(entry in allowed for entry in value)
        else:
            fits = value in allowed
        if not fits:
            found[name] = not_allowed(name, value, allowed)
    own = {name: get_args(hint) for name, hint in hints(kind).items() if get_origin(hint) is Literal}
    for name, words in (own | {name: CHOICES[name] for name in CHOICES if name in hints(kind)}).items():
        value = values.get(name, words[0])
        if value not in words:
            found[name] = not_allowed(name, value, f"one of {', '.join(words)}")
    return found
