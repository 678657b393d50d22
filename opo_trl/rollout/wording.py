"""What TRL and Transformers write about a run, without what is not so."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import Trainer
from trl.trainer.utils import get_config_model_id

from ..data.models import EMBEDDED_MODELS


class WordingTrainer(Trainer):
    """A trainer of TRL's whose model card knows models that are not on the Hub, and that resumes tied weights."""

    def create_model_card(self, *arguments, **named):
        """As in TRL, for a model or dataset that is not on the Hub, too, and before the model is pushed."""
        data = named.get("dataset_name") or ""
        if data.count("/") != 1 or data.startswith((".", "~", "/")) or Path(data).exists():
            named["dataset_name"] = None  # TRL would link to it on the Hub
        super().create_model_card(*arguments, **named)
        if not self.is_world_process_zero():
            return
        model = get_config_model_id(self.model.config)
        embedded = next((name for name, path in EMBEDDED_MODELS.items() if path == model), None)
        base = f"a model embedded in opo_trl, `{embedded}`" if embedded else f"the model `{Path(model or '?').name}`"
        replaced: Mapping[str, str] = {
            "[None](https://huggingface.co/None)": f"{base}, which is not on the Hub",
            'model="None"': f'model="{Path(self.args.output_dir).name}"',
        }
        path = Path(self.args.output_dir) / "README.md"
        card = path.read_text(encoding="utf-8")
        for theirs, ours in replaced.items():
            card = card.replace(theirs, ours)
        path.write_text(card, encoding="utf-8")

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """A tensor that is tied to a loaded one is loaded with it, although the checkpoint does not hold it twice."""
        missing = {*load_result.missing_keys}
        tied: Mapping[str, str] = getattr(self.model, "all_tied_weights_keys", None) or {}
        load_result.missing_keys[:] = [name for name in missing if tied.get(name, name) in missing]
        super()._issue_warnings_after_load(load_result)
