"""Problems, the prompts made of them, and the embedded task."""

from .problems import COLUMNS, load_from_hub, load_problems, rename_columns
from .prompts import INSTRUCTION, drop_long_prompts, prompt_lengths, to_prompts, without_overlap


__all__ = [
    "COLUMNS",
    "INSTRUCTION",
    "drop_long_prompts",
    "load_from_hub",
    "load_problems",
    "prompt_lengths",
    "rename_columns",
    "to_prompts",
    "without_overlap",
]
