"""
A small base model for the task `spell_backward` of reasoning-gym, which mostly makes two mistakes (`base/`, built by
`benchmarks/spelling_base.py`).
"""

from importlib.resources import files


def base_model_path() -> str:
    """Folder of the stored base model: weights, tokenizer and measured accuracy (`ACCURACY.json`)."""
    return str(files(__package__) / "base")
