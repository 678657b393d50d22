"""
Problems, the prompts made from them, and the embedded tasks.

To add a dataset: if it is on the Hub or in a file, map its `columns`; to embed it, see [`data.problems.EMBEDDED`].
"""

from importlib import import_module
from typing import TYPE_CHECKING


__all__ = ["INSTRUCTION", "drop_long_prompts", "load_problems", "to_prompts", "tokenize_prompts", "without_overlap"]

if TYPE_CHECKING:
    from .problems import load_problems
    from .prompts import INSTRUCTION, drop_long_prompts, to_prompts, tokenize_prompts, without_overlap


def __getattr__(name: str):
    # Workers that score `gym_reward` or `arithmetic_reward` need neither datasets nor Transformers.
    if name in __all__:
        return getattr(import_module(".problems" if name == "load_problems" else ".prompts", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
