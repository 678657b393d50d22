"""A model that is named by an adapter: its base with the adapter, as PEFT loads it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoProcessor
from trl.trainer.utils import create_model_from_path

from ..checks.weights import base_of


def load(
    path: str,
    *,
    field: str = "model",
    trains: bool = True,
    create: Callable[..., Any] = create_model_from_path,
    **options: Any,
) -> Any:
    """
    TRL's `create_model_from_path`, or another such function, also for an adapter, which `trains` on: its base is
    frozen.

    Raises:
        `ValueError`: the adapter's tensors are not those of its configuration on this base.
    """
    base = base_of(field, path, options)
    if base is None:
        return create(path, **options)
    from peft import PeftModel, get_peft_model_state_dict, load_peft_weights  # an extra of this package

    # Where the adapter is; its base has options of its own.
    where = {name: options[name] for name in ("revision", "subfolder", "cache_dir", "token") if name in options}
    name, base_options = base
    base_model = create(name, **base_options)
    model = PeftModel.from_pretrained(base_model, path, is_trainable=trains, **where)
    stored = load_peft_weights(path, device="cpu", **where).keys()
    needed = get_peft_model_state_dict(model, save_embedding_layers=False).keys()
    # PEFT initializes a tensor that is missing, and ignores one that has no place. It may save embeddings, too.
    missing = needed - stored  # names of tensors
    unknown = stored - needed - model.state_dict().keys()
    misfits = sorted(missing | unknown)
    if misfits:
        raise ValueError(
            f"{field}={path!r}: {', '.join(misfits[:3])}, of {len(misfits)} tensors, do not fit "
            f"base_model_name_or_path={name!r}, or are missing. Restore the adapter's files."
        )
    return model


def tokenizer_source(path: str, options: Mapping[str, Any]) -> tuple[str, str | None]:
    """Folder or name of what has a model's tokenizer, and its revision: for an adapter without one, its base."""
    base = base_of("model", path, options)
    if base is None or (Path(path) / "tokenizer_config.json").is_file():
        return path, options.get("revision")
    name, base_options = base
    return name, base_options["revision"]


def prepared(model: str, args: Any, trainer_options: dict[str, Any]) -> dict[str, Any]:
    """
    The options of a trainer whose `model` is a name. For an adapter, the tokenizer that was saved with it is added:
    TRL would take that of its base model.

    Raises:
        `ValueError`: there is an adapter, and another is to be made.
    """
    options = args.model_init_kwargs or {}
    if base_of("model", model, options) is None:
        return trainer_options
    if trainer_options.get("peft_config") is not None:
        raise ValueError(
            f"model={model!r} is an adapter already. To go on training it, remove `peft_config` (in a recipe: "
            "`use_peft`). To train a new adapter, merge this one into its base model."
        )
    if trainer_options.get("processing_class") is not None:
        return trainer_options
    return trainer_options | {"processing_class": processor_of(model, args)}


def processor_of(model: str, args: Any) -> Any:
    """What TRL prepares prompts with, for a model that is a name; for an adapter, the tokenizer saved with it."""
    source, revision = tokenizer_source(model, args.model_init_kwargs or {})
    return AutoProcessor.from_pretrained(
        source,
        revision=revision,
        trust_remote_code=args.trust_remote_code,
        truncation_side="left",
        padding_side="left",
    )
