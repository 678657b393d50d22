"""What the plan of a run needs, where its weights, its vLLM or its other processes are not here."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..config import OPOConfig
from ..models import adapter
from ..trainer import OPOTrainer


def lacks_weights(path: str) -> bool:
    """Whether a folder has the configuration of a model and no weights; no name on the Hub does."""
    folder = Path(path)
    endings = ("*.safetensors", "*.bin", "adapter_config.json")
    weights = [file for ending in endings for file in folder.glob(ending)]
    return (folder / "config.json").is_file() and not weights


class WeightlessTrainer(OPOTrainer):
    """
    A trainer that is only asked for its plan: the weights of its model, which is named, have shapes but no values, so
    that a folder with configuration and tokenizer is enough, and it makes no vLLM engine.
    """

    def __init__(self, model: str, *, args: OPOConfig, quantization_config: Any = None, **options: Any):
        options = {"processing_class": adapter.processor_of(model, args), **adapter.prepared(model, args, options)}
        options_of_model = {"trust_remote_code": args.trust_remote_code, **cast(dict, args.model_init_kwargs or {})}
        args.model_init_kwargs = None  # with a model that is made, they have no effect
        uses_vllm, args.use_vllm = args.use_vllm, False
        super().__init__(adapter.load(model, create=_shape, **options_of_model), args=args, **options)
        args.use_vllm = self.use_vllm = uses_vllm


def _shape(name: str, **options: Any) -> PreTrainedModel:
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
    # So that neither the trainer nor, for a copy of it as the reference, accelerate moves it to a device.
    model.hf_device_map = {"": "meta"}
    model._is_accelerate_prepared = True
    return model


def config_elsewhere(n_processes: int) -> type[OPOConfig]:
    """The configuration of a run with so many processes, in the first of them, when the others are not here."""

    class ConfigElsewhere(OPOConfig):
        @property
        def world_size(self) -> int:
            return n_processes

        @contextmanager
        def main_process_first(self, *_: Any, **__: Any) -> Iterator[None]:
            yield  # there is no other process to wait for

    return ConfigElsewhere
