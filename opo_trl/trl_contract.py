"""
What the package relies on inside TRL, Transformers and Accelerate, in one place.

The names below are private to those libraries, or are methods that we override and attributes that we set. They change
between releases, and a release without one of them would train something else, drop a guard, or fail hours into a run.
So the check runs once, when the trainer is imported, and fails with one message. `tests/contract.py` also checks what
can only be seen in the libraries' code, and tells which modules rely on what does not fit.
"""

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any

import trl
from packaging.specifiers import SpecifierSet


TESTED_VERSIONS = SpecifierSet(">=1.16,<1.17")

Contract = Mapping[str, Mapping[str, Collection[str] | None]]

# Owner (a class or a module) -> name -> the parameters that we pass or override; `None` for an attribute. A class has
# the attributes of its body, and those that a method assigns to `self`, which only `tests/contract.py` checks.
CONTRACT: Contract = {
    "trl.GRPOTrainer": {
        "__init__": (
            *("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
            *("reward_processing_classes", "callbacks", "optimizers", "quantization_config", "peft_config", "tools"),
            *("rollout_func", "environment_factory"),
        ),
        **dict.fromkeys(("_name", "_paper", "_tag_names")),
        # A rollout
        "_generate_and_score_completions": ("inputs",),  # returns the rollout, to which we add targets
        "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),  # which samples are scored
        "_generate": ("prompts",),
        "_generate_single_turn": (),
        "_tokenize_prompts": ("prompts",),
        **dict.fromkeys(("_tokenizer", "rollout_func", "train_dataset")),  # of recorded rollouts
        "_get_per_token_logps_and_entropies": (
            *("model", "input_ids", "attention_mask", "logits_to_keep"),
            *("batch_size", "compute_entropy", "compute_aux_loss"),
        ),
        "_prepare_inputs": ("generation_batch",),  # returns a micro-batch of the rollout
        "_get_train_sampler": ("dataset",),  # the order of the prompts
        "_buffered_inputs": None,
        "_tool_call_loop": (),
        "_sync_tool_dicts": None,  # of the current batch
        "_async_tool_dicts": None,
        "_environment_pool": None,  # evaluations have their own
        **dict.fromkeys(("_step", "generation_config", "eos_token_ids", "log_multimodal", "num_generations_eval")),
        "vllm_importance_sampling_correction": None,
        # The loss
        "training_step": ("model", "inputs", "num_items_in_batch"),  # called for each part of a micro-step
        "compute_loss": ("model", "inputs", "return_outputs", "num_items_in_batch"),
        "_compute_loss": ("model", "inputs"),
        "get_off_policy_mask": (
            *("advantages", "per_token_logps", "sampling_per_token_logps"),
            *("mask", "off_policy_threshold"),
        ),
        "get_high_entropy_mask": ("entropies", "mask", "threshold"),
        "_current_train_step_time": None,
        "_last_loaded_step": None,  # whose weights vLLM has
        **dict.fromkeys(("_entropy_bonus_enabled", "_last_world_entropy", "entropy_coef")),
        # The log
        **dict.fromkeys(("_logs", "_metrics", "_pending_extra_logs", "_pending_metrics")),
        # A checkpoint
        "_save_checkpoint": ("model", "trial"),
        "create_model_card": ("model_name", "dataset_name", "tags"),
    },
    "transformers.Trainer": {
        "train": ("resume_from_checkpoint",),
        "get_batch_samples": ("epoch_iterator", "num_batches", "device"),  # called once per accumulation window
        "_run_epoch": ("epoch", "epochs_trained", "steps_trained_in_current_epoch"),
        "evaluation_loop": ("dataloader", "metric_key_prefix"),
        "compute_metrics": None,
        "_finalize_training": (),
        "_get_grad_norm": ("model", "grad_norm"),  # skips a step with a non-finite gradient
        "_maybe_log_save_evaluate": (),
        "_determine_best_metric": ("metrics", "trial"),  # with `save_strategy: best`, whether to save
        "log": ("logs", "start_time"),
        "_defer_fsdp_gradient_reduction": (),
        # What a checkpoint holds, and how a run resumes
        "_get_output_dir": ("trial",),
        "_save_rng_state": ("output_dir",),
        "_load_rng_state": ("checkpoint",),
        "_load_optimizer_and_scheduler": ("checkpoint",),
        "_issue_warnings_after_load": ("load_result",),
        **dict.fromkeys(("_globalstep_last_logged", "_total_loss_scalar", "_tr_loss")),
    },
    "transformers.TrainerCallback": dict.fromkeys(
        ("on_train_begin", "on_step_begin", "on_optimizer_step", "on_step_end", "on_log", "on_save", "on_train_end"),
        ("args", "state", "control"),
    ),
    "transformers.trainer_callback.ProgressCallback": {"__init__": (), "on_log": ("args", "state", "control", "logs")},
    "transformers.PreTrainedModel": dict.fromkeys(("_is_stateful", "_supports_attention_backend")),
    "transformers.PreTrainedConfig": {"_attn_implementation": None},
    "transformers.integrations.deepspeed": {"_hf_deepspeed_config_weak_ref": None},
    "trl.GRPOConfig": {"__post_init__": (), "_VALID_DICT_FIELDS": None},
    "trl.TrlParser": {
        "error": ("message",),
        "_get_value": ("action", "arg_string"),
        "_get_values": ("action", "arg_strings"),
        "_actions": None,
    },
    "transformers.TrainingArguments": dict.fromkeys(("_n_gpu", "report_to", "save_total_limit")),
    "accelerate.PartialState": {"wait_for_everyone": ()},
    "transformers.integrations.WandbCallback": {"_initialized": None},
    "trl.trainer.utils.RepeatSampler": {"__iter__": ()},
    "trl.trainer.grpo_trainer": {"create_model_from_path": ("model_id",)},  # of the reference
    "trl.generation.vllm_generation.VLLMGeneration": {
        "generate": (),  # we wrap these two
        "sync_weights": (),
        "generation_kwargs": None,
        "temperature": None,
    },
    "accelerate.state.GradientState": {"_set_sync_gradients": ("sync_gradients",)},
}

# Entries of a rollout that the model's forward pass takes besides the tokens: images and the like.
MULTIMODAL_KEYS = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)

# What `opo_trl.asynchronous` relies on in TRL's experimental trainer; checked when it is imported.
_ASYNC = "trl.experimental.async_grpo.async_grpo_trainer"
_WORKER = "trl.experimental.async_grpo.async_rollout_worker"
ASYNC_CONTRACT: Contract = {
    f"{_ASYNC}.AsyncGRPOTrainer": {
        "__init__": (
            *("model", "reward_funcs", "args", "train_dataset", "processing_class", "callbacks", "optimizers"),
            *("peft_config", "tools", "environment_factory", "rollout_worker", "weight_transfer"),
        ),
        **dict.fromkeys(("_name", "_paper", "_tag_names")),
        "train": (),
        **dict.fromkeys(("_lora_sync", "_metrics", "rollout_queue", "model_version")),
        "_sync_weight": (),
        "_streaming_iter": (),
        "get_train_dataloader": (),
        "get_batch_samples": ("epoch_iterator", "num_batches", "device"),
        "compute_loss": ("model", "inputs", "return_outputs", "num_items_in_batch"),
        "training_step": ("model", "inputs", "num_items_in_batch"),
        "log": ("logs", "start_time"),
        "_log_step_metrics": (),
        "processing_class": None,
        "eos_token_ids": None,
        # Which prompts have been trained
        "_save_checkpoint": ("model", "trial"),
        "create_model_card": ("model_name", "dataset_name", "tags"),
        **dict.fromkeys(("_trained_groups", "_groups_before_resume", "_epoch_stop_groups", "_last_groups_trained")),
    },
    _ASYNC: {
        **dict.fromkeys(("get_peak_flops_per_device", "compute_flops_per_token")),
        "_iter_vllm_named_params": ("model",),
    },
    f"{_WORKER}._AsyncRolloutLoop": {
        "__init__": (
            *("model_name", "dataset", "reward_funcs", "processing_class", "eos_token_ids", "tools"),
            *("rollout_buffer", "model_version_value", "heartbeat_value", "failed_event", "exception_info_queue"),
            *("metrics_queue", "num_generations", "max_tokens", "temperature", "chat_template_kwargs"),
            *("max_tool_calling_iterations", "fork_threshold_tokens"),
        ),
        "run": (),
        "_run_loops": ("stop_event",),
        "_execute_tool_calls": ("tool_calls", "tool_dict"),
        "_post": ("path", "payload", "timeout", "max_retries"),
        "_score_group": ("group",),
        "_generate_one": ("prompt", "tool_dict", "tools", "group_id"),
        "_generate_one_turn": ("prompt_ids",),
        "_repeat_iterator": (),
        **dict.fromkeys(
            ("reward_funcs", "_counters", "_loop", "_model_version_value", "_tool_pool", "_metrics_queue")
        ),
    },
    f"{_WORKER}.AsyncRolloutWorker": {
        **dict.fromkeys(("_loop_cls", "_loop_kwargs", "_process", "_failed_event", "rollout_buffer")),
        "start": (),
        "check_health": ("stale_after_s",),
        "stop": (),
    },
    "multiprocessing.queues.Queue": {"_writer": None},
    _WORKER: {"_AsyncRolloutLoop": None},
    "trl.experimental.async_grpo.AsyncGRPOConfig": {"__post_init__": (), "to_dict": (), "dtype": None},
}


def check(contract: Contract = CONTRACT, version: str = trl.__version__) -> None:
    """
    Check the version of TRL and the names of the contract.

    Raises:
        `ImportError`: names everything that does not fit, and the tested range; or a class that another package has
            replaced.
    """
    check_replaced(contract)
    problems = [f"{name} {problem}" for name, problem in mismatches(contract, version)]
    if problems:
        raise ImportError(
            f"opo_trl does not fit the installed libraries: {'; '.join(problems)}. Tested with TRL {TESTED_VERSIONS}: "
            f"install it with `pip install 'trl{TESTED_VERSIONS}'`, and the other libraries in the versions that "
            "`pip install opo_trl` chooses."
        )


def check_replaced(contract: Contract = CONTRACT) -> None:
    """
    Check that the classes of the contract are the libraries' own. Unsloth puts classes made of rewritten source in
    place of TRL's when it is imported, and changes functions that TRL's own classes call. A trainer checks it again
    when it is made and when it trains, because that may have happened after our import.

    Raises:
        `ImportError`: names the class, and what is in its place.
    """
    for path in contract:
        owner = resolve(path)
        # One of ours may stand there: that is how TRL's own scripts train with OPO.
        own = (path.partition(".")[0], __package__)
        if inspect.isclass(owner) and owner.__module__.partition(".")[0] not in own:
            raise ImportError(
                f"{path} has been replaced by {owner.__module__}.{owner.__qualname__}, as Unsloth does when it is "
                "imported. Its methods are rewritten, so OPO would train something else. Train in a process that does "
                "not import that package: see docs/migrating.md for alternatives."
            )


@contextmanager
def temporarily(holder: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object, and restore them afterwards."""
    attributes = vars(holder)
    own = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            attributes.pop(name, None)
        attributes.update(own)


def resolve(path: str) -> Any:
    """The object of a dotted path, or an `ImportError` with a message of one line."""
    try:
        return resolve_name(path)
    except Exception as error:  # TRL raises a `RuntimeError` where one of its modules cannot be imported
        return ImportError(" ".join(str(error).split()))


def mismatches(contract: Contract, version: str) -> Iterator[tuple[str, str]]:
    """Names that do not fit, and what is wrong with each."""
    if not TESTED_VERSIONS.contains(version, prereleases=True):
        yield f"TRL {version}", "is outside the tested range"
    for path, entries in contract.items():
        owner = resolve(path)
        if isinstance(owner, ImportError):
            yield path, f"cannot be imported ({owner})"
            continue
        for name, parameters in entries.items():
            method = getattr(owner, name, None)
            # That of a class may be set by its methods, so its absence says nothing.
            present = hasattr(owner, name) or inspect.isclass(owner) if parameters is None else callable(method)
            if not present:
                yield f"{path}.{name}", "is missing"
            elif parameters and (missing := set(parameters) - inspect.signature(method).parameters.keys()):
                yield f"{path}.{name}", f"has no parameter {', '.join(sorted(missing))}"
