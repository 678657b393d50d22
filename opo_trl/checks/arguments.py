"""
Dry run of the training arguments.

Optimizers, schedules and trackers check their options when they are constructed, some long after a run has started.
Here each is constructed once, on something small. What libraries ignore silently is in tables.
"""

import json
import os
from collections.abc import Collection, Mapping
from typing import Any

import torch
from huggingface_hub.utils import validate_repo_id
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks

from . import paths
from .blame import blamed, given
from .generation import dry_run_generation
from .ranges import reject, require


_OPTIONS = (
    *("model_init_kwargs", "generation_kwargs", "chat_template_kwargs", "lr_scheduler_kwargs"),
    *("gradient_checkpointing_kwargs", "transformers_continuous_batching_config", "liger_kernel_config"),
)

_STEPS = 10_000  # stands in for the unknown length of a run

# Keys whose value may be any text.
_TEXTS = {"stop", "bad_words", "stop_strings"}
_SWITCHES = {"true", "false", "yes", "no", "on", "off"}

# Optimizers that take any option, the first three of them constructed from a model.
_TAKE_ANY = ("galore", "apollo", "lomo", "rmsprop_")

# Optimizer → the keys of `optim_args` that it reads; Transformers ignores others silently.
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

# Options of `gradient_checkpointing_kwargs` that Transformers consumes before PyTorch gets the rest.
_OWN_CHECKPOINTING = ("every_n_layers", "offload")

# Options of `fsdp_config` that Transformers reads; it ignores others silently.
FSDP_OPTIONS = {
    *("activation_checkpointing", "auto_wrap_policy", "backward_prefetch", "buffer_dtype", "compute_dtype"),
    *("cpu_offload", "cpu_ram_efficient_loading", "forward_prefetch", "limit_all_gathers", "min_num_params"),
    *("reshard_after_forward", "state_dict_type", "sync_module_states", "transformer_layer_cls_to_wrap"),
    *("use_orig_params", "version", "xla", "xla_fsdp_grad_ckpt", "xla_fsdp_settings", "xla_fsdp_v2"),
}


def dry_run_arguments(args: Any) -> None:
    """Construct small versions of what a run constructs from its configuration, and reject what has no effect."""
    set_ = given(args)
    for name in _OPTIONS:
        if getattr(args, name) is not None:
            _check_options(name, getattr(args, name))
    for dry_run, reads in _DRY_RUNS.items():
        with blamed({name: getattr(set_[name], "value", set_[name]) for name in reads if name in set_}):
            dry_run(args)
    if args.hub_model_id is not None:
        with blamed({"hub_model_id": args.hub_model_id}):
            validate_repo_id(args.hub_model_id)
    _check_trackers(args.report_to)
    for key in (args.fsdp_config or {}).keys() - FSDP_OPTIONS:
        fix = f"Remove it, or set one of {', '.join(sorted(FSDP_OPTIONS))}"
        reject("fsdp_config", args.fsdp_config, key, "has no effect", fix)
    lasting = args.dataloader_persistent_workers
    wanted = "false, or `dataloader_num_workers` to a positive number"
    require(not lasting or args.dataloader_num_workers > 0, "dataloader_persistent_workers", lasting, wanted)
    if args.torch_compile:
        known, backend = torch.compiler.list_backends(exclude_tags=()), args.torch_compile_backend
        require(backend in known, "torch_compile_backend", backend, f"one of {', '.join(known)}")


def _check_options(field: str, options: Any) -> None:
    """Check a field that holds a mapping of options."""
    require(isinstance(options, Mapping), field, options, f"a mapping: `{field}: {{key: value}}`")
    for key, value in options.items():
        if key not in _TEXTS and isinstance(value, str) and value.lower() in _SWITCHES:  # "false" is true to Python
            reject(field, options, key, "is text, not true or false", "Set it to true or false, without quotes")
        try:
            json.dumps(value, allow_nan=False, skipkeys=True, default=str)
        except ValueError:
            reject(field, options, key, "must be finite", "Set it to a finite number")


def _check_optimizer(args: Any) -> None:
    asked, name = args.optim_args or "", args.optim.value
    takes_any = any(part in name for part in _TAKE_ANY)
    pairs = asked.replace(" ", "").split(",") if asked and not takes_any else []
    for key, value in (pair.split("=") for pair in pairs):
        if value.lower().lstrip("+-") in ("nan", "inf", "infinity"):
            raise ValueError(f"optim_args={asked!r}: {key!r} must be finite. Set it to a finite number.")
        if key not in OPTIM_ARGS.get(name, ()):
            raise ValueError(f"optim_args={asked!r}: {key!r} has no effect on {name}. Remove {key!r}.")
    try:
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args)
    except ValueError as error:
        if takes_any and "need to pass a" in str(error):
            return  # there is no model yet
        raise
    kind([torch.nn.Parameter(torch.ones(2, 2))], **options)


def _check_schedule(args: Any) -> None:
    field, name, options = "lr_scheduler_kwargs", args.lr_scheduler_type.value, args.lr_scheduler_kwargs or {}
    if options and name in ("constant", "constant_with_warmup"):
        raise ValueError(f"{field}={options!r} has no effect on the schedule {name!r}. Remove it.")
    for key, value in options.items():
        if isinstance(value, int | float) and value < 0 and key != "last_epoch":  # some schedules clip silently at 0
            reject(field, options, key, "is below 0", "Set it to 0 or more")
    steps = args.max_steps if args.max_steps > 0 else _STEPS
    warmup = args.get_warmup_steps(steps)
    optimizer = torch.optim.SGD([torch.ones(1)], lr=args.learning_rate)
    schedule: Any = get_scheduler(name, optimizer, warmup, steps, scheduler_specific_kwargs=options)
    for step in (0, 1, warmup, steps // 2, steps - 1, steps):
        for factor in getattr(schedule, "lr_lambdas", ()):  # absent from a schedule that follows a metric
            if not 0 <= factor(step) <= 1 + 1e-6:
                raise ValueError(
                    f"{field}={options!r}: in step {step} the schedule {name!r} multiplies learning_rate="
                    f"{args.learning_rate} by {factor(step)}. Set it so that the factor stays in [0, 1]."
                )


def _check_checkpointing(args: Any) -> None:
    options: Any = args.gradient_checkpointing_kwargs or {}
    of_pytorch = {name: value for name, value in options.items() if name not in _OWN_CHECKPOINTING}
    checkpoint(torch.square, torch.ones(1, requires_grad=True), **{"use_reentrant": False, **of_pytorch})


# What is constructed → the fields that it reads.
_DRY_RUNS = {
    _check_optimizer: ("optim", "optim_args"),
    _check_schedule: ("lr_scheduler_type", "lr_scheduler_kwargs"),
    dry_run_generation: ("generation_kwargs", "cache_implementation", "transformers_continuous_batching_config"),
    _check_checkpointing: ("gradient_checkpointing_kwargs",),
}


def _check_trackers(names: Any) -> None:
    for name in names:
        try:
            get_reporting_integration_callbacks([name])[0]()
        except Exception as error:
            said = f"report_to={name!r} cannot be used: {str(error).rstrip('.')}"
            raise ValueError(f"{said}. Set `report_to` to another, or to none alone.") from error
    folder = os.environ.get("TENSORBOARD_LOGGING_DIR")
    if "tensorboard" in names and folder and os.environ.get("RANK", "0") == "0":
        paths.check_folder("TENSORBOARD_LOGGING_DIR", folder)
