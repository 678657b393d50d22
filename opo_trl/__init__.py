"""Orthogonalized Policy Optimization (OPO) for Hugging Face TRL."""

from importlib import import_module
from typing import TYPE_CHECKING


__version__ = "0.2.0"

__all__ = ["OPOConfig", "OPOTrainer"]

# What a message says of asynchronous training, after the name that somebody has asked for.
WAITS_FOR_A_PORT = (
    "waits for a port to later releases of TRL: commit 6495d6c5ac08 of opo_trl has it, for TRL 1.16; meanwhile, TRL "
    "has an AsyncGRPOTrainer of its own (docs/async.md)."
)

if TYPE_CHECKING:
    from .config import OPOConfig
    from .trainer import OPOTrainer


def __getattr__(name: str):
    # Importing TRL takes seconds; `opo_trl.objective` and the command line's help need none of it.
    modules = {"OPOConfig": ".config", "OPOTrainer": ".trainer"}
    if name in ("AsyncOPOConfig", "AsyncOPOTrainer"):
        raise ImportError(f"{name} {WAITS_FOR_A_PORT}")
    if name in modules:
        return getattr(import_module(modules[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
