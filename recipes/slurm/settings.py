"""
Print what the job scripts need from a recipe: `output_dir`, the server's port, and arguments for `trl vllm-serve`.

    python recipes/slurm/settings.py RECIPE [--field value …]

One item per line. It uses the parser of `opo-trl train`, so that the job and the run cannot disagree.
"""

import contextlib
import sys


with contextlib.redirect_stdout(sys.stderr):  # libraries may print when they are imported
    from opo_trl.launch.recipe import make_parser, read_recipe


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
    recipe, trainer = read_recipe(recipe_path, command_line)
    recipe.pop("env", None)
    parser = make_parser(trainer, prog="settings.py")
    arguments, _ = parser.parse_known_args([*parser.take(recipe), *command_line])
    print(arguments.output_dir, arguments.vllm_server_port, sep="\n")
    for name, field in SERVER.items():
        value = getattr(arguments, field)
        if value is not None:
            print(f"--{name}", value, sep="\n")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
