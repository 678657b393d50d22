"""The trainers that a recipe can name, and what reports call the methods that they train with."""

import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


DEFAULT = "opo"  # the `trainer` of a recipe that names none
BASELINE = "grpo"  # of a comparison, by default


@dataclass(frozen=True)
class TrainerOfRecipes:
    """Dotted paths of a trainer and its configuration, imported on use: importing TRL takes seconds."""

    name: str
    trainer: str
    config: str
    page: str

    @property
    def trainer_class(self) -> Any:
        """The trainer."""
        return _imported(self.trainer)

    @property
    def config_class(self) -> Any:
        """Its configuration."""
        return _imported(self.config)


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are importing from 'trl.experimental'")  # our pages say so
        return getattr(import_module(module), name)


_ASYNC = ("opo_trl.launch.async_recipe.AsyncRecipeTrainer", "opo_trl.launch.async_recipe.AsyncRecipeConfig")
_TRAINERS = (
    TrainerOfRecipes("opo", "opo_trl.trainer.OPOTrainer", "opo_trl.config.OPOConfig", "docs/methods/opo.md"),
    TrainerOfRecipes("async_opo", *_ASYNC, "docs/async.md"),
)


def by_trainer() -> dict[str, TrainerOfRecipes]:
    """The trainers that a recipe can name in `trainer`, by name."""
    return {trainer.name: trainer for trainer in _TRAINERS}


def config_classes() -> list[Any]:
    """The configurations of these trainers that fit the installed TRL; asynchronous training is experimental there."""
    found = []
    for trainer in by_trainer().values():
        with suppress(ImportError):
            found.append(trainer.config_class)
    return found


@dataclass(frozen=True)
class Method:
    """A method in reports: its label, the colour of its curves, and the settings that tell its runs from others."""

    name: str
    label: str
    color: str
    settings: Mapping[str, Any] = field(default_factory=dict)


_PUBLISHED: dict[str, Any] = {"objective": "topr", "positive_bounds": [1, 1], "negative_bounds": [0, 1]}
_TRUNCATED: dict[str, Any] = {**_PUBLISHED, "push": "reward", "positive_bounds": [0, 2], "negative_bounds": [0, 2]}

_GSPO = {"objective": "grpo", "importance_sampling_level": "sequence"}

# Colours of Okabe and Ito, which people with colour blindness can tell apart, and for GSPO a darker one.
METHODS = (
    Method("async_opo", "Asynchronous OPO", "#009e73", {"trainer": "async_opo", "objective": "opo"}),
    Method("opo", "OPO", "#d55e00", {"trainer": "opo", "objective": "opo"}),
    Method("truncated_reinforce", "Truncated REINFORCE", "#e69f00", {"trainer": "opo", **_TRUNCATED}),
    Method("topr", "TOPR", "#f0e442", {"trainer": "opo", **_PUBLISHED}),
    Method("gspo", "GSPO", "#b03a86", {"trainer": "opo", "objective": "gspo"}),
    Method("gspo", "GSPO", "#b03a86", {"trainer": "opo", **_GSPO}),
    Method("grpo", "GRPO", "#0072b2", {"trainer": "opo", "objective": "grpo"}),
    Method("dapo", "DAPO", "#56b4e9", {"trainer": "opo", "objective": "dapo", "mask_truncated_completions": True}),
)


def method_of(settings: Mapping[str, Any]) -> Method | None:
    """The method of a run, by its settings; `None` if they match no method."""
    settings = {"objective": "opo", **settings}  # which runs of earlier releases do not name
    if settings.get("trainer") == "grpo":  # of an earlier release
        settings |= {"trainer": "opo", "objective": settings.get("loss_type")}
    for method in METHODS:
        if all(settings.get(name) == value for name, value in method.settings.items()):
            return method
    return None
