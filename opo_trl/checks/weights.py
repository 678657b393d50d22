"""Checks of a model's weights: its files hold every tensor of the model, and training moves one of them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import transformers
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import patch_environment
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.integrations import deepspeed
from transformers.utils import logging
from trl.trainer.utils import get_config_model_id

from ..trl import temporarily


# Options of `from_pretrained` that say where the files are and how their tensors are called.
_SOURCE = (
    *("revision", "cache_dir", "token", "subfolder", "variant", "local_files_only", "use_safetensors"),
    *("trust_remote_code", "key_mapping"),
)


def check_weights(field: str, path: str, options: Mapping[str, Any], *, scores: bool = False) -> None:
    """
    Check that a model's files hold every tensor of the model: Transformers initializes another at random, and goes on.

    The files are loaded onto the `meta` device, which reads their headers only. Quantized ones are not checked.
    `field` names the model, `options` are those of `from_pretrained` in training; a reward model `scores`.

    Raises:
        `ValueError`: a tensor is missing, or the attention is code from the Hub that only the configuration names.
    """
    labels = {"num_labels": 1} if scores else {}
    config, _ = AutoConfig.from_pretrained(path, return_unused_kwargs=True, **{**options, **labels})
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        attention = str(getattr(part, "_attn_implementation", None))
        if "/" in attention and "attn_implementation" not in options:  # Transformers would download it, and run it
            said = f"{field}={path!r}: its config.json asks for code from the Hub, attn_implementation={attention!r}"
            raise ValueError(f"{said}. Set `attn_implementation` to one that you trust, such as 'sdpa'.")
    if "gguf_file" in options or getattr(config, "quantization_config", None) is not None:
        return
    kind: Any = getattr(transformers, (config.architectures or [""])[0], AutoModelForCausalLM)
    kind = AutoModelForSequenceClassification if scores else kind
    source: Any = {name: options[name] for name in _SOURCE if name in options}
    how: Any = {"device_map": "meta", "attn_implementation": "eager", "output_loading_info": True}
    with unsharded(), temporarily(logging, _tqdm_active=False):  # bars of downloads remain
        model, info = kind.from_pretrained(path, config=config, **how, **source)
    if missing := sorted(info["missing_keys"] & dict(model.named_parameters()).keys()):
        said = f"{field}={path!r}: its files lack {', '.join(missing[:3])}, of {len(missing)} tensors"
        raise ValueError(f"{said}, which Transformers would initialize at random. Restore the files.")


def check_models(model: Any, rewards: Sequence[Any], args: Any) -> None:
    """[`check_weights`] of every model that a trainer, with these arguments, loads by its name."""
    options = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    if isinstance(model, str):
        check_weights("model", model, options)
    adapters = getattr(model, "peft_config", ())
    if adapters and getattr(args, "beta", 0) and (model.active_adapter != "default" or "ref" in adapters):
        said = f"beta={args.beta}: TRL copies the adapter 'default' to 'ref'; {model.active_adapter!r} is trained"
        raise ValueError(f"{said}. Load one without `adapter_name`, and none called 'ref'; or set `beta` to 0.")
    for name in (reward for reward in rewards if isinstance(reward, str)):
        check_weights("reward_funcs", name, options, scores=True)


def check_trainable(model: Any, optimizer: Any) -> None:
    """Check that a weight of a model can be trained, and that a user's optimizer does."""
    trained = {id(weight) for weight in model.parameters() if weight.requires_grad}
    if not trained:
        said = f"model={get_config_model_id(model.config)!r} would not be trained: no weight requires a gradient"
        raise ValueError(f"{said}. Load an adapter with `is_trainable=True`, or call `model.requires_grad_(True)`.")
    if optimizer is None or isinstance(optimizer, AcceleratedOptimizer):  # that of an earlier call of `train`
        return
    if trained.isdisjoint(id(weight) for group in optimizer.param_groups for weight in group["params"]):
        fix = "Make it after the model's adapter, or let `args` name it"
        raise ValueError(f"`optimizers` would not train the model: it holds none of its trained weights. {fix}.")


@contextmanager
def unsharded() -> Iterator[None]:
    """Load whole models on every process. Under ZeRO-3 Transformers shards them, under FSDP one process reads them."""
    zero3 = temporarily(deepspeed, _hf_deepspeed_config_weak_ref=None)
    with zero3, patch_environment(FSDP_CPU_RAM_EFFICIENT_LOADING="false"):
        yield
