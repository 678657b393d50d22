"""Corrections of what TRL and Transformers write about a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import Trainer
from trl.trainer.utils import get_config_model_id

from ..data.models import EMBEDDED_MODELS


def if_on_the_hub(dataset: str | None) -> str | None:
    """The name of a dataset, unless it is not one of the Hub, to which TRL's model card would link."""
    data = dataset or ""
    return None if data.count("/") != 1 or data.startswith((".", "~", "/")) or Path(data).exists() else data


def name_model(trainer: Trainer) -> None:
    """Name a model that is not on the Hub in the model card, of which TRL has written that it is `None`."""
    if not trainer.is_world_process_zero():
        return
    config: Any = trainer.model.config
    model = get_config_model_id(config)
    embedded = next((name for name, path in EMBEDDED_MODELS.items() if path == model), None)
    base = f"a model embedded in opo_trl, `{embedded}`" if embedded else f"the model `{Path(model or '?').name}`"
    output_dir = Path(trainer.args.output_dir)
    card = (output_dir / "README.md").read_text(encoding="utf-8")
    card = card.replace("[None](https://huggingface.co/None)", f"{base}, which is not on the Hub")
    card = card.replace('model="None"', f'model="{output_dir.name}"')
    (output_dir / "README.md").write_text(card, encoding="utf-8")


def leave_out_tied(model: Any, load_result: Any) -> None:
    """A tensor that is tied to a loaded one is loaded with it, although the checkpoint does not hold it twice."""
    missing = {*load_result.missing_keys}
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    load_result.missing_keys[:] = [name for name in missing if tied.get(name, name) in missing]
