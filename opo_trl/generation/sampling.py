"""
Sampling from the policy, whatever the model's own `generation_config.json` asks for.

Transformers fills each field that a trainer leaves open from the model's own configuration. A cut-off or a penalty
from there would sample from another distribution than the policy, whose log-probabilities are trained.
"""

import logging
import reprlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from accelerate.logging import get_logger
from transformers import GenerationConfig

from ..checks.text import printable


logger = get_logger(__name__)

# What a model's own configuration decides: which tokens end a completion and which never occur, which are forced or
# excluded at its ends, and how generation is executed.
_SPECIAL_TOKENS = ("eos_token_id", "suppress_tokens")
_TOKENS_AT_ENDS = ("forced_bos_token_id", "forced_eos_token_id", "begin_suppress_tokens")
_EXECUTION = ("use_cache", "cache_implementation", "cache_config", "prefill_chunk_size")
# Fields that a trainer's own always overrule, and what is not about sampling.
_SET_BY_TRAINER = ("do_sample", "temperature", "top_p", "top_k", "max_length", "pad_token_id", "bos_token_id")
_NOT_OF_SAMPLING = ("transformers_version", "_from_model_config")


class _Closed(GenerationConfig):
    """A configuration whose open fields are neutral: `generate` cannot fill them from the model's own."""

    def update(self, defaults_only=False, allow_custom_entries=False, **values):
        if allow_custom_entries:  # These values are those of the model's own configuration.
            return {}
        return super().update(defaults_only=defaults_only, **values)


def closed(
    config: GenerationConfig,
    model: Any,
    *,
    chosen: Collection[str] = (),
    continuous: bool = False,
    logged: set[str] | None = None,
) -> GenerationConfig:
    """
    A trainer's configuration of generation, closed against that of its model, of which it takes only special tokens
    and how to execute.

    Args:
        config: what TRL has made of the trainer's fields; not changed.
        model: the policy, with its `generation_config`.
        chosen: fields that the user has set in `generation_kwargs`.
        continuous: whether it is for continuous batching, which does not know where a completion begins or ends.
        logged: what has been logged for this trainer about its model's configuration; `None` logs nothing.
    """
    result = _Closed()
    vars(result).update(vars(config))
    # Which tokens end a completion, never occur, or are forced or excluded at its ends, is for the model to say.
    tokens = _SPECIAL_TOKENS if continuous else _SPECIAL_TOKENS + _TOKENS_AT_ENDS
    defaults = GenerationConfig._get_default_generation_params()
    adopted: dict[str, Any] = {}
    removed: dict[str, Any] = {}
    for name, value in model.generation_config.to_dict().items():
        if value is None or value == defaults.get(name) or name in (*chosen, *_SET_BY_TRAINER, *_NOT_OF_SAMPLING):
            continue
        is_open = getattr(result, name, None) is None  # the trainer has not set it
        if name in tokens:
            adopted[name] = value
        if name == "suppress_tokens":  # TRL itself suppresses the tokens of images.
            result.suppress_tokens = sorted({*value, *(result.suppress_tokens or ())})
        elif is_open and name in (*tokens, *_EXECUTION):  # how to execute, such as a cache
            setattr(result, name, value)
        elif is_open and value:
            removed[name] = value
    if logged is not None:
        _log_once(adopted, removed, logged)
    return result


def _log_once(adopted: Mapping[str, Any], removed: Mapping[str, Any], logged: set[str]) -> None:
    """
    Log once which fields a model's own configuration decides (`adopted`), and which it asks for in vain (`removed`).
    `logged` has the texts that have been logged, and gets this one.
    """

    def named(values: Mapping[str, Any]) -> str:
        return ", ".join(f"{name}={reprlib.repr(value)}" for name, value in values.items())

    whose = "The model's own generation_config"
    sentences = []
    if removed:
        sentences.append(f"{whose} asks for {named(removed)}, which is left out: `generation_kwargs` can set it.")
    if adopted:
        sentences.append(f"{whose} decides {named(adopted)}.")
    text = printable(" ".join(sentences))
    if text and text not in logged:
        is_usual = not removed and adopted.keys() <= {"eos_token_id"}
        logger.log(logging.INFO if is_usual else logging.WARNING, text)
        logged.add(text)


@contextmanager
def same_tensors_afterwards(model: Any) -> Iterator[None]:
    """
    Within this context, a model may be cast to another type. Afterwards its parameters, their gradients and its
    buffers are those that they were, to the bit: the optimizer goes on with the weights that it has.
    """
    parameters = [*model.parameters()]
    # Of a step that is not finished
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    data_of_tensors = [(tensor, tensor.data) for tensor in (*parameters, *gradients)]
    buffers = [
        (module, name, buffer) for module in model.modules() for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for tensor, data in data_of_tensors:
            if tensor.dtype != data.dtype:
                tensor.data = data
        for module, name, buffer in buffers:
            if getattr(module, name).dtype != buffer.dtype:
                setattr(module, name, buffer)
