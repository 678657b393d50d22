"""
An embedded task on which reinforcement learning shows an effect within minutes on a CPU: chained arithmetic with
levels (`task.py`), and a small base model that writes the chains but mostly forgets to carry (`base/`).
"""

from pathlib import Path

from .task import arithmetic_reward, make_problems


__all__ = ["EMBEDDED_MODELS", "arithmetic_reward", "base_model_path", "make_problems"]

# Name in `model_name_or_path` → folder with weights, tokenizer and measured accuracy (`ACCURACY.json`), each made by a
# script `benchmarks/NAME_base.py`.
EMBEDDED_MODELS = {name: str(Path(__file__).parents[1] / name / "base") for name in ("arithmetic", "spelling")}


def base_model_path() -> str:
    """Folder of the stored base model: weights, tokenizer and measured accuracy (`ACCURACY.json`)."""
    return EMBEDDED_MODELS["arithmetic"]
