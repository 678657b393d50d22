"""
An embedded environment with several turns, in which reinforcement learning shows an effect within minutes on a CPU:
finding a number by guesses (`game.py`), and a small base model that writes the calls, but mostly guesses near the
lower end of what is left (`base/`, built by `benchmarks/guessing_base.py`).
"""

from importlib.resources import files

from .game import Guessing, make_games


__all__ = ["Guessing", "base_model_path", "make_games"]


def base_model_path() -> str:
    """Folder of the stored base model: weights, tokenizer and measured accuracy (`ACCURACY.json`)."""
    return str(files(__package__) / "base")
