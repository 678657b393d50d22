"""The shape of a model whose weights are not here, which is all that the plan of a run needs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def shape(path: str, options: Mapping[str, Any]) -> Any | None:
    """
    A causal language model without values, of a folder that has its configuration and no weights; `None` for any other
    folder, or a name on the Hub. `options` are those of `from_pretrained` in training.
    """
    folder = Path(path)
    endings = ("*.safetensors", "*.bin", "adapter_config.json")
    weights = [file for ending in endings for file in folder.glob(ending)]
    if weights or not (folder / "config.json").is_file():
        return None
    # Options that change the configuration
    of_config = {name: options[name] for name in ("trust_remote_code", "attn_implementation") if name in options}
    config = AutoConfig.from_pretrained(path, **of_config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=of_config.get("trust_remote_code"))
    dtype = options.get("dtype") or "float32"  # TRL's default
    if dtype != "auto":
        model = model.to(getattr(torch, str(dtype)))
    model.hf_device_map = {"": "meta"}  # so that the trainer does not move it to a device
    return model
