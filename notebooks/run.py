"""
Runs notebooks from top to bottom, each in a new kernel, and stores their outputs in them.

    python notebooks/run.py [notebooks/opo_vs_grpo.ipynb …]

Without names, runs all of them. Stored outputs come from a machine without a GPU, with the parameters unchanged.
"""

import copy
import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError
from nbformat import NotebookNode


FOLDER = Path(__file__).resolve().parent


def execute(path: Path, folder: Path = FOLDER, *, seconds: int = 600, **parameters) -> NotebookNode:
    """
    Execute a notebook, and return it with its outputs.

    Args:
        path (`Path`):
            The notebook, which is not changed.
        folder (`Path`, *optional*):
            Folder to run in and write to; by default that of the notebooks.
        seconds (`int`, *optional*, defaults to `600`):
            Time limit of a cell. If one takes longer, the notebook is run once more.
        **parameters:
            Values to set after the cell with the tag `parameters`, like papermill.

    Raises:
        `nbclient.exceptions.CellExecutionError`: if a cell fails.
        `nbclient.exceptions.CellTimeoutError`: if a cell takes too long, twice.
    """
    notebook = nbformat.read(path, as_version=4)
    if parameters:
        place = next(i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", []))
        lines = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
        notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(lines))
    # Do not store progress bars, or DeepSpeed's search for a GPU where it is installed.
    quiet = {"TQDM_DISABLE": "1", "DS_ACCELERATOR": "cpu"}
    for attempt in (1, 2):
        executed = copy.deepcopy(notebook)
        client = NotebookClient(
            executed,
            timeout=seconds,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(folder)}},
        )
        try:
            # The checkout's `benchmarks`, from whatever folder the notebook runs in.
            client.execute(env={**os.environ, **quiet, "PYTHONPATH": str(FOLDER.parent)})
            break
        except CellTimeoutError:  # now and then the kernel's reply is lost, and the client would wait forever
            if attempt == 2:
                raise
    executed.metadata.pop("widgets", None)  # dead without their kernel
    return executed


def main() -> None:
    """Run and store."""
    for path in map(Path, sys.argv[1:] or sorted(FOLDER.glob("*.ipynb"))):
        notebook = execute(path)
        notebook.metadata.language_info = {"name": "python"}  # without the Python version
        nbformat.write(notebook, path)
        print(path)


if __name__ == "__main__":
    main()
