"""
Runs notebooks from top to bottom, each in a new kernel, and stores their outputs in them.

    python notebooks/run.py [notebooks/opo_vs_grpo.ipynb …]
    python notebooks/run.py --new ENVIRONMENT

Without names, runs all of them. Stored outputs come from a machine without a GPU, with the parameters unchanged.
`--new` runs the notebook for Colab in a virtual environment that it makes. It has PyTorch and Jupyter's kernel, as in
Colab, and nothing of this package: the notebook installs the rest. Outputs are not stored.
"""

import argparse
import copy
import os
import subprocess
import venv
from importlib.metadata import version
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError
from nbformat import NotebookNode


FOLDER = Path(__file__).resolve().parent


def execute(
    path: Path, folder: Path = FOLDER, *, seconds: int = 600, installed: bool = True, **parameters
) -> NotebookNode:
    """
    Execute a notebook, and return it with its outputs.

    Args:
        path (`Path`):
            The notebook, which is not changed.
        folder (`Path`, *optional*):
            Folder to run in and write to; by default that of the notebooks.
        seconds (`int`, *optional*, defaults to `600`):
            Time limit of a cell. If one takes longer, the notebook is run once more.
        installed (`bool`, *optional*, defaults to `True`):
            Whether the notebook finds this checkout's packages; if not, it installs them.
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
    module_path = {}
    if installed:  # from whatever folder the notebook runs in
        others = os.environ.get("PYTHONPATH")
        module_path["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER.parent), others]))
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
            client.execute(env={**os.environ, **quiet, **module_path})
            break
        except CellTimeoutError:  # now and then the kernel's reply is lost, and the client would wait forever
            if attempt == 2:
                raise
    executed.metadata.pop("widgets", None)  # dead without their kernel
    return executed


def run_in_new_environment(environment: Path) -> None:
    """Run the notebook for Colab in an environment that is made first; it writes into that folder."""
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    tools = ["ipykernel", "nbclient", f"torch=={version('torch')}"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *tools], check=True)
    program = (
        "import pathlib, run, sys\n"
        "notebook, folder, source = sys.argv[1:]\n"
        "run.execute(pathlib.Path(notebook), pathlib.Path(folder), seconds=1800, installed=False, SOURCE=source)"
    )
    words = [FOLDER / "opo_finetune_colab.ipynb", environment, FOLDER.parent]
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([python, "-c", program, *words], cwd=FOLDER, env=others, check=True)


def main() -> None:
    """Run and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path)
    parser.add_argument("--new", type=Path, metavar="ENVIRONMENT", help="folder of an environment to make")
    arguments = parser.parse_args()
    if arguments.new is not None:
        run_in_new_environment(arguments.new.resolve())
        return
    for path in arguments.notebooks or sorted(FOLDER.glob("*.ipynb")):
        notebook = execute(path)
        notebook.metadata.language_info = {"name": "python"}  # without the Python version
        nbformat.write(notebook, path)
        print(path)


if __name__ == "__main__":
    main()
