"""The base models that the package embeds."""

from collections.abc import Callable

from . import arithmetic, guessing, spelling


# Name in `model_name_or_path` → function that returns the model's folder in the installed package.
EMBEDDED_MODELS: dict[str, Callable[[], str]] = {
    "arithmetic": arithmetic.base_model_path,
    "guessing": guessing.base_model_path,
    "spelling": spelling.base_model_path,
}
