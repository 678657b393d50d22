"""
An embedded task that shows reinforcement learning teach a model something, on a CPU and in minutes: chained arithmetic
with levels (`task.py`), and a small base model that writes the chains but mostly forgets to carry (`base/`, built by
`make_base.py`).
"""

from importlib.resources import files

from .task import arithmetic_reward, make_problems


__all__ = ["arithmetic_reward", "base_model_path", "make_problems"]


def base_model_path() -> str:
    """
    Locate the stored base model.

    Returns:
        `str`: Path of the folder with the weights, the tokenizer and the measured accuracy (`ACCURACY.json`), to be
        given to `from_pretrained` or to a trainer.
    """
    return str(files(__package__) / "base")
