"""From text to a number, isolated."""

from .accuracy import accuracy_reward, format_reward


__all__ = ["accuracy_reward", "format_reward"]
