"""Dry run of the model and its adapters: both are constructed without weights, on PyTorch's `meta` device."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.integrations.accelerate import check_and_set_device_map
from trl import GRPOConfig, ModelConfig, get_peft_config

from .blame import blamed, given
from .ranges import reject
from .weights import unloaded, without_quantization


# Options of `from_pretrained` that act on weights: where they are, how they are packed, and where each goes.
_OF_WEIGHTS = {
    *("device_map", "device_mesh", "distributed_config", "gguf_file", "max_memory", "quantization_config"),
    *("state_dict", "tp_plan", "tp_size"),
}


def dry_run_model(args: GRPOConfig, model_config: ModelConfig, path: str) -> None:
    """Construct a model, a folder or an id on the Hub, without its weights, and the adapters on it."""
    options: Any = args.model_init_kwargs or {}
    named = given(model_config) | ({"model_init_kwargs": options} if options else {})

    def of(*beginnings: str) -> dict[str, Any]:
        return {name: value for name, value in named.items() if name.startswith(beginnings)}

    with blamed(of("dtype", "model_revision", "attn_implementation", "model_init_kwargs")):
        model = _empty_model(args, model_config, path, options)
    if model is None:
        return
    coefficient = args.router_aux_loss_coef
    if coefficient and not hasattr(model.config.get_text_config(), "output_router_logits"):
        raise ValueError(f"router_aux_loss_coef={coefficient} has no effect: the model has no experts. Remove it.")
    with blamed(of("lora_", "use_dora", "use_rslora")):
        _check_adapters(model, model_config)


def _empty_model(args: Any, model_config: ModelConfig, path: str, options: Mapping[str, Any]) -> Any:
    """The model without weights; `None` if its class is not part of Transformers."""
    if "torch_dtype" in options:
        reject("model_init_kwargs", options, "torch_dtype", "is overridden by `dtype`", "Set `dtype` instead")
    _check_device_map(options.get("device_map"))
    for key, value in options.items():
        if "drop" in key and isinstance(value, int | float) and not 0 <= value <= 1:
            reject("model_init_kwargs", options, key, "is not a probability", "Set it to a number in [0, 1]")
    rest = {key: value for key, value in options.items() if key not in _OF_WEIGHTS}
    dtype = rest.pop("dtype", model_config.dtype)
    of_fields = {
        "revision": model_config.model_revision,
        "attn_implementation": model_config.attn_implementation,
        "trust_remote_code": args.trust_remote_code,
    }
    config, rest = AutoConfig.from_pretrained(path, return_unused_kwargs=True, **of_fields | rest)
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    if kind is None:
        return None
    without_quantization(config)
    dtype = "float32" if dtype in (None, "auto") else dtype  # there is no weight to tell it
    with unloaded():
        return kind.from_pretrained(None, config=config, state_dict={}, device_map="meta", dtype=dtype, **rest)


def _check_device_map(device_map: Any) -> None:
    places = check_and_set_device_map(device_map)
    here = torch.accelerator.current_accelerator()
    for place in places.values() if isinstance(places, Mapping) else ():
        device = torch.device("cpu" if place == "disk" else place)
        number = torch.accelerator.device_count() if here is not None and device.type == here.type else 0
        if device.type not in ("cpu", "meta") and (device.index or 0) >= number:
            raise ValueError(f"There is no device {str(place)!r} on this machine.")


def _check_adapters(model: Any, model_config: ModelConfig) -> None:
    peft_config: Any = get_peft_config(model_config)
    if peft_config is None:
        return
    import peft

    _check_targets(model, model_config)
    model = peft.get_peft_model(model, peft_config)
    if isinstance(model.get_output_embeddings(), peft.tuners.tuners_utils.BaseTunerLayer):
        said = f"lora_target_modules={model_config.lora_target_modules!r} adapts the LM head, which TRL does not train"
        raise ValueError(f"{said}. Remove the head from `lora_target_modules`.")


def _check_targets(model: Any, model_config: ModelConfig) -> None:
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    linear = {path.rpartition(".")[2] for path, module in modules.items() if isinstance(module, torch.nn.Linear)}
    for name in ("lora_target_modules", "lora_modules_to_save", "lora_target_parameters"):
        wanted, parts = getattr(model_config, name), parameters if name == "lora_target_parameters" else modules
        names = wanted if isinstance(wanted, list) else []  # a string is a pattern or "all-linear"
        absent = [part for part in names if not any(path == part or path.endswith(f".{part}") for path in parts)]
        said = (
            f"{name}={wanted!r}: {', '.join(map(repr, absent))} matches nothing in the model, whose linear layers are "
            f"{', '.join(sorted(linear))}. Set `{name}` to names in the model."
        )
        if absent and len(absent) == len(names):
            raise ValueError(said)
        if absent:
            warnings.warn(said, stacklevel=2)  # the list may serve several architectures
    target = model_config.lora_target_modules
    if isinstance(target, str) and any(path.endswith(f".{target}") for path in modules):
        raise ValueError(
            f"lora_target_modules={target!r}: PEFT reads a single entry as a pattern for full paths, and no path "
            f"matches {target!r}. Set `lora_target_modules` to ['.*{target}']."
        )
