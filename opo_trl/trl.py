"""
What the package needs of TRL itself: a tested release, and TRL's own classes. `tests/test_trl.py` has the names.

Importing this module checks both, so modules that import private names import it first.
"""

import inspect
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from packaging.specifiers import SpecifierSet


TESTED = {"trl": SpecifierSet(">=1.16,<1.17"), "transformers": SpecifierSet(">=5.17,<5.25")}

# Entries of a rollout that the model's forward pass takes besides the tokens: images and the like.
MULTIMODAL_KEYS = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)


def check() -> None:
    """
    Check the versions of TRL and Transformers, and that nothing has replaced their classes. Private methods that the
    trainers override change between releases; another release would train something else, or fail hours into a run.

    Raises:
        `ImportError`: a version is outside the tested range, which `OPO_TRL_UNTESTED=1` turns into a warning; or as
            [`check_replaced`].
    """
    for name, tested in TESTED.items():
        installed = version(name)
        if tested.contains(installed, prereleases=True):
            continue
        said = f"opo_trl is tested with {name} {tested}, not with the installed {installed}."
        if os.environ.get("OPO_TRL_UNTESTED") != "1":
            raise ImportError(f"{said} `pip install '{name}{tested}'` installs a tested release.")
        warnings.warn(f"{said} It may train something else. docs/compatibility.md: what to run first.", stacklevel=2)
    check_replaced()


def check_replaced() -> None:
    """
    Check that TRL's and Transformers' trainers are their own. Unsloth puts classes made of rewritten source in their
    place when it is imported, which may be after our import: so a trainer checks again when it is made.

    Raises:
        `ImportError`: names the class, and what is in its place.
    """
    from transformers import Trainer
    from trl import GRPOTrainer

    for path, owner in (("trl.GRPOTrainer", GRPOTrainer), ("transformers.Trainer", Trainer)):
        # One of ours may stand there: that is how TRL's own scripts train with OPO.
        own = (path.partition(".")[0], __package__)
        if inspect.isclass(owner) and owner.__module__.partition(".")[0] not in own:
            raise ImportError(
                f"{path} has been replaced by {owner.__module__}.{owner.__qualname__}, as Unsloth does when it is "
                "imported. Its methods are rewritten, so OPO would train something else. Train in a process that does "
                "not import that package: see docs/migrating.md for alternatives."
            )


@contextmanager
def temporarily(holder: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object, and restore them afterwards."""
    attributes = vars(holder)
    own = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            attributes.pop(name, None)
        attributes.update(own)


check()
