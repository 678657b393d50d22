"""The base models that the package embeds, each built by a script `benchmarks/NAME_base.py`."""

from pathlib import Path


# Name in `model_name_or_path` → folder with weights, tokenizer and measured accuracy (`ACCURACY.json`).
EMBEDDED_MODELS = {name: str(Path(__file__).parent / name / "base") for name in ("arithmetic", "spelling")}
