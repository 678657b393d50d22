"""What the package needs of TRL itself: a tested release, and TRL's own classes. `tests/test_trl.py` has the names."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import trl
from packaging.specifiers import SpecifierSet
from transformers import Trainer


TESTED_VERSIONS = SpecifierSet(">=1.16,<1.17")

# Entries of a rollout that the model's forward pass takes besides the tokens: images and the like.
MULTIMODAL_KEYS = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)


def check() -> None:
    """
    Check the version of TRL, and that nothing has replaced its classes. Private methods that the trainers override
    change between releases; another release would train something else, or fail hours into a run.

    Raises:
        `ImportError`: the version is outside the tested range; or as [`check_replaced`].
    """
    check_replaced()
    if not TESTED_VERSIONS.contains(trl.__version__, prereleases=True):
        raise ImportError(
            f"opo_trl is tested with TRL {TESTED_VERSIONS}, not with the installed {trl.__version__}. Install it with "
            f"`pip install 'trl{TESTED_VERSIONS}'`."
        )


def check_replaced() -> None:
    """
    Check that TRL's and Transformers' trainers are their own. Unsloth puts classes made of rewritten source in their
    place when it is imported, which may be after our import: so a trainer checks again when it is made and trains.

    Raises:
        `ImportError`: names the class, and what is in its place.
    """
    for path, owner in (("trl.GRPOTrainer", trl.GRPOTrainer), ("transformers.Trainer", Trainer)):
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
