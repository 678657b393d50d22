"""Check that the packages which fields of a recipe need are installed, before anything is loaded or written."""

from typing import Any

from transformers import Trainer
from transformers.integrations import get_available_reporting_integrations
from transformers.utils import is_bitsandbytes_available, is_liger_kernel_available, is_peft_available
from trl import ModelConfig
from trl.import_utils import is_vllm_available


# Trackers of Transformers that need a package of their own.
_TRACKERS = (
    *("azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "mlflow", "neptune", "swanlab"),
    *("tensorboard", "trackio", "wandb"),
)


def check_packages(args: Any, model_config: ModelConfig) -> None:
    """
    Check the packages of a run's fields. Libraries would miss some of them when the run has already begun.

    Raises:
        `ImportError`: names the field and how to install the package.
    """
    quantized = {name: getattr(model_config, name) for name in ("load_in_4bit", "load_in_8bit")}
    # Field → its value, whether the package that it needs is installed, and what pip calls it
    needed = {
        "use_liger_kernel": (args.use_liger_kernel, is_liger_kernel_available, "liger-kernel"),
        "use_vllm": (getattr(args, "use_vllm", False), is_vllm_available, "opo_trl[vllm]"),
        "use_peft": (model_config.use_peft, is_peft_available, "opo_trl[peft]"),
        **{name: (value, is_bitsandbytes_available, "opo_trl[quantization]") for name, value in quantized.items()},
    }
    for name, (value, is_available, package) in needed.items():
        if value and not is_available():
            raise ImportError(f"{name}=True needs a package that is not installed: `pip install '{package}'`.")
    absent = {*args.report_to} & {*_TRACKERS} - {*get_available_reporting_integrations()}
    if absent:
        raise ImportError(
            f"report_to={args.report_to!r} needs a package that is not installed, or not set up: "
            f"{', '.join(sorted(absent))}. Install it, or set `report_to` to 'none'."
        )
    try:
        Trainer.get_optimizer_cls_and_kwargs(args)
    except (ImportError, ValueError) as error:
        if "install" in str(error):  # Other errors are about the model, which is not loaded yet.
            raise ImportError(f"optim={args.optim.value!r}: {error}") from error
