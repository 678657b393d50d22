"""Checks of `generation_kwargs`: reject keys that have no effect, contradict a field, or change what is sampled."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig
from trl import GRPOConfig

from ..fields import POSITIVE, Range
from .ranges import RANGES, reject


# Key of `generation_kwargs` → the field that controls the same thing. TRL truncates, plans memory and computes
# log-probabilities with the field.
_FIELD_OF_KEY = dict.fromkeys(("max_new_tokens", "max_tokens"), "max_completion_length") | {
    key: key for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "cache_implementation")
}
# These keys affect more than generation. The others may override a field that is not set, as TRL documents.
_ALWAYS = ("temperature", "max_new_tokens", "max_tokens")

# Key → its only value: TRL samples one completion per row, and beams or guidance would not sample from the policy's
# distribution.
_FIXED_KEYS: dict[str, Any] = {"do_sample": True, "return_dict_in_generate": False}
_FIXED_KEYS |= dict.fromkeys(("num_return_sequences", "n", "num_beams", "guidance_scale"), 1)

# Options of `GenerationConfig` without effect here: `max_new_tokens` overrides the first, Transformers has moved
# others to the Hub, and the rest describe outputs that TRL does not request.
_UNREAD_KEYS = {
    *("max_length", "is_assistant", "transformers_version", "compile_config", "continuous_batching_config"),
    *("low_memory", "penalty_alpha", "dola_layers", "diversity_penalty", "num_beam_groups", "constraints"),
    *("force_words_ids", "output_attentions", "output_hidden_states", "output_scores", "output_logits"),
}
_TOKENIZER_KEYS = {"stop_strings", "token_healing"}  # for these, `generate` needs a tokenizer
_ASSISTED = ("assistant_", "num_assistant_", "prompt_lookup_", "max_matching_ngram_size", "speculative_")

_RANGES = {
    **dict.fromkeys(("typical_p", "top_h"), Range(0, 1, ends="(]")),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), Range(0, 1, ends="[)")),
    **dict.fromkeys(("min_new_tokens", "min_tokens", "min_length", "no_repeat_ngram_size"), Range(0, integer=True)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), Range(-2, 2)),
    "max_time": POSITIVE,
}

# TRL takes these from the tokenizer, or does not use them.
_OF_TOKENIZER = {"pad_token_id", "bos_token_id", "decoder_start_token_id"}

# Endings of keys that hold token ids, possibly in nested lists.
_TOKENS = ("token_id", "token_ids", "suppress_tokens", "bad_words_ids")


def dry_run_generation(args: GRPOConfig) -> None:
    """Check the options of generation, and construct what generation will use, which may raise any error."""
    options: Any = args.generation_kwargs or {}
    for key, value in options.items():
        problem = _problem(args, key, value)
        if problem:
            reject("generation_kwargs", options, key, *problem)
    for key, token in _tokens(options):
        if isinstance(token, bool) or not isinstance(token, int):
            reject("generation_kwargs", options, key, f"contains {token!r}, not a token id", "Set it to integers")
    if not args.use_vllm:
        defaults = {"max_new_tokens": args.max_completion_length, "cache_implementation": args.cache_implementation}
        GenerationConfig(**{"do_sample": True, **defaults, **options}, disable_compile=True)
    elif options:  # importing vLLM is slow
        with suppress(ImportError):
            from vllm import SamplingParams  # type: ignore[import-not-found, unused-ignore]

            # TRL turns these into an object first.
            SamplingParams(**{key: value for key, value in options.items() if key != "structured_outputs"})
    if args.use_transformers_continuous_batching:
        batching: Any = args.transformers_continuous_batching_config or {}
        ContinuousBatchingConfig(**batching)


def _problem(args: GRPOConfig, key: str, value: Any) -> tuple[str, str] | None:
    """What is wrong with one option, and the fix."""
    remove, field = f"Remove {key!r}", _FIELD_OF_KEY.get(key)
    if not args.use_vllm and not (key in _UNREAD_KEYS | _TOKENIZER_KEYS and (value is None or value is False)):
        if key in _TOKENIZER_KEYS:
            return "needs a tokenizer, which TRL does not pass", remove
        if key.startswith(_ASSISTED) and value is not None:
            return "belongs to assisted generation, which takes one prompt at a time", remove
        if key in _UNREAD_KEYS or key not in vars(GenerationConfig()):
            return "has no effect: it is not an option of GenerationConfig", remove
    if key == "stop" and value and args.mask_truncated_completions:
        return "ends completions by text, and TRL takes those for truncated", "Remove `mask_truncated_completions`"
    if value not in (None, _FIXED_KEYS.get(key, value)):
        return f"must be {_FIXED_KEYS[key]!r}: TRL samples one completion per row", remove
    asked = None if field is None else getattr(args, field)
    if field is not None and value != asked and (asked != getattr(GRPOConfig, field) or key in _ALWAYS):
        return f"contradicts {field}={asked!r}", f"Set `{field}` to {value!r}, and remove {key!r} here"
    allowed = _RANGES.get(key) or RANGES.get(field or key)
    if value is None or allowed is None:
        return None
    if value not in allowed:
        return "is out of range", f"Set it to {allowed}"
    longest = args.max_completion_length
    if key in ("min_new_tokens", "min_tokens") and longest is not None and value > longest:
        return f"exceeds max_completion_length={longest}", f"Set it to {longest} or less"
    return None


def check_tokens(args: GRPOConfig, vocabulary: int | None, of_model: Mapping[str, Any]) -> None:
    """
    Check what `generation_kwargs` and the model's generation_config.json, which fills in the rest, do with its tokens.

    Args:
        vocabulary (`int`, *optional*): number of the model's tokens, if it is known.
        of_model (`Mapping`): entries of generation_config.json.
    """
    options: Any = args.generation_kwargs or {}
    for key in _FIXED_KEYS.keys() - options.keys() - {"do_sample"}:  # TRL sets that
        if of_model.get(key) not in (_FIXED_KEYS[key], None):
            raise ValueError(
                f"generation_config.json of the model sets {key}={of_model[key]!r}: TRL samples one completion per "
                f"row. Set `generation_kwargs: {{{key}: {_FIXED_KEYS[key]!r}}}`, or remove it there."
            )
    if vocabulary is None:
        return
    read = {key: value for key, value in of_model.items() if key not in _OF_TOKENIZER} | options
    for key, token in _tokens(read):
        is_known = isinstance(token, int) and 0 <= token < vocabulary
        if is_known or (key, token) == ("eos_token_id", -1):  # which ends nothing
            continue
        problem = f"contains {token!r}, which is not a token of the model"
        if key in options:
            reject("generation_kwargs", options, key, problem, f"Set it to integers from 0 to {vocabulary - 1}")
        raise ValueError(f"generation_config.json of the model: {key} {problem}. Correct that file.")


def _tokens(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The token ids in options of generation, with their key."""

    def leaves(value: Any) -> Iterator[Any]:
        if isinstance(value, list | tuple):
            for part in value:
                yield from leaves(part)
        elif value is not None:
            yield value

    for key in sorted(key for key in options if key.endswith(_TOKENS)):
        yield from ((key, token) for token in leaves(options[key]))
    biases = options.get("sequence_bias") or ()  # pairs or a mapping: token ids → bias
    for entry in biases:
        yield from (("sequence_bias", token) for token in leaves(entry if isinstance(biases, Mapping) else entry[0]))
