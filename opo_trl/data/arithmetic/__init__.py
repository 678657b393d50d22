"""
An embedded task on which reinforcement learning shows an effect within minutes on a CPU: chained arithmetic with
levels (`task.py`), and a small base model that writes the chains but mostly forgets to carry (`base/`).
"""

from ..models import EMBEDDED_MODELS
from .task import arithmetic_reward, make_problems


__all__ = ["arithmetic_reward", "base_model_path", "make_problems"]


def base_model_path() -> str:
    """Folder of the stored base model: weights, tokenizer and measured accuracy (`ACCURACY.json`)."""
    return EMBEDDED_MODELS["arithmetic"]
