"""
An embedded task to see reinforcement learning teach a model something in minutes on a CPU: chained arithmetic with
levels (`task.py`), and a small base model that can write the chains but forgets to carry (`base/`, built by
`make_base.py`).
"""

from importlib.resources import files

from .task import arithmetic_reward, make_problems


__all__ = ["arithmetic_reward", "base_model_path", "make_problems"]


def base_model_path() -> str:
    """Return the folder of the stored base model, to be given to `from_pretrained` or to a trainer.

    Returns:
        `str`: Path of the folder, which holds the weights, the tokenizer and the measured accuracy (`ACCURACY.json`).
    """
    return str(files(__package__) / "base")
