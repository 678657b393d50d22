"""
An embedded environment with several turns, in which reinforcement learning shows an effect within minutes on a CPU:
finding a number by guesses (`game.py`), and a small base model that writes the calls, but mostly guesses near the
lower end of what is left (`base/`).
"""

from .game import Guessing, make_games


__all__ = ["Guessing", "make_games"]
