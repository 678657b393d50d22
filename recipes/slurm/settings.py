"""
Print what the job scripts need from a recipe: `output_dir`, `trainer`, the server's port, and the server's arguments.

    python recipes/slurm/settings.py RECIPE [--field value …]

One item per line. The server is `trl vllm-serve`, or `vllm serve` with `trainer: async_opo`. It reads them as
`opo-trl train` does, so that the job and the run cannot disagree.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit


with contextlib.redirect_stdout(sys.stderr):  # libraries may print when they are imported
    from opo_trl.launch.recipe import read


ASYNC = "async_opo"

# Settings that server and trainer share: argument of `trl vllm-serve` → field.
SERVER = {
    "model": "model_name_or_path",
    "revision": "model_revision",
    "trust_remote_code": "trust_remote_code",
    "vllm_model_impl": "vllm_model_impl",
    "max_model_len": "vllm_max_model_length",
    "port": "vllm_server_port",
}


def of_async_server(arguments: Any, port: int) -> Iterator[str]:
    """Arguments of `vllm serve`: what the trainer requires of it, and the same model."""
    yield from (arguments.model_name_or_path, "--revision", arguments.model_revision, "--port", str(port))
    yield from ("--logprobs-mode", "processed_logprobs", "--weight-transfer-config", '{"backend": "nccl"}')
    yield from ("--dtype", "bfloat16" if arguments.bf16 else "float16" if arguments.fp16 else arguments.dtype)
    if arguments.trust_remote_code:
        yield "--trust-remote-code"
    if arguments.use_peft:
        rank = next(rank for rank in (16, 32, 64, 128, 256, 320, 512) if rank >= arguments.lora_r)  # vLLM's choices
        yield from ("--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(arguments.max_staleness + 2))


def main(recipe_path: str, *command_line: str):
    """Print the settings of a recipe, overridden by fields of the command line."""
    fields = read(["--config", recipe_path, *command_line])
    for name, value in fields.launch.items():
        raise ValueError(f"{name}={value!r} is for the job to decide. Remove `{name}` from the recipe.")
    arguments, trainer = SimpleNamespace(**fields.values), fields.trainer
    folder = os.path.expanduser(arguments.output_dir)  # as Transformers does
    if trainer == ASYNC:
        port = urlsplit(arguments.vllm_server_base_url).port or 8000
        print(folder, trainer, port, *of_async_server(arguments, port), sep="\n")
        return
    print(folder, trainer, arguments.vllm_server_port, sep="\n")
    for name, field in SERVER.items():
        value = getattr(arguments, field)
        if value is not None:
            print(f"--{name}", value, sep="\n")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
