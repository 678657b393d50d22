"""Checks of a model's weights: its files hold every tensor of the model, and training moves one of them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import patch_environment
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.integrations import deepspeed
from transformers.utils import find_adapter_config_file, is_peft_available, logging
from trl.trainer.utils import get_config_model_id

from ..patching import temporarily
from . import files


# Options of `from_pretrained` that say where the files are and how their tensors are called.
_OPTIONS_OF_PLACE = ("revision", "cache_dir", "token", "subfolder", "local_files_only")
_OPTIONS_OF_FILES = (*_OPTIONS_OF_PLACE, "variant", "use_safetensors", "trust_remote_code", "key_mapping")


def base_of(field: str, path: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """
    The base model that an adapter's folder, or its repository on the Hub, names, and the options of `from_pretrained`
    to load it with; `None` for a complete model. `field` names the adapter, `options` are its own.

    Raises:
        `ImportError`: PEFT is not installed.
        `ValueError`: no base is named, or its folder is not there; or a complete model is there as well.
    """
    try:
        file = find_adapter_config_file(path, **{name: options[name] for name in _OPTIONS_OF_PLACE if name in options})
    except OSError:  # `from_pretrained` says what is wrong with the name.
        return None
    if file is None:
        return None
    if not is_peft_available():
        raise ImportError(
            f"{field}={path!r} is an adapter, which needs a package that is not installed: "
            "`pip install 'opo_trl[peft]'`."
        )
    folder = Path(file).parent
    model_files = [*folder.glob("model*.safetensors"), *folder.glob("pytorch_model*.bin")]
    if model_files:
        raise ValueError(
            f"{field}={path!r} is an adapter and a complete model in one folder. "
            "Move the files of one of them to another folder."
        )
    config = files.read_json(Path(file))
    base = config.get("base_model_name_or_path")
    is_path = base and base.startswith((".", "/", "~"))  # the Hub has no such names
    if not base or (is_path and not Path(base).is_dir()):
        raise ValueError(
            f"{field}={path!r} is an adapter of base_model_name_or_path={base!r}, which does not exist. "
            "Set it in its adapter_config.json to the base model's folder or name."
        )
    # The base has a revision of its own, and lies in no subfolder of the adapter's.
    others = {name: value for name, value in options.items() if name not in ("revision", "subfolder")}
    return base, others | {"revision": config.get("revision")}


def check_weights(field: str, path: str, options: Mapping[str, Any], *, scores: bool = False) -> None:
    """
    Check that a model's files hold every tensor of the model: Transformers initializes another at random, and goes on.

    The files are loaded onto the `meta` device, which reads their headers only. Quantized ones are not checked. Of an
    adapter, its base is checked. `field` names the model, `options` are those of `from_pretrained` in training; a
    reward model `scores`.

    Raises:
        `ValueError`: a tensor is missing, or the attention is code from the Hub that only the configuration names; or
            a reward model is an adapter.
    """
    if base := base_of(field, path, options):
        if scores:
            raise ValueError(
                f"{field}={path!r} is an adapter, which cannot score. "
                "Merge it into its base (`merge_and_unload`), and name the folder of the merged model."
            )
        path, options = base
    labels = {"num_labels": 1} if scores else {}  # as TRL loads a reward model
    config, _ = AutoConfig.from_pretrained(path, return_unused_kwargs=True, **{**options, **labels})
    # The model and, if it has them, its parts, such as that for images
    parts = [config, *(getattr(config, name) for name in config.sub_configs)]
    for part in parts:
        attention = str(getattr(part, "_attn_implementation", None))
        if "/" in attention and "attn_implementation" not in options:  # Transformers would download it, and run it
            raise ValueError(
                f"{field}={path!r}: its config.json asks for code from the Hub, attn_implementation={attention!r}. "
                "Set `attn_implementation` to one that you trust, such as 'sdpa'."
            )
    if "gguf_file" in options or getattr(config, "quantization_config", None) is not None:
        return
    if scores:
        model_class: Any = AutoModelForSequenceClassification
    else:
        architecture = config.architectures[0] if config.architectures else ""
        model_class = getattr(transformers, architecture, AutoModelForCausalLM)
    # Without Transformers' progress bars; those of downloads remain.
    with unsharded(), temporarily(logging, _tqdm_active=False):
        model, info = model_class.from_pretrained(
            path,
            config=config,
            device_map="meta",
            attn_implementation="eager",
            output_loading_info=True,
            **{name: options[name] for name in _OPTIONS_OF_FILES if name in options},
        )
    parameters = dict(model.named_parameters())
    missing = sorted(info["missing_keys"] & parameters.keys())
    if missing:
        raise ValueError(
            f"{field}={path!r}: its files lack {', '.join(missing[:3])}, of {len(missing)} tensors, which "
            "Transformers would initialize at random. Restore the files."
        )


def check_models(model: Any, rewards: Sequence[Any], args: Any, *, quantized: bool) -> None:
    """
    [`check_weights`] of every model that a trainer, with these arguments, loads by its name; and whether TRL can use
    the policy as they ask. `quantized`: whether its weights are packed.
    """
    if args.use_vllm and quantized:
        raise ValueError(
            "use_vllm=True cannot be combined with a quantized base model: TRL sends vLLM the packed weights, which "
            "it rejects (huggingface/trl#4973)."
        )
    options = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    if isinstance(model, str):
        check_weights("model", model, options)
    adapters = getattr(model, "peft_config", ())
    if adapters and args.beta and (model.active_adapter != "default" or "ref" in adapters):
        raise ValueError(
            f"beta={args.beta}: TRL copies the adapter 'default' to 'ref'; {model.active_adapter!r} is trained. "
            "Load one without `adapter_name`, and none called 'ref'; or set `beta` to 0."
        )
    for reward in rewards:
        if isinstance(reward, str):
            check_weights("reward_funcs", reward, options, scores=True)


def check_trainable(model: Any, optimizer: Any) -> None:
    """
    Check that a weight of a model can be trained, and that an optimizer of the user's holds one of these; `None`: the
    trainer makes it. A `ValueError` otherwise.
    """
    trainable = {id(weight) for weight in model.parameters() if weight.requires_grad}
    if not trainable:
        raise ValueError(
            f"model={get_config_model_id(model.config)!r} would not be trained: no weight requires a gradient. "
            "Load an adapter with `is_trainable=True`, or call `model.requires_grad_(True)`."
        )
    if optimizer is None or isinstance(optimizer, AcceleratedOptimizer):  # that of an earlier call of `train`
        return
    for group in optimizer.param_groups:
        if not trainable.isdisjoint(map(id, group["params"])):
            return
    raise ValueError(
        "`optimizers` would not train the model: it holds none of its trained weights. "
        "Make it after the model's adapter, or let `args` name it."
    )


@contextmanager
def unsharded() -> Iterator[None]:
    """
    Within this context, models are loaded as a whole on every process. Otherwise Transformers would shard them under
    ZeRO-3, and have one process read them under FSDP.
    """
    zero3 = temporarily(deepspeed, _hf_deepspeed_config_weak_ref=None)
    with zero3, patch_environment(FSDP_CPU_RAM_EFFICIENT_LOADING="false"):
        yield
