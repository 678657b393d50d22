"""
Runs notebooks from top to bottom, in a kernel of their own, and stores their outputs in them.

    python notebooks/run.py [notebooks/opo_vs_grpo.ipynb …]

without names all of them. What is stored is what a machine without a GPU makes of the parameters as they stand.
"""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode


FOLDER = Path(__file__).resolve().parent


def execute(path: Path, folder: Path = FOLDER, **parameters) -> NotebookNode:
    """
    Execute a notebook, and return it with its outputs.

    Args:
        path (`Path`):
            The notebook, which stays as it is.
        folder (`Path`, *optional*):
            Folder to run in, and to write to; that of the notebooks by default.
        **parameters:
            Values that are set behind the cell with the tag `parameters`, as papermill does.

    Raises:
        `nbclient.exceptions.CellExecutionError`: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    if parameters:
        place = next(i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", []))
        lines = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
        notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(lines))
    # Nobody wants stored: progress that is over, and how DeepSpeed, where it is installed, looked for a GPU.
    quiet = {"TQDM_DISABLE": "1", "DS_ACCELERATOR": "cpu"}
    NotebookClient(
        notebook,
        timeout=1800,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    ).execute(env={**os.environ, **quiet})
    notebook.metadata.pop("widgets", None)  # dead without their kernel
    return notebook


def main() -> None:
    """Run and store."""
    for path in map(Path, sys.argv[1:] or sorted(FOLDER.glob("*.ipynb"))):
        notebook = execute(path)
        notebook.metadata.language_info = {"name": "python"}  # else the version of whoever ran it
        nbformat.write(notebook, path)
        print(path)


if __name__ == "__main__":
    main()
