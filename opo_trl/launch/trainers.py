"""The trainer of a run, by its method."""

from pathlib import Path
from typing import Any

from transformers.trainer_callback import PrinterCallback, ProgressCallback
from trl import ModelConfig, get_peft_config, get_quantization_config

from .. import methods
from ..arguments import OPOScriptArguments
from ..config import RolloutConfig
from ..data.arithmetic import base_model_path
from ..rollout.trainer import RolloutTrainer
from .callbacks import LogFile, ProgressBar, Validation
from .data import Data


EMBEDDED_MODEL = "arithmetic"  # name of the embedded base model in a recipe


def model_path(model_config: ModelConfig) -> str:
    """Hub id or folder of the model; for the embedded one, its folder in the installed package."""
    name = str(model_config.model_name_or_path)
    return base_model_path() if name == EMBEDDED_MODEL else name


def make_trainer(
    script: OPOScriptArguments, args: RolloutConfig, model_config: ModelConfig, data: Data, reward_funcs: list
) -> RolloutTrainer:
    """Build the trainer of a run, with its log file, progress bar and validation."""
    folder = Path(args.output_dir)
    options: Any = args.model_init_kwargs or {}  # a dict, once parsed
    args.model_init_kwargs = {
        "revision": model_config.model_revision,
        "attn_implementation": model_config.attn_implementation,
        "dtype": model_config.dtype,
        "use_safetensors": True,  # pickled weights could run code
        **options,
    }
    trainer = methods.by_trainer()[script.trainer].trainer_class(
        model=model_path(model_config),
        reward_funcs=reward_funcs,
        args=args,
        train_dataset=data.training,
        callbacks=[LogFile(folder)],
        quantization_config=get_quantization_config(model_config),
        peft_config=get_peft_config(model_config),
    )
    if data.validation is not None:
        steps, decoding = script.validation_steps, script.validation_decoding
        trainer.add_callback(Validation(trainer, data.validation, steps=steps, decoding=decoding, folder=folder))
    for default in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(default)
    if not args.disable_tqdm:
        trainer.add_callback(ProgressBar())
    return trainer
