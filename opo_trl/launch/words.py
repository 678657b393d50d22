"""
A command line as words, and the checks of it that do not import PyTorch.

TRL takes seconds to import, and a training process as long again. A mistake that can be found without either is
reported at once, by [`check_at_once`]; everything else by `launch.recipe` and `train`, which know the fields.
"""

import argparse
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..checks import paths, strict_yaml


# Fields that hold a mapping, and so have YAML in braces as their value on a command line.
MAPPINGS = {
    *("accelerator_config", "activation_checkpointing_kwargs", "chat_template_kwargs", "columns"),
    *("dataset_settings", "datasets", "deepspeed", "fsdp_config", "generation_kwargs"),
    *("gradient_checkpointing_kwargs", "liger_kernel_config", "lr_scheduler_kwargs", "model_init_kwargs"),
    "transformers_continuous_batching_config",
}


def split(argv: Sequence[str]) -> tuple[str | None, bool, list[str]]:
    """Path of the recipe, whether `--debug` asks for tracebacks, and the rest of a command line."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--debug", nargs="?", const=True)  # with a value, it is Transformers' field
    own, rest = parser.parse_known_args(argv)
    if isinstance(own.debug, str):
        rest += ["--debug", own.debug]
    return own.config, own.debug is True, rest


def overrides(words: Sequence[str]) -> dict[str, Any]:
    """Field → value or values, as text, from `--field value …` and `--field=value`."""
    values: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name = name.replace("-", "_")
            values[name] = [value] if value else []
        elif values:
            values[name].append(word)
        else:
            raise ValueError(f"{word!r} is neither a field nor the value of one. Write `--field value`.")
    return {name: given[0] if len(given) == 1 else given or True for name, given in values.items()}


def check_at_once(argv: Sequence[str]) -> None:
    """Check what needs no type of a field: the recipe's YAML, mappings, and paths."""
    path, _, words = split(argv)
    fields = {} if path is None else read_yaml(path, lambda _: "text")
    given: Mapping[str, Any] = {name: value for name, value in (fields | overrides(words)).items() if value}
    for name in MAPPINGS & given.keys():
        strict_yaml.read_mappings(name, given[name])
    folder, dataset = given.get("output_dir"), given.get("dataset_name")
    if isinstance(folder, str):
        paths.check_folder("output_dir", folder)
    # A path, and no embedded dataset.
    if isinstance(dataset, str) and (paths.is_local(dataset) or Path(dataset).suffix):
        from ..data.files import local_file  # with `datasets`, half a second

        local_file(dataset, str(given.get("dataset_train_split", "train")))
    if isinstance(given.get("accelerate_config"), str):
        find_accelerate_config(given["accelerate_config"], path)


def read_yaml(path: str | Path, kind_of: Any) -> dict[str, Any]:
    """Read a recipe, with [`strict_yaml.read`], and say where to find one if there is no such file."""
    paths.check_file("config", path, "Pass the path of a recipe; `opo-trl recipes` copies one of the package's.")
    return strict_yaml.read(path, kind_of)


def find_accelerate_config(name: str | None, recipe_path: str | None) -> str | None:
    """Find an accelerate configuration: a file, relative to here or to the recipe, or the name of one of TRL's."""
    if name is None:
        return None
    trl: Any = find_spec("trl")
    places = [Path(name), Path(trl.origin).parent / "accelerate_configs" / f"{name}.yaml"]
    if recipe_path is not None:
        places.insert(1, Path(recipe_path).parent / name)
    for place in places:
        if place.is_file():
            return str(place.resolve())
    sought = f"Looked for {', '.join(map(str, places))}."
    raise ValueError(f"accelerate_config={name!r} is neither a file nor one of TRL's configurations. {sought}")
