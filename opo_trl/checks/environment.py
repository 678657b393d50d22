"""Installed packages."""

from importlib.util import find_spec


def check_installed(asked: str, *packages: str, install: str, otherwise: str = "") -> None:
    """Check that the packages are installed that what is `asked` for needs; otherwise raise an `ImportError`."""
    if missing := [package for package in packages if find_spec(package) is None]:
        are = "is" if len(missing) == 1 else "are"
        raise ImportError(
            f"{asked} needs {', '.join(missing)}, which {are} not installed. `pip install {install}`{otherwise}."
        )
