"""
The methods that `opo-trl` trains with or reports on, a line for each.

To add a method, write its [`Objective`], or its trainer and configuration, and add a line to [`METHODS`]. Recipes then
accept `trainer: its_name` with the fields of its configuration, and reports use its label and colour. A script
outside this package calls [`register`] instead, and then `opo_trl.train.main`; `opo-trl train` starts processes that
do not know it.
"""

import functools
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


DEFAULT = "opo"  # the `trainer` of a recipe that names none
BASELINE = "grpo"  # of a comparison, by default


@dataclass(frozen=True)
class Method:
    """
    A method.

    Args:
        name (`str`), label (`str`), color (`str`):
            What recipes call it, `trainer: name`, and what reports do; the colour of its curves, as `"#rrggbb"`.
        trainer (`str`), config (`str`):
            Dotted paths of its trainer, a subclass of [`RolloutTrainer`], and of its configuration, a subclass of
            [`RolloutConfig`]; OPO's by default, [`ASYNC`] in asynchronous training. They are imported on use, since
            importing TRL takes seconds.
        page (`str`, *optional*):
            Path of its documentation page in the repository.
        settings (`Mapping[str, Any]`, *optional*):
            Settings that distinguish its runs from those of other methods with the same trainer. If they contain a
            `trainer`, its recipes name that trainer: GSPO is `trainer: grpo` with other fields.
        objective (`str`, *optional*):
            Dotted path of the [`Objective`] that its trainer takes in place of its own.
    """

    name: str
    label: str
    color: str
    trainer: str = "opo_trl.trainer.OPOTrainer"
    config: str = "opo_trl.config.OPOConfig"
    page: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    objective: str = ""

    @property
    def trainer_class(self) -> Any:
        """Its trainer."""
        if not self.objective:
            return _imported(self.trainer)
        return _with_objective(self.trainer, self.config, self.objective, self.label)

    @property
    def config_class(self) -> Any:
        """The configuration of its trainer."""
        return _imported(self.config)


@functools.cache
def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are importing from 'trl.experimental'")  # our pages say so
        return getattr(import_module(module), name)


@functools.cache
def _with_objective(trainer: str, config: str, objective: str, label: str) -> Any:
    parent = _imported(trainer)
    own = {"objective_class": _imported(objective), "_name": label, "_paper": {}, "__module__": parent.__module__}
    if issubclass(_imported(config), parent.config_class):
        own["config_class"] = _imported(config)
    return type(parent.__name__, (parent,), own)


_TRL = ("opo_trl.rollout.trainer.RolloutTrainer", "opo_trl.config.RolloutConfig")  # with TRL's losses

ASYNC = ("opo_trl.launch.async_recipe.AsyncRecipeTrainer", "opo_trl.launch.async_recipe.AsyncRecipeConfig")

_GRPO = {"loss_type": "grpo", "importance_sampling_level": "token"}
_GSPO = {"trainer": "grpo", "loss_type": "grpo", "importance_sampling_level": "sequence"}
_TOPR = {"trainer": "opo", "objective": "topr"}
_PUBLISHED: dict[str, Any] = {**_TOPR, "positive_bounds": [1, 1], "negative_bounds": [0, 1]}
_TRUNCATED: dict[str, Any] = {**_TOPR, "push": "reward", "positive_bounds": [0, 2], "negative_bounds": [0, 2]}
# TRL's default loss is DAPO's, but a run with the rest of TRL's defaults is none of these methods.
_DAPO = {"trainer": "grpo", "loss_type": "dapo", "mask_truncated_completions": True}

# Colours of Okabe and Ito, which people with colour blindness can tell apart, and for GSPO a darker one.
METHODS = [
    Method("truncated_reinforce", "Truncated REINFORCE", "#e69f00", page="docs/reuse.md", settings=_TRUNCATED),
    Method("topr", "TOPR", "#f0e442", page="docs/reuse.md", settings=_PUBLISHED),
    Method("opo", "OPO", "#d55e00", page="docs/methods/opo.md"),
    Method("grpo", "GRPO", "#0072b2", *_TRL, "docs/methods/baselines.md", _GRPO),
    Method("gspo", "GSPO", "#b03a86", *_TRL, "docs/methods/baselines.md", _GSPO),
    Method("dapo", "DAPO", "#56b4e9", *_TRL, "docs/methods/baselines.md", _DAPO),
    Method("async_opo", "Asynchronous OPO", "#009e73", *ASYNC, "docs/async.md"),
]


def register(method: Method) -> None:
    """Add a method to [`METHODS`], replacing one of the same name."""
    METHODS[:] = [*(other for other in METHODS if other.name != method.name), method]


def by_trainer() -> dict[str, Method]:
    """The methods that a recipe can name in `trainer`, by name."""
    return {method.name: method for method in METHODS if "trainer" not in method.settings}


def config_classes() -> list[Any]:
    """Configurations of the methods that fit the installed TRL; one that rests on an experimental module may not."""
    found = []
    for method in METHODS:
        with suppress(ImportError):
            found.append(method.config_class)
    return found


def method_of(settings: Mapping[str, Any]) -> Method | None:
    """The method of a run, by its settings; `None` if they match no method."""
    settings = {"objective": "opo", **settings}  # which runs of earlier releases do not name
    for method in METHODS:
        own = {"trainer": method.name, **method.settings}
        if method.trainer != _TRL[0] and not method.objective:
            own = {"objective": "opo", **own}
        if all(settings.get(name) == value for name, value in own.items()):
            return method
    return None
