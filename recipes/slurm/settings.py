"""
Print what the job scripts need from a recipe: `output_dir`, the server's port, and the server's arguments.

    python recipes/slurm/settings.py RECIPE [--field value …]

One item per line. The server is `trl vllm-serve`. This reads the recipe as `opo-trl train` does, so that the job and
the run cannot disagree.
"""

import contextlib
import os
import sys
from types import SimpleNamespace


with contextlib.redirect_stdout(sys.stderr):  # libraries may print when they are imported
    from opo_trl.command.recipe import read


# Settings that server and trainer share: argument of `trl vllm-serve` → field.
SERVER = {
    "model": "model_name_or_path",
    "revision": "model_revision",
    "trust_remote_code": "trust_remote_code",
    "vllm_model_impl": "vllm_model_impl",
    "max_model_len": "vllm_max_model_length",
    "port": "vllm_server_port",
}


def main(recipe_path: str, *command_line: str):
    """Print the settings of a recipe, overridden by fields of the command line."""
    fields = read(["--config", recipe_path, *command_line])
    for name, value in fields.launch.items():
        raise ValueError(f"{name}={value!r} is for the job to decide. Remove `{name}` from the recipe.")
    arguments = SimpleNamespace(**fields.values)
    folder = os.path.expanduser(arguments.output_dir)  # as Transformers does
    print(folder, arguments.vllm_server_port, sep="\n")
    for name, field in SERVER.items():
        value = getattr(arguments, field)
        if value is not None:
            print(f"--{name}", value, sep="\n")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
