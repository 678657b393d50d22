"""The base models that the package embeds, each with a task of the same name."""

from collections.abc import Callable

from . import arithmetic, guessing


# Name in `model_name_or_path` → function that returns the model's folder in the installed package.
EMBEDDED_MODELS: dict[str, Callable[[], str]] = {
    "arithmetic": arithmetic.base_model_path,
    "guessing": guessing.base_model_path,
}
