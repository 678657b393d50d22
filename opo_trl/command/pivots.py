"""`opo-trl pivots`: from logs of an agent to a dataset of the states in which it has acted."""

import argparse
import json
from pathlib import Path
from typing import Any


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("logs", help="file or folder of conversations with `messages`, `tools` and `reward`")
    parser.add_argument("--model", required=True, help="model to train, or its tokenizer: a folder, or on the Hub")
    parser.add_argument("--output", required=True, type=Path, help="folder to write, a recipe's `dataset_name`")
    parser.add_argument("--min-reward", type=float, help="least reward of a conversation (default: the best)")
    parser.add_argument("--messages", action="store_true", help="also take turns without calls")
    parser.add_argument("--max-prompt-length", type=int, help="most tokens of a prompt")
    parser.add_argument(
        "--test-fraction",
        type=float,
        default=0.1,
        help="share of tasks to hold out, by how they begin (default: 0.1; 0: none)",
    )
    parser.add_argument("--seed", type=int, default=42, help="draws what is held out (default: 42)")
    parser.add_argument(
        "--overlap",
        nargs="+",
        default=[],
        metavar="TOOL.PARAMETER=SHARE",
        help="parameters whose text only needs this share of the logged words",
    )
    parser.add_argument(
        "--chat-template-kwargs", type=json.loads, help='options of the chat template, as JSON: {"enable_thinking": …}'
    )


def run(options: Any) -> None:
    """
    Make a dataset of states from logs, write a file for each split into the folder `output`, which must be empty, and
    print how much there is. `options` are the parsed ones of [`add_options`].
    """
    from transformers import AutoTokenizer

    from ..data.arithmetic import EMBEDDED_MODELS
    from ..models.adapter import tokenizer_source
    from ..reuse.pivots import to_pivots

    folder = options.output
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"output={str(folder)!r} is not empty. Name another folder, or remove it.")
    name, revision = tokenizer_source(EMBEDDED_MODELS.get(options.model, options.model), {})
    splits = to_pivots(
        options.logs,
        AutoTokenizer.from_pretrained(name, revision=revision),
        min_reward=options.min_reward,
        messages=options.messages,
        max_prompt_length=options.max_prompt_length,
        test_fraction=options.test_fraction,
        seed=options.seed,
        overlap=_shares(options.overlap),
        chat_template_kwargs=options.chat_template_kwargs,
    )
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        rows.to_parquet(folder / f"{split}.parquet")
        n_trajectories = len(set(rows["trajectory"]))
        longest = max(map(len, rows["prompt_ids"]))
        print(f"{split}: {len(rows):,} states of {n_trajectories:,} trajectories, with up to {longest:,} tokens")
    print(f"To train on it: dataset_name: {folder}, reward_funcs: [action_reward] (recipes/qwen3-1.7b/pivots.yaml)")


def _shares(words: list[str]) -> dict[str, float]:
    """
    Parameter → its share, from the words of `--overlap`, such as `tool.parameter=0.5`. A `ValueError` for a word of
    another form, or a share outside of 0 to 1.
    """
    shares = {}
    for word in words:
        parameter, _, share = word.rpartition("=")
        try:
            shares[parameter] = float(share)
        except ValueError:  # no number
            parameter = ""  # which the next line rejects
        if "." not in parameter or not 0 <= shares[parameter] <= 1:
            raise ValueError(f"overlap={word!r} is not TOOL.PARAMETER=SHARE, with a share from 0 to 1.")
    return shares
