"""The recipes that the package ships: a list, and a copy to change."""

import os
import shutil
from pathlib import Path

from ..checks import strict_yaml


SHIPPED = Path(__file__).parents[1] / "recipes"


def describe() -> str:
    """Each recipe with the first line of its file, which says what it does."""
    recipes = [path for path in sorted(SHIPPED.rglob("*.yaml")) if path.parent.name != "accelerate"]
    said = {str(path.relative_to(SHIPPED)): path.read_text(encoding="utf-8").partition("\n")[0] for path in recipes}
    width = max(map(len, said))
    return "\n".join(f"{name:<{width}}  {line.removeprefix('# ')}" for name, line in said.items())


def copy_out(name: str, output: Path) -> list[Path]:
    """
    Copy a recipe, or a folder of them, with the configurations of accelerate that it names, unless another file is
    there; returns the files written, what was asked for first.

    Paths within `output` are the same, so that recipes find what they name. `recipes/` may precede `name`.
    """
    wanted = SHIPPED / name.removeprefix("recipes/")
    if not (wanted.exists() and wanted.resolve().is_relative_to(SHIPPED.resolve())):
        raise ValueError(f"recipe={name!r} is not one of the package's. `opo-trl recipes` lists them.")
    sources = [wanted] if wanted.is_file() else [path for path in sorted(wanted.rglob("*")) if path.is_file()]
    for source in [path for path in sources if path.suffix == ".yaml"]:
        if config := strict_yaml.read(source).get("accelerate_config"):
            sources.append((source.parent / config).resolve())
    targets = {output / path.resolve().relative_to(SHIPPED.resolve()): path for path in sources}
    for target, source in targets.items():
        if os.path.lexists(target) and not (target.is_file() and target.read_bytes() == source.read_bytes()):
            fix = "Move it, or set another folder: `--output`."
            raise ValueError(f"{str(target)!r} exists and differs from the package's. {fix}")
    for target, source in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    return list(targets)
