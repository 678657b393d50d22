"""
The definition of a configuration field: type, topic, the range of a number, default and help.

    alpha: Annotated[float, OBJECTIVE, FRACTION] = setting(0.4, "Escort exponent in [0, 1]: …")

Topic and range cannot be part of the field's metadata: `HfArgumentParser` passes all of it on to argparse. Fields of
TRL and Transformers have theirs in [`INHERITED`] and in `checks.ranges`.
"""

import functools
import math
import numbers
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, get_type_hints


# Topics: what a field can decide of the trained model; others have none.
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
        return bool(above and below and -math.inf < number < math.inf)

    def __str__(self) -> str:
        if self.text:
            return self.text
        if not self.integer:
            return f"a number in {self.ends[0]}{self.low:g}, {self.high:g}{self.ends[1]}"
        if math.isinf(self.high):
            return f"an integer of at least {self.low:g}"
        return f"an integer from {self.low:.0f} to {self.high:.0f}"


def integer(low: float, high: float = math.inf, **more: Any) -> Range:
    """A range of integers."""
    return Range(low, high, integer=True, **more)


POSITIVE = Range(0, ends="(]", text="a positive finite number")
COUNT, COUNT_OR_ZERO = integer(1), integer(0)
FRACTION = Range(0, 1)


def setting(default: Any, text: str) -> Any:
    """A field with its default, or a function that makes it anew each time, and its help on the command line."""
    how: Any = {"default_factory": default} if callable(default) else {"default": default}
    return field(**how, metadata={"help": text})


def default(of: Field) -> Any:
    """Default of a field of a dataclass."""
    return of.default if of.default_factory is MISSING else of.default_factory()


def given(arguments: Any) -> dict[str, Any]:
    """Fields of a dataclass that differ from their defaults."""
    defaults = {each.name: default(each) for each in fields(arguments)}
    return {name: value for name, own in defaults.items() if (value := getattr(arguments, name)) != own}


@functools.cache
def hints(arguments: Any) -> Mapping[str, Any]:
    """Field of a dataclass → its type, without what `Annotated` adds."""
    found = get_type_hints(arguments)
    return {field.name: found[field.name] for field in fields(arguments)}


@functools.cache
def deciding(arguments: Any, topic: str) -> list[str]:
    """Fields of a dataclass that decide a topic, such as [`OBJECTIVE`]: annotated with it, or [`INHERITED`]."""
    inherited = INHERITED.get(topic, "").split()
    return [name for name, said in declared(arguments).items() if topic in said or name in inherited]


@functools.cache
def declared(arguments: Any) -> Mapping[str, tuple[Any, ...]]:
    """Field of a dataclass → its topic and range, as far as its definition says them."""
    found = get_type_hints(arguments, include_extras=True)
    return {name: getattr(found[name], "__metadata__", ()) for name in hints(arguments)}
