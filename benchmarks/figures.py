"""How figures of the benchmarks look and are written: the same data gives the same file."""

import io
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from opo_trl.checks import files
from opo_trl.checks.text import one_line


# Fixed identifiers and no date: the same log gives the same file.
STYLE: Any = {"svg.hashsalt": "opo_trl", "figure.dpi": 120, "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}


def style() -> AbstractContextManager[None]:
    """This style alone: no `matplotlibrc`, which may be in the current folder, and no formulas in labels."""
    return plt.style.context({**STYLE, "text.parse_math": False}, after_reset=True)


def legible(text: str) -> str:
    """A label; matplotlib would leave out one that begins with an underscore."""
    line = one_line(text, 80)
    return f" {line}" if line.startswith("_") else line


def write(figure: Figure, path: Path, **metadata: str | None) -> bytes:
    """Write a figure into a file, whose content is returned; `metadata` of a PNG."""
    image = io.BytesIO()
    is_svg = path.suffix == ".svg"
    figure.savefig(image, format=path.suffix[1:], metadata={"Date": None} if is_svg else metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, image.getvalue())
    return image.getvalue()
