"""
An embedded task on which reinforcement learning shows an effect within minutes on a CPU: chained arithmetic with
levels (`task.py`), and a small base model that writes the chains but mostly forgets to carry (`base/`, built by
`benchmarks/arithmetic_base.py`).
"""

from importlib.resources import files

from .task import arithmetic_reward, make_problems


__all__ = ["arithmetic_reward", "base_model_path", "make_problems"]


def base_model_path() -> str:
    """Folder of the stored base model: weights, tokenizer and measured accuracy (`ACCURACY.json`)."""
    return str(files(__package__) / "base")
