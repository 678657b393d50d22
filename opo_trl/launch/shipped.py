"""The recipes that the package ships: a list, and a copy to change."""

import re
import shutil
from pathlib import Path


SHIPPED = Path(__file__).parents[1] / "recipes"


def describe() -> str:
    """Each recipe with the first line of its file, which says what it does."""
    recipes = [path for path in sorted(SHIPPED.rglob("*.yaml")) if path.parent.name != "accelerate"]
    said = {str(path.relative_to(SHIPPED)): path.read_text(encoding="utf-8").partition("\n")[0] for path in recipes}
    width = max(map(len, said))
    return "\n".join(f"{name:<{width}}  {line.removeprefix('# ')}" for name, line in said.items())


def copy_out(name: str, output: Path) -> list[Path]:
    """Copy a recipe, and the configuration of accelerate that it names; returns the files written."""
    name = name.removeprefix("recipes/")
    if not (recipe := SHIPPED / name).is_file():
        raise ValueError(f"recipe={name!r} is not one of the package's. `opo-trl recipes` lists them.")
    config = re.search(r"^accelerate_config: .*?(accelerate/\S+)", recipe.read_text(encoding="utf-8"), re.MULTILINE)
    written = []
    for part in [name, *(config.groups() if config else ())]:
        target = output / part
        if target.is_file() and target.read_bytes() != (SHIPPED / part).read_bytes():
            raise ValueError(f"{str(target)!r} exists and differs from the package's. Move it, or set `--output`.")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SHIPPED / part, target)
        written.append(target)
    return written
