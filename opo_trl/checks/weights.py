"""Checks of a model's weights: its files hold every tensor of the model, in its shape, and none is NaN or infinite."""

import logging
import os
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.integrations import deepspeed
from transformers.utils.logging import set_tqdm_hook
from trl.trainer.utils import get_config_model_id


# Options of `from_pretrained` that say where the files are and how their tensors are called.
_SOURCE = (
    *("revision", "cache_dir", "token", "subfolder", "variant", "local_files_only", "use_safetensors"),
    *("trust_remote_code", "key_mapping"),
)
_RAM_EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"
_RESTORE = "Restore the files, or correct config.json."


def check_weights(field: str, path: str, options: Mapping[str, Any], *, scores: bool = False) -> Any:
    """
    Compare the tensors in a model's files with those that the model has, by name and shape.

    Transformers initializes a tensor that is not in the files at random, drops one that the model does not have, and
    goes on. Here it loads the files onto the `meta` device: it reads their headers only, and renames, merges and ties
    tensors as it will when training.

    Rejected are a missing tensor (unless it is tied, or the model's class can do without), one of another shape or of
    a layer that the configuration leaves out, and an attention from the Hub that only the configuration names.

    Args:
        field, path (`str`): field that names the model, and its folder or id on the Hub.
        options (`Mapping`): the options of `from_pretrained` that training uses, `model_init_kwargs`.
        scores (`bool`): whether it is a reward model. Another is of the class that its configuration names.

    Returns:
        The model on the `meta` device; `None` if its files cannot be compared.
    """
    if "gguf_file" in options:  # such a file describes itself
        return None
    labels = {"num_labels": 1} if scores else {}
    config, _ = AutoConfig.from_pretrained(path, return_unused_kwargs=True, **{**options, **labels})
    if "attn_implementation" not in options:
        _check_attention(field, path, config)
    kind: Any = getattr(transformers, (config.architectures or [""])[0], AutoModelForCausalLM)
    if scores:
        kind = AutoModelForSequenceClassification
    packed = without_quantization(config)
    source: Any = {name: options[name] for name in _SOURCE if name in options}
    how: Any = {"device_map": "meta", "ignore_mismatched_sizes": True, "output_loading_info": True}
    with unloaded() as report:
        try:
            model, info = kind.from_pretrained(path, config=config, attn_implementation="eager", **how, **source)
        except Exception as error:
            failed = re.findall(r"^(.+?) +\| \S*CONVERSION", report.getvalue(), re.MULTILINE)
            if not failed:
                said = f"{field}={path!r} has no weights that can be read: {str(error).rstrip('.')}"
                raise ValueError(f"{said}. {_fix(path)}") from error
            if packed:  # some cannot be unpacked without their data
                return None
            what = f"its files lack tensors that {kind.__name__} merges, or hold them in other shapes"
            raise ValueError(f"{field}={path!r}: {what}: {_named(failed)}. {_RESTORE}") from error
    parameters, known = dict(model.named_parameters()), {_of_any_layer(name) for name in model.state_dict()}
    unexpected = sorted(info["unexpected_keys"])
    # Packed weights have names of their own next to where the plain one would be.
    elsewhere = {name[: dot.start()] for name in unexpected for dot in re.finditer(r"\.", name)} if packed else set()
    missing = [
        name
        for name in info["missing_keys"] & parameters.keys()
        if name in elsewhere or name.rpartition(".")[0] not in elsewhere
    ]
    if missing:
        what = f"its files lack {_named(missing)}, which Transformers would initialize at random"
        raise ValueError(f"{field}={path!r}: {what}. {_RESTORE}")
    if info["mismatched_keys"] and not (packed or options.get("ignore_mismatched_sizes")):
        name, saved, wanted = min(info["mismatched_keys"])
        set_ = {name: options[name] for name in options.keys() & config.to_dict().keys() - {"dtype"}}
        raise ValueError(
            f"{field}={path!r}{f' with model_init_kwargs={set_!r}' if set_ else ''}: {name} has the shape "
            f"{tuple(saved)} in its files, but {tuple(wanted)} in the model. Correct "
            f"{'`model_init_kwargs`' if set_ else 'config.json'}."
        )
    dropped = [name for name in unexpected if _of_any_layer(name) in known]
    # Layers for predicting several tokens count on from the last one.
    may_drop = "num_hidden_layers" in options or getattr(config.get_text_config(), "num_nextn_predict_layers", None)
    if dropped and not may_drop:
        raise ValueError(
            f"{field}={path!r}: its configuration leaves out layers of its files, with {_named(dropped)}. Correct "
            "config.json, or set `model_init_kwargs: {num_hidden_layers: …}` to train without them."
        )
    return model


def check_models(model: Any, rewards: Sequence[Any], args: Any) -> None:
    """[`check_weights`] of every model that a trainer, with these arguments, loads by its name."""
    options = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    if isinstance(model, str):
        check_weights("model", model, options)
    elif getattr(args, "beta", 0) and is_peft_model(model):
        names, active = [*model.peft_config], model.active_adapter
        if active != "default" or "ref" in names:  # TRL copies "default" to "ref", whichever adapter is trained
            said = f"beta={args.beta} needs an adapter 'default' that is trained, and none called 'ref'"
            fix = "Load it without `adapter_name`, delete the other (`delete_adapter`), or set `beta` to 0"
            raise ValueError(f"{said}; the model has {', '.join(names)}, and trains {active}. {fix}.")
    for name in (reward for reward in rewards if isinstance(reward, str)):
        check_weights("reward_funcs", name, options, scores=True)


def check_finite(accelerator: Accelerator, *models: Any) -> None:
    """
    Check that no weight of the policy, the first model, or of reward models is NaN or infinite, on any process.

    Under ZeRO-3 each process checks its part. Weights in 8 bits or less and those on the disk are not checked.
    """
    for model in (model for model in models if isinstance(model, nn.Module)):
        weights = {name: getattr(weight, "ds_tensor", weight).detach() for name, weight in model.named_parameters()}
        found = torch.tensor([_is_broken(weight) for weight in weights.values()], dtype=torch.int32)
        found = cast(Tensor, accelerator.reduce(found.to(accelerator.device), "sum"))
        broken = [name for name, processes in zip(weights, found.tolist(), strict=True) if processes]
        if broken:
            field = "model" if model is models[0] else "reward_funcs"
            name = get_config_model_id(cast(Any, model).config)
            raise ValueError(f"{field}={name!r}: {_named(broken)} has NaN or infinite values. Use another checkpoint.")


def check_trainable(model: Any, optimizer: Any) -> None:
    """Check that training moves a weight of a model: one can be trained, by the user's `optimizer` if there is one."""
    trained = {id(weight) for weight in model.parameters() if weight.requires_grad}
    held = {id(weight) for group in getattr(optimizer, "param_groups", ()) for weight in group["params"]}
    if not trained:
        raise ValueError(
            f"model={get_config_model_id(model.config)!r} would not be trained: none of its weights requires a "
            "gradient. Load an adapter by `PeftModel.from_pretrained(…, is_trainable=True)`; after "
            "`merge_and_unload()` or `requires_grad_(False)`, call `model.requires_grad_(True)`."
        )
    if hasattr(getattr(model, "get_output_embeddings", lambda: None)(), "lora_A"):
        raise ValueError(
            "An adapter is on the LM head, which TRL does not train. Remove the head from `lora_target_modules`, or "
            "`target_modules`."
        )
    for adapter in getattr(model, "peft_config", {}).values():
        wanted = getattr(adapter, "target_modules", None)
        wanted = wanted if isinstance(wanted, list | set) else ()
        names = [f".{name}" for name in getattr(model, "targeted_module_names", ())]
        if names and (absent := sorted(name for name in wanted if not any(own.endswith(f".{name}") for own in names))):
            warnings.warn(f"target_modules: {', '.join(absent)} matches nothing in the model.", stacklevel=2)
    if optimizer is not None and trained.isdisjoint(held):
        raise ValueError(
            f"optimizers={(type(optimizer).__name__, '…')} would not train the model: the optimizer holds none of its "
            "weights that require a gradient. Make it of those of the model that is passed, after its adapter is "
            "added, or leave it out."
        )


def _fix(path: str) -> str:
    """What to do about files of weights that cannot be read, of which safetensors' own message names none."""
    files = [*Path(path).glob("*.safetensors")]
    for file in files:
        try:
            with safe_open(file, "pt"):
                pass
        except (OSError, SafetensorError):
            return f"{file.name} is truncated, or not a file. Restore it."
    if files or not any(Path(path).glob("pytorch_model*.bin")):
        return "Restore the files, or name a complete model."
    fix = "Convert them to safetensors, or set `model_init_kwargs: {use_safetensors: false}` if you trust them."
    return f"There are pickled weights, which could run code. {fix}"


def _is_broken(weight: Tensor) -> bool:
    if weight.is_meta or not weight.numel() or not weight.is_floating_point() or weight.element_size() == 1:
        return False
    return not all(extreme.isfinite() for extreme in weight.aminmax())  # takes no memory, unlike a mask of the weights


def _check_attention(field: str, path: str, config: Any) -> None:
    """Transformers downloads and runs an attention that has the form of a repository's name."""
    for part in _parts(config):
        attention = part._attn_implementation
        if attention is not None and "/" in attention:
            raise ValueError(
                f"{field}={path!r}: its config.json asks for code from the Hub, attn_implementation={attention!r}. "
                "Remove it there, or set `attn_implementation` to one that you trust, such as 'sdpa'."
            )


def without_quantization(config: Any) -> bool:
    """Remove a configuration's description of packed weights; whether there is one."""
    packed = [part for part in _parts(config) if getattr(part, "quantization_config", None) is not None]
    for part in packed:
        part.quantization_config = None
    return bool(packed)


def _parts(config: Any) -> Iterator[Any]:
    """A configuration, and those of the parts of a model."""
    yield config
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            yield from _parts(getattr(config, name))


def _named(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return f"{shown} and {len(names) - 3} more tensors" if len(names) > 3 else shown


def _of_any_layer(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


@contextmanager
def unsharded() -> Iterator[None]:
    """Load whole models on every process. Under ZeRO-3 Transformers shards them, under FSDP one process reads them."""
    zero3, efficient = deepspeed._hf_deepspeed_config_weak_ref, os.environ.pop(_RAM_EFFICIENT, None)
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = zero3
        if efficient is not None:
            os.environ[_RAM_EFFICIENT] = efficient


@contextmanager
def unloaded() -> Iterator[StringIO]:
    """
    Make a model on the `meta` device.

    What Transformers reports of its weights is collected, not shown: loading them for good shows it.
    """
    report, logger = StringIO(), logging.getLogger("transformers.modeling_utils")
    handler, propagate = logging.StreamHandler(report), logger.propagate
    hook = set_tqdm_hook(lambda factory, args, options: factory(*args, **{**options, "disable": True}))
    logger.addHandler(handler)
    logger.propagate = False
    try:
        with unsharded():
            yield report
    finally:
        logger.propagate = propagate
        logger.removeHandler(handler)
        set_tqdm_hook(hook)
