"""
Problems, the prompts made from them, and the embedded task.

To add a dataset: if it is on the Hub or in a file, map its `columns`; to embed it, see [`data.problems.EMBEDDED`].
"""

from importlib import import_module
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .files import load_from_hub
    from .problems import COLUMNS, load_problems, rename_columns
    from .prompts import INSTRUCTION, drop_long_prompts, to_prompts, tokenize_prompts, without_overlap

__all__ = [
    "COLUMNS",
    "INSTRUCTION",
    "drop_long_prompts",
    "load_from_hub",
    "load_problems",
    "rename_columns",
    "to_prompts",
    "tokenize_prompts",
    "without_overlap",
]

_ELSEWHERE = dict.fromkeys(("COLUMNS", "load_problems", "rename_columns"), ".problems") | {"load_from_hub": ".files"}


def __getattr__(name: str):
    # Reward workers import this package on the way to `arithmetic_reward`, which needs neither datasets nor
    # Transformers.
    if name in __all__:
        return getattr(import_module(_ELSEWHERE.get(name, ".prompts"), __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
