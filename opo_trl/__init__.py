"""Orthogonalized Policy Optimization (OPO) for Hugging Face TRL."""

from importlib import import_module
from typing import TYPE_CHECKING


__version__ = "0.2.0"

__all__ = ["AsyncOPOConfig", "AsyncOPOTrainer", "OPOConfig", "OPOTrainer"]

if TYPE_CHECKING:
    from .asynchronous.config import AsyncOPOConfig
    from .asynchronous.trainer import AsyncOPOTrainer
    from .config import OPOConfig
    from .trainer import OPOTrainer


def __getattr__(name: str):
    # Importing TRL takes seconds; `opo_trl.objective` and the command line's help need none of it.
    modules = {
        "AsyncOPOConfig": ".asynchronous.config",
        "AsyncOPOTrainer": ".asynchronous.trainer",
        "OPOConfig": ".config",
        "OPOTrainer": ".trainer",
    }
    if name in ("RolloutConfig", "RolloutTrainer"):
        raise ImportError(f"{name} is gone: use OPO{name[7:]} with `objective`, such as objective='grpo'.")
    if name in modules:
        return getattr(import_module(modules[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
