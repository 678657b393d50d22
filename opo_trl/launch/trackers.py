"""Trackers that need a login or a server: they start before anything is written, so a failure costs nothing."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from transformers import Trainer
from transformers.integrations import integration_utils

from . import foreign


def log_in(names: Sequence[str]) -> None:
    """Log in to Weights & Biases before the model is loaded. No other login respects being offline."""
    if "wandb" in names and os.environ.get("WANDB_MODE", "online") == "online":
        with _blamed_on("wandb"):
            import wandb  # type: ignore[import-not-found, unused-ignore]

            wandb.login()


def begin(trainer: Trainer) -> None:
    """Let the trackers begin that connect to a service, as they otherwise do when training starts."""
    names = {kind: name for name, kind in integration_utils.INTEGRATION_TO_CALLBACK.items()}
    for callback in trainer.callback_handler.callbacks:
        # TensorBoard has no such state: it writes to the run's folder, which is not claimed yet.
        if type(callback) in names and getattr(callback, "_initialized", None) is False:
            what: Any = {"model": trainer.model, "processing_class": trainer.processing_class}
            with _blamed_on(names[type(callback)]):
                callback.on_train_begin(trainer.args, trainer.state, trainer.control, **what)


def _blamed_on(name: str) -> AbstractContextManager[None]:
    fix = "Log in to it, check its server, set it to offline, or set `report_to` to none."
    return foreign.library(f"report_to={name!r} cannot be used", fix)
