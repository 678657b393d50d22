"""
The figure of the README: accuracy of the demo over the completions that it has generated, and of the same task with
replay.

    opo-trl train recipes/arithmetic/opo.yaml --output_dir runs/demo
    opo-trl train recipes/arithmetic/reuse.yaml --output_dir runs/replay
    python -m benchmarks.losses.demo_figure runs/demo runs/replay

Without folders, it draws from the record alone. The figure shows the first of the demo's 21,504
completions.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.figures import style, write
from opo_trl.checks.files import read_json, write_json
from opo_trl.report.run_files import ENVIRONMENT, read_log, read_settings


ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).resolve().with_name("demo.json")
FIGURE = ROOT / "docs" / "figures" / "demo.png"
SHOWN = 6144  # completions
_LINES = {
    "demo": ("the demo, measured every 1,536 completions", "#0072b2"),
    "replay": ("with replay, every 192, and other settings", "#d55e00"),
}


def curve(folder: Path) -> dict[str, Any]:
    """The validations of a run: completions generated for training until then, and accuracies with their intervals."""
    generated = 0
    points = []
    for entry in read_log(folder):
        generated = max(generated, round(entry.get("completions/generated", 0)))
        if "validation/accuracy" in entry and generated <= SHOWN:
            interval = [entry[f"validation/{name}"] for name in ("accuracy", "low", "high")]
            points.append([generated, *interval])
    environment, settings = read_json(folder / ENVIRONMENT), read_settings(folder)
    versions = {name: environment["packages"][name] for name in ("torch", "transformers", "trl")}
    return {
        "points": points,
        "problems": settings["validation_size"],
        "seed": settings["seed"],
        "git_commit": environment["git_commit"],
        "versions": versions,
    }


def draw(record: dict[str, Any], path: Path) -> bytes:
    """Draw the curves of a record, with bands of 95 %, and return the file's content."""
    with style():
        figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
        for name, run in record.items():
            label, color = _LINES[name]
            completions, accuracy, low, high = zip(*run["points"], strict=True)
            axes.plot(completions, [100 * share for share in accuracy], "o-", color=color, markersize=3, label=label)
            bounds = [[100 * share for share in bound] for bound in (low, high)]
            axes.fill_between(completions, *bounds, color=color, alpha=0.15, linewidth=0)
        axes.set(xlabel="completions generated", ylabel="solved, greedy (%)", ylim=(20, 102))
        axes.set_title("200 sums of a level that is never trained on; one seed, 95 % intervals")
        axes.legend(frameon=False, loc="lower right")
        content = write(figure, path)
        plt.close(figure)
    return content


def main(folders: Sequence[str]) -> None:
    if folders:
        write_json(RECORD, {name: curve(Path(folder)) for name, folder in zip(_LINES, folders, strict=True)})
    draw(read_json(RECORD), FIGURE)


if __name__ == "__main__":
    main(sys.argv[1:])
