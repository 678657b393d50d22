"""Problems, the prompts made of them, and the embedded task."""

from .problems import (
    COLUMNS,
    INSTRUCTION,
    drop_long_prompts,
    load_from_hub,
    load_problems,
    prompt_lengths,
    rename_columns,
    to_prompts,
    without_overlap,
)


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
