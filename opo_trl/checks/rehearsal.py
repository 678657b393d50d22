"""
What a library will make of a configuration, tried out before any model is loaded.

Optimizers, schedules, trackers, generation and adapters check their options when they are made, long after a run has
begun, and with messages of their own; some leave out in silence what they do not know. Here each is made once of
something small, and whatever it says is said of the field that is to blame: the one without which it goes well.
"""

import copy
import importlib
import inspect
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import validate_repo_id
from safetensors import safe_open
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, GenerationConfig, PreTrainedModel, Trainer, get_scheduler
from transformers.integrations import deepspeed as hf_deepspeed
from transformers.integrations import integration_utils
from transformers.integrations.accelerate import check_and_set_device_map
from trl import GRPOConfig, ModelConfig, get_peft_config

from .. import trl_contract
from . import paths
from .ranges import CHOICES, RANGES, Range


# What libraries raise about options that they cannot use.
REFUSALS = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    AssertionError,
    OSError,
    ImportError,
    RuntimeError,
    StrictDataclassError,
    re.error,  # of `lora_target_modules`
)

_STEPS = 10_000  # of a run whose length is not known yet

# Key of `generation_kwargs` → the field that has its place. What is generated otherwise than the field says is
# truncated, planned for, or compared with log-probabilities, as the field says.
_FIELD_OF_KEY = {
    "temperature": "temperature",
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "cache_implementation": "cache_implementation",
}
# These act on more than generation; the others may be overridden, as TRL documents, where the field is not set.
_ALWAYS = ("temperature", "max_new_tokens", "max_tokens")

# Key of `generation_kwargs` → its only value: a rollout is sampled, one completion for each of its rows.
# With beams or guidance, its tokens come from another distribution than the policy's.
_FIXED_KEYS = {
    "do_sample": True,
    "num_return_sequences": 1,
    "n": 1,
    "return_dict_in_generate": False,
    "num_beams": 1,
    "guidance_scale": 1,
}

_ASSISTED = ("assistant_", "num_assistant_", "prompt_lookup_", "max_matching_ngram_size", "speculative_")

# Options of `GenerationConfig` that act on nothing here: `max_new_tokens` goes before the first, Transformers has
# moved the others to the Hub, or they describe what a rollout does not return.
_UNREAD_KEYS = {
    "max_length",
    "is_assistant",
    "transformers_version",
    "compile_config",
    "continuous_batching_config",
    "low_memory",
    "penalty_alpha",
    "dola_layers",
    "diversity_penalty",
    "num_beam_groups",
    "constraints",
    "force_words_ids",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
}
# For these, `generate` wants a tokenizer, which TRL does not pass.
_TOKENIZER_KEYS = {"stop_strings", "token_healing"}

_GENERATION_RANGES = {
    "typical_p": Range(0, 1, ends="(]"),
    "top_h": Range(0, 1, ends="(]"),
    "epsilon_cutoff": Range(0, 1, ends="[)"),
    "eta_cutoff": Range(0, 1, ends="[)"),
    "min_new_tokens": Range(0, whole=True),
    "min_tokens": Range(0, whole=True),
    "min_length": Range(0, whole=True),
    "no_repeat_ngram_size": Range(0, whole=True),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "max_time": Range(0, ends="(]"),
}

# Keys whose value is text of any kind, and text that is meant for a switch.
_TEXTS = {"stop", "bad_words", "stop_strings"}
_SWITCHES = {"true", "false", "yes", "no", "on", "off"}

# Keys of `generation_kwargs` that hold tokens, in lists of any depth.
_TOKENS = {
    "eos_token_id",
    "pad_token_id",
    "bos_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
    "stop_token_ids",
    "allowed_token_ids",
}

# Optimizers that are made of a model.
_OF_A_MODEL = ("galore", "apollo", "lomo")

# Options of `gradient_checkpointing_kwargs` that Transformers takes out, before PyTorch gets the rest.
_OWN_CHECKPOINTING = ("every_n_layers", "offload")

# Fields that decide how a model is made.
_OF_MODELS = ("model_revision", "trust_remote_code", "attn_implementation", "dtype", "model_init_kwargs")

# Options that `from_pretrained` throws away, as they come from earlier versions.
_IGNORED_IN_LOADING = {"mirror", "_fast_init", "low_cpu_mem_usage", "from_tf", "from_flax", "offload_state_dict"}

_TRACKER_PACKAGES = {"azure_ml": "azureml", "comet_ml": "comet", "flyte": "flytekit"}


def given(arguments: Any) -> dict[str, Any]:
    """Fields of a dataclass that are not at their default."""
    return {
        field.name: getattr(arguments, field.name)
        for field in fields(arguments)
        if getattr(arguments, field.name)
        != (field.default if field.default_factory is MISSING else field.default_factory())
    }


def blame(named: Mapping[str, Any], attempt: Callable[[dict[str, Any]], object], error: Exception) -> ValueError:
    """
    Say a library's error of the fields that cause it.

    Args:
        named (`Mapping[str, Any]`):
            Fields that are set, with their values.
        attempt (`Callable`):
            What failed, as a function of such fields.
        error (`Exception`):
            How it failed.

    Returns:
        `ValueError`: with the fields without which it does not fail, their values, and what the library said. The
        error itself, if no single field makes the difference.
    """
    causes = []
    for name in named:
        try:
            attempt({other: value for other, value in named.items() if other != name})
        except REFUSALS:
            continue
        causes.append(name)
    said = str(error).strip() or type(error).__name__
    said = said if said.endswith((".", "!", "?")) else f"{said}."
    if not causes:
        return error if isinstance(error, ValueError) else ValueError(f"{type(error).__name__}: {said}")
    values = " and ".join(f"{name}={named[name]!r}" for name in causes)
    fix = " or ".join(f"`{name}`" for name in causes)
    return ValueError(f"{values} cannot be used: {said} Set {fix} to something else, or leave it out.")


def is_said(error: Exception, named: Iterable[str]) -> bool:
    """Whether an error says already which field to change, and how."""
    said = str(error)
    fields_and_fix = any(f"{name}=" in said for name in named) and re.search(r"[Ss]et |[Rr]emove |Choose ", said)
    return isinstance(error, ValueError) and bool(fields_and_fix)


def rehearse(args: GRPOConfig) -> None:
    """
    Make, of something small, what a run makes of its configuration.

    Raises:
        One of [`REFUSALS`]: an option cannot be used, or has no effect.
    """
    _mappings(args)
    _optimizer_and_schedule(args)
    _trackers(args.report_to)
    _generation(args)
    _checkpointing(args.gradient_checkpointing_kwargs)
    _fsdp(args.fsdp_config)
    if args.hub_model_id is not None:
        validate_repo_id(args.hub_model_id)
    if args.dataloader_persistent_workers and args.dataloader_num_workers == 0:
        raise ValueError(
            "dataloader_persistent_workers=True needs workers. Set `dataloader_num_workers` to a positive number, or "
            "remove `dataloader_persistent_workers`."
        )
    if args.torch_compile and args.torch_compile_backend != "inductor":
        known = torch.compiler.list_backends(exclude_tags=())
        if args.torch_compile_backend not in known:
            raise ValueError(f"There is no such backend of torch.compile. It has {', '.join(known)}.")


def _mappings(args: GRPOConfig) -> None:
    for name in (
        "model_init_kwargs",
        "generation_kwargs",
        "chat_template_kwargs",
        "lr_scheduler_kwargs",
        "gradient_checkpointing_kwargs",
        "transformers_continuous_batching_config",
        "liger_kernel_config",
    ):
        value = getattr(args, name)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{name}={value!r} is not allowed. Set `{name}` to a mapping: `{name}: {{key: value}}`.")
        _check_switches(name, value or {})


def _check_switches(field: str, options: Mapping[str, Any]) -> None:
    """Text is true to Python, also "false"."""
    for key, value in options.items():
        if key not in _TEXTS and isinstance(value, str) and value.lower() in _SWITCHES:
            raise ValueError(
                f"{field}={options!r}: {key!r} is text, where a switch belongs. Set it to true or false, without "
                "quotes."
            )


# Optimizer and schedule


def _optimizer_and_schedule(args: Any) -> None:
    if any(part in args.optim.value for part in _OF_A_MODEL):
        try:
            Trainer.get_optimizer_cls_and_kwargs(args)
        except ValueError as error:
            if "need to pass a" not in str(error):
                raise
        return
    _check_optim_args_are_read(args)
    kind, options = Trainer.get_optimizer_cls_and_kwargs(args)
    optimizer = kind([torch.nn.Parameter(torch.ones(2, 2))], **options)
    name, options = args.lr_scheduler_type.value, args.lr_scheduler_kwargs or {}
    if options and name in ("constant", "constant_with_warmup"):
        raise ValueError(f"lr_scheduler_kwargs={options!r} has no effect on the schedule {name!r}. Remove it.")
    _check_numbers("lr_scheduler_kwargs", options)
    for key, value in options.items():  # some schedules cut off in silence what falls below 0
        if isinstance(value, int | float) and value < 0 and key != "last_epoch":
            raise ValueError(f"lr_scheduler_kwargs={options!r}: {key!r} is below 0. Set it to 0 or more.")
    steps = args.max_steps if args.max_steps > 0 else _STEPS
    warmup = args.get_warmup_steps(steps)
    schedule: Any = get_scheduler(
        name,
        optimizer=optimizer,
        num_warmup_steps=warmup,
        num_training_steps=steps,
        scheduler_specific_kwargs=options,
    )
    for step in (0, 1, warmup, steps // 2, steps - 1, steps):
        for factor in getattr(schedule, "lr_lambdas", ()):  # a schedule that follows a metric has none
            if not 0 <= factor(step) <= 1 + 1e-6:  # a share of it: some end above where they began
                raise ValueError(
                    f"lr_scheduler_kwargs={options!r}: the schedule {name!r} multiplies learning_rate="
                    f"{args.learning_rate} in step {step} by {factor(step)}. Set it to stay within [0, 1]."
                )


def _check_optim_args_are_read(args: Any) -> None:
    """Most optimizers read none of `optim_args`, and none says which."""
    asked: Any = args.optim_args
    if not asked:
        return
    options = dict(pair.split("=") for pair in asked.replace(" ", "").split(","))
    for key, value in options.items():
        if value.lower().lstrip("+-") in ("nan", "inf", "infinity"):
            raise ValueError(f"optim_args={asked!r}: {key!r} must be finite. Set it to a finite number.")

    def made(changed: dict[str, str]) -> str:
        other = copy.copy(args)
        other.optim_args = ",".join(f"{key}={value}" for key, value in changed.items())
        return str(Trainer.get_optimizer_cls_and_kwargs(other)[1])

    for key in options:
        try:
            same = all(made(options) == made({**options, key: other}) for other in ("0.5", "7", "true", "false"))
        except REFUSALS:
            continue  # it was read, since another value is refused
        if same:
            raise ValueError(f"optim_args={asked!r}: {key!r} has no effect on {args.optim.value}. Remove {key!r}.")


# Trackers


def _trackers(names: Iterable[str]) -> None:
    for name in names or ():
        if name not in integration_utils.INTEGRATION_TO_CALLBACK:
            known = ", ".join(sorted(integration_utils.INTEGRATION_TO_CALLBACK))
            if name == "none":
                raise ValueError(f"report_to={names!r} holds none and others. Remove none, or the others.")
            raise ValueError(f"report_to={name!r} is no tracker. Set `report_to` to none, or to one of {known}.")
        package = _TRACKER_PACKAGES.get(name, name)
        available = getattr(integration_utils, f"is_{package}_available", lambda: True)
        if not available():
            raise ValueError(
                f"report_to={name!r} needs a package that is not installed: `pip install {package}`, or set "
                "`report_to` to none."
            )
        folder = os.environ.get("TENSORBOARD_LOGGING_DIR")
        if name == "tensorboard" and folder and os.environ.get("RANK", "0") == "0":
            paths.check_folder("TENSORBOARD_LOGGING_DIR", folder)


# Generation


def _generation(args: GRPOConfig) -> None:
    options: Any = args.generation_kwargs or {}
    known = _sampling_options(args.use_vllm) if options else None  # it takes long to import vLLM
    for key, value in options.items():
        named = f"generation_kwargs={options!r}"
        if key in _UNREAD_KEYS | _TOKENIZER_KEYS and (value is None or value is False):
            continue  # as it is without the key
        if key in _TOKENIZER_KEYS and not args.use_vllm:
            raise ValueError(f"{named}: {key!r} needs a tokenizer, which TRL does not pass. Remove {key!r}.")
        if key.startswith(_ASSISTED) and value is not None:
            raise ValueError(
                f"{named}: {key!r} belongs to assisted generation, which takes one prompt at a time. Remove {key!r}."
            )
        if known is not None and key not in known:
            taker = "vLLM's SamplingParams" if args.use_vllm else "GenerationConfig"
            raise ValueError(f"{named}: {key!r} has no effect, it is no option of {taker}. Remove {key!r}.")
        if key in _FIXED_KEYS and value not in (_FIXED_KEYS[key], None):
            raise ValueError(
                f"{named}: {key!r} must be {_FIXED_KEYS[key]!r}, as a rollout is sampled, one completion a row. "
                f"Remove {key!r}."
            )
        field = _FIELD_OF_KEY.get(key)
        if field is not None:
            _check_same(args, field, key, value, named)
        allowed = _GENERATION_RANGES.get(key) or RANGES.get(field or key)
        if allowed is not None and value is not None and value not in allowed:
            raise ValueError(f"{named}: {key!r} is out of its range. Set it to {allowed}.")
        longest = args.max_completion_length
        if key in ("min_new_tokens", "min_tokens") and value is not None and longest is not None and value > longest:
            raise ValueError(
                f"{named}: {key!r} is above max_completion_length={longest}. Set it to {longest} or less."
            )
    for key, token in _tokens(options):
        if isinstance(token, bool) or not isinstance(token, int):
            raise ValueError(
                f"generation_kwargs={options!r}: {key!r} holds {token!r}, no token. Set it to whole numbers."
            )
    _check_numbers("generation_kwargs", options)
    if not args.use_vllm:
        GenerationConfig(
            **{
                "max_new_tokens": args.max_completion_length,
                "do_sample": True,
                "cache_implementation": args.cache_implementation,
                **options,
            },
            disable_compile=True,
        )
    if args.use_transformers_continuous_batching:
        from transformers.generation import ContinuousBatchingConfig

        batching: Any = args.transformers_continuous_batching_config or {}
        _check_numbers("transformers_continuous_batching_config", batching)
        ContinuousBatchingConfig(**batching)


def check_tokens(args: GRPOConfig, vocabulary: int | None) -> None:
    """
    Check the tokens that `generation_kwargs` names.

    Raises:
        `ValueError`: one is not in the vocabulary, or all of it is suppressed.
    """
    options: Any = args.generation_kwargs or {}
    if vocabulary is None:
        return
    for key, token in _tokens(options):
        if not 0 <= token < vocabulary and (key, token) != ("eos_token_id", -1):  # which ends nothing
            raise ValueError(
                f"generation_kwargs={options!r}: {key!r} holds {token}, which is no token of the model. Set it to "
                f"numbers from 0 to {vocabulary - 1}."
            )
    if len(set(options.get("suppress_tokens") or ())) == vocabulary:
        raise ValueError(f"generation_kwargs={options!r}: 'suppress_tokens' leaves no token. Remove some there.")


def _tokens(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The tokens that options of generation name, with their key."""

    def leaves(value: Any) -> Iterator[Any]:
        if isinstance(value, list | tuple):
            for part in value:
                yield from leaves(part)
        elif value is not None:
            yield value

    for key in sorted(_TOKENS & options.keys()):
        yield from ((key, token) for token in leaves(options[key]))
    biases = options.get("sequence_bias") or ()  # pairs, or a mapping, of tokens to their bias
    for entry in biases:
        yield from (("sequence_bias", token) for token in leaves(entry if isinstance(biases, Mapping) else entry[0]))


def _check_same(args: GRPOConfig, field: str, key: str, value: Any, named: str) -> None:
    asked = getattr(args, field)
    is_set = asked != next(f.default for f in fields(GRPOConfig) if f.name == field)
    if value != asked and (is_set or key in _ALWAYS):
        raise ValueError(
            f"{named} contradicts {field}={asked!r}. Set `{field}` to {value!r}, and remove {key!r} there."
        )


def _sampling_options(use_vllm: bool) -> set[str] | None:
    """Options that the engine reads; `None` where vLLM is not installed."""
    if not use_vllm:
        options = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
        return options - _UNREAD_KEYS - _TOKENIZER_KEYS
    try:
        sampling: Any = importlib.import_module("vllm").SamplingParams
    except ImportError:
        return None
    return set(getattr(sampling, "__struct_fields__", inspect.signature(sampling).parameters))


def _check_numbers(field: str, options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        if not _is_finite(value):
            raise ValueError(f"{field}={options!r}: {key!r} must be finite. Set it to a finite number.")


def _is_finite(value: Any) -> bool:
    """Whether every number is, in lists and mappings as well."""
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


# Sharding


def _fsdp(options: Any) -> None:
    """Transformers reads the keys that it knows, and says nothing of others."""
    known = trl_contract.options_read("fsdp_config")
    for key in (options or {}).keys() - known:
        raise ValueError(
            f"fsdp_config={options!r}: {key!r} has no effect. Remove it, or set one of {', '.join(sorted(known))}."
        )


# Checkpointing of activations


def _checkpointing(options: Any) -> None:
    rest = {key: value for key, value in (options or {}).items() if key not in _OWN_CHECKPOINTING}
    if rest:
        checkpoint(torch.square, torch.ones(1, requires_grad=True), **{"use_reentrant": False, **rest})


# Model and adapters


def rehearse_model(args: GRPOConfig, model_config: ModelConfig, path: str) -> None:
    """
    Make a model without its weights, on PyTorch's `meta` device, and the adapters on it.

    Args:
        args ([`~trl.GRPOConfig`]), model_config ([`~trl.ModelConfig`]):
            What it is made with.
        path (`str`):
            Folder of the model, or its id on the Hub.

    Raises:
        `ValueError`: an option cannot be used, is not known, or matches no part of the model; the message names the
            field.
    """
    options: Any = args.model_init_kwargs or {}
    named = given(model_config)
    named |= {"model_init_kwargs": options} if options else {}
    # To make a model takes long, so each step blames only the fields that it reads.
    of_model = {name: value for name, value in named.items() if name in _OF_MODELS}
    of_adapters = {name: value for name, value in named.items() if name.startswith(("lora_", "use_"))}

    def make(fields: dict[str, Any]) -> Any:
        fields = dict(fields)
        init_kwargs = fields.pop("model_init_kwargs", {})
        model = _empty_model(args, ModelConfig(**fields), path, init_kwargs)
        if model is not None:
            _check_shapes(model, path, init_kwargs)
        return model

    def adapt(fields: dict[str, Any], model: Any = None) -> None:
        _check_adapters(model or make(of_model), ModelConfig(use_peft=model_config.use_peft, **fields))

    try:
        model = make(of_model)
    except REFUSALS as error:
        if is_said(error, named):
            raise
        raise blame(of_model, make, error) from error
    if model is None:
        return
    _check_router(model, args.router_aux_loss_coef)
    of_adapters.pop("use_peft", None)  # which is not to blame for how adapters are made
    try:
        adapt(of_adapters, model)
    except REFUSALS as error:
        if is_said(error, named):
            raise
        raise blame(of_adapters, adapt, error) from error


def _empty_model(args: Any, model_config: ModelConfig, path: str, options: Mapping[str, Any]) -> Any:
    """The model without weights; `None` where its class comes with the model."""
    # The options that `from_pretrained` takes out, before the configuration and the class get the rest.
    loading = {*inspect.signature(PreTrainedModel.from_pretrained).parameters}
    loading |= trl_contract.options_read("model_init_kwargs")
    dtype = options.get("dtype", model_config.dtype)
    if not isinstance(dtype, torch.dtype) and dtype not in CHOICES["dtype"]:
        raise ValueError(f"There is no dtype {dtype!r}.")
    if "torch_dtype" in options:
        raise ValueError(
            f"model_init_kwargs={options!r}: `dtype` goes before 'torch_dtype'. Set `dtype` in its place."
        )
    _check_device_map(options.get("device_map"))
    _check_numbers("model_init_kwargs", options)
    for key, value in options.items():
        if "drop" in key and isinstance(value, int | float) and not 0 <= value <= 1:
            raise ValueError(f"model_init_kwargs={options!r}: {key!r} is no share. Set it to a number in [0, 1].")
    rest = {key: value for key, value in options.items() if key not in loading | _IGNORED_IN_LOADING}
    revision, trust = options.get("revision", model_config.model_revision), args.trust_remote_code
    config, rest = AutoConfig.from_pretrained(
        path, revision=revision, trust_remote_code=trust, return_unused_kwargs=True, **rest
    )
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    if kind is None:
        return None
    rest = {key: value for key, value in rest.items() if key not in ("trust_remote_code", "revision")}
    attention = options.get("attn_implementation", model_config.attn_implementation)
    with _without_zero3(), torch.device("meta"):
        return kind._from_config(config, **rest, attn_implementation=attention)


@contextmanager
def _without_zero3() -> Iterator[None]:
    """Under ZeRO-3, Transformers would spread what it makes over all processes."""
    kept = hf_deepspeed._hf_deepspeed_config_weak_ref
    hf_deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        hf_deepspeed._hf_deepspeed_config_weak_ref = kept


def _check_device_map(device_map: Any) -> None:
    places = check_and_set_device_map(device_map)
    for place in places.values() if isinstance(places, Mapping) else ():
        device = torch.device("cpu" if place == "disk" else place)
        here = torch.accelerator.current_accelerator()
        known = (
            here is not None and device.type == here.type and (device.index or 0) < torch.accelerator.device_count()
        )
        if not known and device.type not in ("cpu", "meta"):
            raise ValueError(f"There is no device {str(place)!r} on this machine.")


def _check_shapes(model: Any, path: str, options: Mapping[str, Any]) -> None:
    """Weights of another shape than that of the model as it was asked for, which fail only when they are loaded."""
    changed = options.keys() & model.config.to_dict().keys() - {"dtype"}
    quantized = getattr(model.config, "quantization_config", None) is not None  # packed
    if not changed or quantized or options.get("ignore_mismatched_sizes"):
        return
    shapes = {  # under ZeRO-3, a parameter's own shape is that of its part
        name: tuple(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in model.named_parameters()
    }
    for file in Path(path).glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            for name in shapes.keys() & set(weights.keys()):
                saved = tuple(weights.get_slice(name).get_shape())
                if saved != shapes[name]:
                    raise ValueError(f"{name} has the shape {saved} in {file.name}, and {shapes[name]} in the model.")


def _check_router(model: Any, coefficient: float | None) -> None:
    if coefficient and not hasattr(model.config.get_text_config(), "output_router_logits"):
        raise ValueError(f"router_aux_loss_coef={coefficient} has no effect: the model has no experts. Remove it.")


def _check_adapters(model: Any, model_config: ModelConfig) -> None:
    peft_config: Any = get_peft_config(model_config)
    if peft_config is None:
        return
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    for name, parts in (
        ("lora_target_modules", modules),
        ("lora_modules_to_save", modules),
        ("lora_target_parameters", parameters),
    ):
        wanted = getattr(model_config, name)
        # One by itself is a pattern, or "all-linear".
        absent = [
            part
            for part in (wanted if isinstance(wanted, list) else [])
            if not any(path == part or path.endswith(f".{part}") for path in parts)
        ]
        if absent:
            known = sorted({path.rpartition(".")[2] for path, module in modules.items() if _is_linear(module)})
            said = (
                f"{name}={wanted!r}: {', '.join(map(repr, absent))} matches nothing in the model. It has the layers "
                f"{', '.join(known)}. Set `{name}` to names of its parts."
            )
            if len(absent) == len(wanted):
                raise ValueError(said)
            warnings.warn(said, stacklevel=2)  # a list for several architectures
    import peft

    target = model_config.lora_target_modules
    if isinstance(target, str) and any(path.endswith(f".{target}") for path in modules):
        raise ValueError(
            f"lora_target_modules={target!r}: a single entry is a pattern of whole paths, which {target!r} does not "
            f"match. Set `lora_target_modules` to ['.*{target}']."
        )
    model = peft.get_peft_model(model, peft_config)
    if isinstance(model.get_output_embeddings(), peft.tuners.tuners_utils.BaseTunerLayer):
        raise ValueError(
            f"lora_target_modules={model_config.lora_target_modules!r} puts an adapter on the LM head, which TRL does "
            "not train. Remove the head from `lora_target_modules`."
        )


def _is_linear(module: Any) -> bool:
    return isinstance(module, torch.nn.Linear)
