"""
What the package needs of TRL, Transformers and Accelerate, and whether the installed releases have it.

[`examine`] compares them with `contract.json`, which says what the tested releases look like. In an environment with
another release that passes all tests, `python -m opo_trl.contract` adds that release to the file.
"""

import ast
import dataclasses
import dis
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from types import CodeType
from typing import Any


RECORD = Path(__file__).with_name("contract.json")

# Entries of a rollout that the model's forward pass takes besides the tokens: images and the like.
MULTIMODAL_KEYS = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)
# Entries of a rollout that the package reads. Under another name, most of them would be ignored without a word.
ROLLOUT_KEYS = (
    *("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "tool_mask"),
    *("importance_sampling_ratio", "old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"),
    *MULTIMODAL_KEYS,
)
KNOWN_KEYS = (*ROLLOUT_KEYS, "num_items_in_batch")  # all of the tested releases

# What for → class or module → names. A function has the parameters that the package passes or overrides; one that the
# function may ignore has a question mark. The others are attributes, of a class, of its instances, or of a module.
NEEDS: dict[str, dict[str, str]] = {
    "rollouts": {
        "trl.GRPOTrainer": """
            __init__(model, reward_funcs, args, train_dataset, eval_dataset, processing_class,
                reward_processing_classes, callbacks, optimizers, quantization_config, peft_config, tools,
                rollout_func, environment_factory)
            _generate_and_score_completions(inputs) _generate(prompts) _tokenize_prompts(prompts)
            _calculate_rewards(inputs, prompts, completions, completion_ids_list)
            args model accelerator state train_dataset eval_dataset processing_class chat_template chat_template_kwargs
            tools rollout_func generation_config eos_token_ids temperature num_generations num_generations_eval
            max_completion_length mask_truncated_completions pad_to_multiple_of log_completions log_multimodal
            reward_funcs reward_func_names reward_weights scale_rewards multi_objective_aggregation
            _environment_pool environment_factories _is_vlm use_transformers_continuous_batching
        """,
        "trl.trainer.utils": """
            get_config_model_id is_async_callable pad(padding_value, padding_side) remove_none_values
            split_pixel_values_by_grid unsplit_pixel_values_by_grid strip_images_from_messages
        """,
        "trl.data_utils": "prepare_multimodal_messages(messages, images)",
        "trl.chat_template_utils": "add_response_schema parse_response",
    },
    "sampling": {
        "transformers.GenerationConfig": """
            update(defaults_only, allow_custom_entries) _get_default_generation_params()
        """,
        "trl.import_utils": "is_vllm_available",
    },
    "the order of prompts": {
        "trl.GRPOTrainer": "_get_train_sampler(dataset?) shuffle_dataset num_iterations",
        "trl.trainer.utils.RepeatSampler": "__iter__()",
        "trl.trainer.grpo_trainer": "RepeatSampler",
        "transformers.Trainer": """
            get_batch_samples(epoch_iterator, num_batches, device?)
            _run_epoch(epoch, epochs_trained, steps_trained_in_current_epoch) _get_dataloader(dataset)
            set_initial_training_values(args, dataloader)
        """,
        "transformers.trainer_utils": "has_length",
    },
    "log-probabilities": {
        "trl.GRPOTrainer": """
            _get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep, batch_size,
                compute_entropy, compute_aux_loss)
            ref_model
        """,
        "trl.trainer.utils": """
            add_fused_lm_head(model, temperature, cast_lm_head_to_fp32) create_model_from_path(model_id)
            use_adapter(adapter_name)
        """,
        "trl.trainer.grpo_trainer": "create_model_from_path(model_id)",
        "trl.models.utils": "disable_gradient_checkpointing",
        "transformers.PreTrainedModel": "is_backend_compatible()",
        "transformers.PreTrainedConfig": "_attn_implementation",
        "transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS": "register",
    },
    "the loss": {
        "trl.GRPOTrainer": """
            training_step(model, inputs, num_items_in_batch?)
            compute_loss(model?, inputs?) _compute_loss(model?, inputs?)
            _prepare_inputs(generation_batch?) get_high_entropy_mask(entropies, mask, threshold)
            get_off_policy_mask(advantages, per_token_logps, sampling_per_token_logps, mask, off_policy_threshold)
            _step beta aux_loss_enabled router_aux_loss_coef off_policy_mask_threshold top_entropy_quantile
        """,
        "transformers.Trainer": """
            _get_grad_norm(model?, grad_norm?) current_gradient_accumulation_steps optimizer lr_scheduler
            is_deepspeed_enabled is_fsdp_enabled
        """,
        "transformers.distributed.fsdp": "is_fsdp_managed_module",
        "transformers.optimization": "GreedyLR",
        "accelerate.state.GradientState": "_set_sync_gradients(sync_gradients)",
        "accelerate.optimizer": "AcceleratedOptimizer",
        "accelerate.utils": """
            broadcast_object_list gather_object is_peft_model patch_environment send_to_device set_seed
            DistributedType
        """,
    },
    "the log": {
        "trl.GRPOTrainer": """
            log(logs, start_time?) _current_train_step_time _logs _metrics _pending_extra_logs _pending_metrics
            _name _paper _tag_names
        """,
        "transformers.Trainer": """
            evaluation_loop(dataloader, metric_key_prefix) _maybe_log_save_evaluate() _globalstep_last_logged
            is_in_train control callback_handler add_callback(callback) remove_callback(callback)
        """,
        "transformers.TrainerCallback": """
            on_train_begin(args?, state?, control?) on_step_begin(args?, state?, control?)
            on_optimizer_step(args?, state?, control?) on_step_end(args?, state?, control?)
            on_log(args?, state?, control?) on_save(args?, state?, control?) on_train_end(args?, state?, control?)
        """,
        "transformers.trainer_callback.ProgressCallback": "__init__() on_log(args?, state, control?, logs)",
        "transformers.trainer_callback": "DefaultFlowCallback PrinterCallback",
        "transformers.integrations.WandbCallback": "_initialized",
        "transformers.utils.logging": "_tqdm_active",
        "accelerate.logging": "get_logger",
    },
    "checkpoints": {
        "transformers.Trainer": """
            train(resume_from_checkpoint) _save_checkpoint(model?, trial?) _get_output_dir(trial?) _load_best_model()
            _save_rng_state(output_dir) _load_rng_state(checkpoint) _total_loss_scalar _tr_loss
            save_model() create_model_card() push_to_hub() is_world_process_zero
        """,
        "transformers.trainer": "TRAINER_STATE_NAME",
        "transformers.trainer_utils": "PREFIX_CHECKPOINT_DIR",
        "accelerate.PartialState": "wait_for_everyone()",
    },
    "vLLM": {
        "trl.GRPOTrainer": """
            use_vllm vllm_mode vllm_generation vllm_tensor_parallel_size vllm_importance_sampling_correction
            _last_loaded_step
        """,
        "trl.generation.vllm_generation.VLLMGeneration": "generate() sync_weights() generation_kwargs temperature",
    },
    "the plan of another machine": {
        "trl.trainer.grpo_trainer": "VLLMGeneration",
        "transformers.Trainer": "_move_model_to_device",
    },
    "fields and recipes": {
        "trl": "GRPOConfig ModelConfig ScriptArguments TrlParser get_peft_config get_quantization_config",
        "trl.rewards": "get_soft_overlong_punishment",
        "trl.TrlParser": "error(message)",
        "transformers.Trainer": "get_optimizer_cls_and_kwargs(args)",
        "transformers.utils": """
            find_adapter_config_file is_bitsandbytes_available is_liger_kernel_available is_peft_available
            is_torch_bf16_gpu_available
        """,
        "transformers.integrations": "get_available_reporting_integrations",
        "accelerate.commands.launch": "simple_launcher(args) multi_gpu_launcher(args) launch_command_parser logger",
        "transformers.integrations.deepspeed": "_hf_deepspeed_config_weak_ref",
        "trl.GRPOConfig": """
            __post_init__() _n_gpu accelerator_config beta bf16 cast_lm_head_to_fp32 chat_template_kwargs delta device
            disable_tqdm entropy_coef epsilon epsilon_high eval_on_start eval_strategy fp16 generation_batch_size
            generation_kwargs gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs
            greater_is_better importance_sampling_level learning_rate load_best_model_at_end local_process_index
            log_completions log_multimodal loss_type lr_scheduler_kwargs lr_scheduler_type main_process_first
            mask_truncated_completions max_completion_length max_steps metric_for_best_model model_init_kwargs
            multi_objective_aggregation n_gpu num_generations num_generations_eval num_iterations
            off_policy_mask_threshold optim optim_args output_dir pad_to_multiple_of per_device_eval_batch_size
            per_device_train_batch_size push_to_hub remove_unused_columns report_to resume_from_checkpoint
            reward_weights router_aux_loss_coef sapo_temperature_neg sapo_temperature_pos save_strategy
            save_total_limit scale_rewards seed should_save shuffle_dataset steps_per_generation sync_ref_model
            temperature to_dict top_entropy_quantile trust_remote_code use_adaptive_entropy use_bias_correction_kl
            use_cpu use_liger_kernel use_vllm vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos
            vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_importance_sampling_correction
            vllm_importance_sampling_mode vllm_max_model_length vllm_mode warmup_steps world_size top_p top_k min_p
        """,
    },
}


_OVERRIDDEN_CLASSES = ("trl.GRPOTrainer", "transformers.Trainer")  # of which the package overrides methods


@dataclasses.dataclass(frozen=True)
class Need:
    """A name that the package needs."""

    purpose: str
    owner: str  # path of a class or module
    name: str
    parameters: list[str] | None  # parameters of a function; `None` for an attribute
    read: list[str]  # parameters that the function must not ignore

    @property
    def path(self) -> str:
        """Path of the name itself."""
        return f"{self.owner}.{self.name}"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How the installed releases differ from the tested ones, one line each."""

    differences: list[str]  # differences with which the package works
    breaks: list[str]  # differences with which it does not

    @property
    def word(self) -> str:
        """`holds`, `differs` or `breaks`."""
        if self.breaks:
            return "breaks"
        return "differs" if self.differences else "holds"


def examine() -> Verdict:
    """Compare the installed releases with what the package needs and with the tested ones. No model is loaded."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))  # what the tested releases have
    differences: list[str] = []
    breaks: list[str] = []
    for need in needs():
        if not _exists(need):
            breaks.append(f"{need.path} is missing (for {need.purpose})")
        elif need.parameters is not None:
            tested = record["parameters"].get(need.path, [])
            differences.extend(_changed_parameters(need, tested))
            breaks.extend(f"{need.path} {fault} (for {need.purpose})" for fault in _faults(need, tested))
    if breaks:  # the classes that are read below may be missing
        return Verdict(differences, breaks)
    mentioned = _constants_in_methods(resolve_name("trl.GRPOTrainer"))
    breaks.extend(f"rollouts have no entry {key!r}" for key in ROLLOUT_KEYS if key not in mentioned)
    new_entries = sorted(rollout_entries() - {*record["entries"]})
    differences.extend(f"rollouts have a new entry {key!r}, which opo_trl does not read" for key in new_entries)
    differences.extend(_changed_defaults(record["defaults"]))
    return Verdict(differences, breaks)


def needs() -> Iterator[Need]:
    """
    All names that the package needs, from the texts in `NEEDS`, such as `train(resume, trial?) args`: a method whose
    parameter `trial` need not be read, and an attribute.
    """
    for purpose, owners in NEEDS.items():
        for owner, names in owners.items():
            for name, signature in re.findall(r"(\w+)(\([^)]*\))?", names):
                marked = re.findall(r"(\w+)(\??)", signature)
                parameters = [parameter for parameter, _ in marked] if signature else None
                read = [parameter for parameter, mark in marked if not mark]
                yield Need(purpose, owner, name, parameters, read)


def _exists(need: Need) -> bool:
    """Whether this release has a name: as an attribute, a field, or an attribute that a method sets or reads."""
    try:
        owner = resolve_name(need.owner)
    except (ImportError, AttributeError):
        return False
    if hasattr(owner, need.name) or need.name in getattr(owner, "__dataclass_fields__", ()):
        return True
    is_attribute = need.parameters is None and inspect.isclass(owner)
    return is_attribute and any(need.name in code.co_names for code in _codes_of_methods(owner))


def _codes_of_methods(owner: type) -> Iterator[CodeType]:
    """
    Code of all methods of a class and of its bases. Its names (`co_names`) include the attributes of instances that
    they assign and read.
    """
    for base in inspect.getmro(owner):
        for member in vars(base).values():
            # A property has its function in `fget`, a cached one in `func`.
            function = getattr(member, "fget", None) or getattr(member, "func", None) or member
            yield from _codes(function)


def _codes(function: Any) -> Iterator[CodeType]:
    """The code of a function without its decorators, and of the functions in it."""
    pending = [getattr(inspect.unwrap(function), "__code__", None)] if callable(function) else []
    while pending:
        code = pending.pop()
        if code is not None:
            yield code
            pending.extend(constant for constant in code.co_consts if isinstance(constant, CodeType))


def _constants_in_methods(owner: type) -> set[Any]:
    """
    All constants in the methods of a class, among which are the strings by which they name entries of dictionaries.
    """
    strings: set[Any] = set()
    for code in _codes_of_methods(owner):
        for constant in code.co_consts:
            strings.update(constant if isinstance(constant, tuple) else (constant,))  # a tuple: keys of a dictionary
    return strings


_UNUSUAL_KINDS = {
    "KEYWORD_ONLY": "by keyword",
    "VAR_POSITIONAL": "*",
    "VAR_KEYWORD": "**",
    "POSITIONAL_ONLY": "by position",
}


def parameters_of(function: Any) -> dict[str, str]:
    """
    Parameter of a function, without `self` → its kind, if it is not passed by position or keyword, and its default, if
    it has one, such as `"by keyword = None"`.
    """
    parameters = {}
    for name, parameter in inspect.signature(function).parameters.items():
        has_default = parameter.default is not parameter.empty
        default = f"= {_short_repr(parameter.default)}" if has_default else ""
        parameters[name] = f"{_UNUSUAL_KINDS.get(parameter.kind.name, '')} {default}".strip()
    parameters.pop("self", None)
    return parameters


def _short_repr(default: Any) -> str:
    return re.sub(r" at 0x\w+", "", repr(default))[:80]


def _nearest(now: dict[str, str], tested: list[dict[str, str]]) -> dict[str, str]:
    """
    Of the parameters that a function has in `tested` releases, those with which `now`, its installed ones, are
    compared: the same if there are any, otherwise those of the latest release. The function is new if none is tested.
    """
    return now if now in tested or not tested else tested[-1]


def _faults(need: Need, tested: list[dict[str, str]]) -> Iterator[str]:
    """
    Why a function cannot be called or overridden as the package does it: ends of sentences that begin with its path.
    `tested` are its parameters in tested releases.
    """
    function = resolve_name(need.path)
    if not callable(function):
        yield "is not a function"
        return
    # Of the trainers, the package overrides methods that begin with "_".
    if need.owner in _OVERRIDDEN_CLASSES and need.name.startswith("_") and not _is_called(need):
        yield "is called no more"  # so an override of it would change nothing
    now = parameters_of(function)
    before = _nearest(now, tested)
    for name in need.parameters or ():
        if name not in now and "**" not in now.values():
            yield f"has no parameter {name!r}"
        if now.get(name) == "by keyword" and before.get(name) == "":  # without a default, so passed by position
            yield f"takes {name!r} only by keyword"
    for name in now:
        if now[name] in ("", "by keyword") and name not in before:
            yield f"has a new parameter {name!r} without a default"
    # Of the parameters that the package passes, those that both releases have, in order
    common = [name for name in need.parameters or () if name in now and name in before]
    if [name for name in now if name in common] != [name for name in before if name in common]:
        yield f"has another order of its parameters, {', '.join(now)}"
    loaded = _names_read_by(function)
    for name in need.read:
        if loaded and name in now and name not in loaded:
            yield f"ignores its parameter {name!r}"


def _is_called(need: Need) -> bool:
    """
    Whether a method is named by any other method of its class than itself, which says that it is still called: an
    override of it has an effect.
    """
    owner = resolve_name(need.owner)
    own_code = [*_codes(getattr(owner, need.name))]
    return any(need.name in code.co_names for code in _codes_of_methods(owner) if code not in own_code)


def _names_read_by(function: Any) -> set[str]:
    """Names that a function reads, by the instructions of its code; empty if it is not written in Python."""
    loaded: set[str] = set()
    for code in _codes(function):
        for step in dis.get_instructions(code):
            if step.opname.startswith("LOAD"):  # of one name, or of several at once
                loaded.update(step.argval if isinstance(step.argval, tuple) else (step.argval,))
    return loaded


def _changed_parameters(need: Need, tested: list[dict[str, str]]) -> Iterator[str]:
    """Parameters of a function that differ from those of the nearest tested release, as sentences."""
    function = resolve_name(need.path)
    now = parameters_of(function) if callable(function) else {}
    before = _nearest(now, tested)
    for name in {**before, **now}:
        if name not in before:
            yield f"{need.path} has a new parameter {name!r} {now[name]}".rstrip()
        elif name not in now:
            yield f"{need.path} has no parameter {name!r} any more"
        elif before[name] != now[name]:
            yield f"{need.path}: {name!r} {before[name] or 'required'} → {now[name] or 'required'}"


def rollout_entries() -> set[str]:
    """
    Names of the entries that TRL puts into the rollout that it returns, as far as its source shows them: keys of a
    dictionary that it assigns to the returned name, and keys that it assigns in there. Empty without the source.
    """
    function = inspect.unwrap(resolve_name("trl.GRPOTrainer")._generate_and_score_completions)
    try:
        source = inspect.getsource(function)
    except OSError:
        return set()
    nodes = [*ast.walk(ast.parse(textwrap.dedent(source)))]
    returned = {ast.unparse(node.value) for node in nodes if isinstance(node, ast.Return) and node.value}
    keys: list[ast.expr | None] = []
    for node in nodes:
        if not isinstance(node, ast.Assign):
            continue
        target = node.targets[0]
        if ast.unparse(target) in returned:
            keys.extend(node.value.keys if isinstance(node.value, ast.Dict) else ())
        elif isinstance(target, ast.Subscript) and ast.unparse(target.value) in returned:
            keys.append(target.slice)
    return {str(key.value) for key in keys if isinstance(key, ast.Constant)}


def config_defaults() -> dict[str, str]:
    """Field of TRL's configuration → its default."""
    defaults = {}
    for field in dataclasses.fields(resolve_name("trl.GRPOConfig")):
        factory: Any = field.default_factory
        defaults[field.name] = _short_repr(field.default if factory is dataclasses.MISSING else factory())
    return defaults


_NO_SUCH_FIELD = "absent"  # in place of a default, where a tested release has no such field


def _changed_defaults(tested: Mapping[str, list[str]]) -> Iterator[str]:
    """Fields of `GRPOConfig` that are new, or whose default no tested release has, as sentences."""
    now = config_defaults()
    for name in {**tested, **now}:
        default = now.get(name, _NO_SUCH_FIELD)
        if name not in tested:
            yield f"trl.GRPOConfig has a new field {name!r} (default {default}), which opo_trl does not know"
        elif default not in tested[name]:
            yield f"trl.GRPOConfig: default of {name!r} {tested[name][-1]} → {default}"


def record_installed() -> None:
    """
    Add what the installed releases have to the record of tested releases, `contract.json`: parameters of functions,
    entries of a rollout, and defaults of fields.
    """
    empty: dict[str, Any] = {"releases": [], "parameters": {}, "entries": [], "defaults": {}}
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else empty
    for need in needs():
        if need.parameters is not None:
            tested = record["parameters"].setdefault(need.path, [])
            now = parameters_of(resolve_name(need.path))
            tested.extend([now] if now not in tested else [])
    record["entries"] = sorted({*record["entries"], *rollout_entries()})
    defaults = config_defaults()
    for name in {**record["defaults"], **defaults}:
        # The releases recorded so far have no field that is new now.
        tested = record["defaults"].setdefault(name, [_NO_SUCH_FIELD] if record["releases"] else [])
        default = defaults.get(name, _NO_SUCH_FIELD)
        tested.extend([default] if default not in tested else [])
    installed = ", ".join(f"{name} {version(name)}" for name in ("trl", "transformers", "accelerate"))
    if installed not in record["releases"]:
        record["releases"].append(installed)
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record_installed()
