"""Options that libraries would ignore, or sample otherwise with, without a word."""

from collections.abc import Collection, Mapping
from typing import Any

from transformers import GenerationConfig
from trl import GRPOConfig

from .ranges import reject


# Optimizer → the keys of `optim_args` that it reads. Those of `_TAKE_ANY` pass on whatever they get.
OPTIM_ARGS: Mapping[str, Collection[str]] = {
    "sgd": ("momentum", "dampening", "weight_decay", "nesterov"),
    "adagrad": ("lr_decay", "weight_decay", "eps"),
    "rmsprop": ("momentum", "alpha", "eps", "weight_decay", "centered"),
    "adamw_anyprecision": ("use_kahan_summation", "momentum_dtype", "variance_dtype", "compensation_buffer_dtype"),
    "grokadamw": ("alpha_init", "lamb", "gamma", "grokking_signal_decay_rate", "gradient_clipping"),
    "stable_adamw": ("max_lr", "kahan_sum", "decouple_lr"),
    **dict.fromkeys(("adamw_torch_4bit", "adamw_torch_8bit"), ("block_size", "bf16_stochastic_round")),
    **dict.fromkeys(("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"), ("weight_lr_power", "r")),
    **dict.fromkeys(
        ("ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"),
        ("beta1", "beta2", "beta3", "alpha", "eps", "t_alpha", "t_beta3"),
    ),
}
_TAKE_ANY = ("galore", "apollo", "lomo", "rmsprop_")

# Options of `fsdp_config` that Transformers reads.
FSDP_OPTIONS = {
    *("activation_checkpointing", "auto_wrap_policy", "backward_prefetch", "buffer_dtype", "compute_dtype"),
    *("cpu_offload", "cpu_ram_efficient_loading", "forward_prefetch", "limit_all_gathers", "min_num_params"),
    *("reshard_after_forward", "state_dict_type", "sync_module_states", "transformer_layer_cls_to_wrap"),
    *("use_orig_params", "version", "xla", "xla_fsdp_grad_ckpt", "xla_fsdp_settings", "xla_fsdp_v2"),
}

# Key of `generation_kwargs` → the field that controls the same thing. TRL truncates, plans memory and computes
# log-probabilities with the field.
_FIELD_OF_KEY = dict.fromkeys(("max_new_tokens", "max_tokens"), "max_completion_length") | {
    key: key for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "cache_implementation")
}
# These keys affect more than generation. The others may override a field that is not set, as TRL documents.
_ALWAYS = ("temperature", "max_new_tokens", "max_tokens")
# Key → its only value: TRL samples one completion per row, and beams or guidance would not sample from the policy's
# distribution.
_FIXED: dict[str, Any] = {"do_sample": True, "return_dict_in_generate": False}
_FIXED |= dict.fromkeys(("num_return_sequences", "n", "num_beams", "guidance_scale"), 1)


def check_options(args: Any) -> None:
    """Check the options of optimizer, schedule, FSDP and generation; a `ValueError` says what has no effect."""
    asked, name = args.optim_args or "", args.optim.value
    pairs = asked.replace(" ", "").split(",") if asked and not any(part in name for part in _TAKE_ANY) else []
    for key in (pair.partition("=")[0] for pair in pairs):
        if key not in OPTIM_ARGS.get(name, ()):
            raise ValueError(f"optim_args={asked!r}: {key!r} has no effect on {name}. Remove {key!r}.")
    schedule = args.lr_scheduler_type.value
    if args.lr_scheduler_kwargs and schedule in ("constant", "constant_with_warmup"):
        said = f"lr_scheduler_kwargs={args.lr_scheduler_kwargs!r} has no effect on the schedule {schedule!r}"
        raise ValueError(f"{said}. Remove it.")
    for key in (args.fsdp_config or {}).keys() - FSDP_OPTIONS:
        fix = f"Remove it, or set one of {', '.join(sorted(FSDP_OPTIONS))}"
        reject("fsdp_config", args.fsdp_config, key, "has no effect", fix)
    options: Any = args.generation_kwargs or {}
    for key, value in options.items():
        if problem := _problem(args, key, value):
            reject("generation_kwargs", options, key, *problem)


def _problem(args: GRPOConfig, key: str, value: Any) -> tuple[str, str] | None:
    """What is wrong with one option of generation, and the fix."""
    remove, field = f"Remove {key!r}", _FIELD_OF_KEY.get(key)
    if not args.use_vllm and key not in vars(GenerationConfig()):
        return "has no effect: it is not an option of GenerationConfig", remove
    if key == "stop" and value and args.mask_truncated_completions:
        return "ends completions by text, and TRL takes those for truncated", "Remove `mask_truncated_completions`"
    if value not in (None, _FIXED.get(key, value)):
        return f"must be {_FIXED[key]!r}: TRL samples one completion per row", remove
    asked = None if field is None else getattr(args, field)
    if field is not None and value != asked and (asked != getattr(GRPOConfig, field) or key in _ALWAYS):
        return f"contradicts {field}={asked!r}", f"Set `{field}` to {value!r}, and remove {key!r} here"
    return None


def check_generation_config(options: Mapping[str, Any], of_model: Mapping[str, Any]) -> None:
    """Check a model's generation_config.json, which fills in what `generation_kwargs` leaves open."""
    for key in _FIXED.keys() - options.keys() - {"do_sample"}:  # TRL sets that
        if of_model.get(key) not in (_FIXED[key], None):
            raise ValueError(
                f"generation_config.json of the model sets {key}={of_model[key]!r}: TRL samples one completion per "
                f"row. Set `generation_kwargs: {{{key}: {_FIXED[key]!r}}}`, or remove it there."
            )
