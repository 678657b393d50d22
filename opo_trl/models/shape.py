"""The shape of a model whose weights are not here, which is all that the plan of a run needs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


def lacks_weights(path: str) -> bool:
    """Whether a folder has the configuration of a model and no weights; no name on the Hub does."""
    folder = Path(path)
    endings = ("*.safetensors", "*.bin", "adapter_config.json")
    weights = [file for ending in endings for file in folder.glob(ending)]
    return (folder / "config.json").is_file() and not weights


def shape(name: str, options: Mapping[str, Any]) -> PreTrainedModel:
    """
    A causal language model whose weights have no values, made of the configuration in a folder or on the Hub.
    `options` are those of `from_pretrained` in training.
    """
    of_config = ("revision", "trust_remote_code", "attn_implementation")
    config = AutoConfig.from_pretrained(name, **{key: options[key] for key in of_config if key in options})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=options.get("trust_remote_code"))
    dtype = options.get("dtype") or "float32"  # TRL's default
    if dtype != "auto":
        model = model.to(getattr(torch, str(dtype).removeprefix("torch.")))
    model.hf_device_map = {"": "meta"}  # so that the trainer does not move it to a device
    return model
