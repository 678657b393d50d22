"""
Training on recorded rollouts (`rollouts`), and recording those of a run (`save_rollouts`).

The trainer's dataset then has one row per group ([`data.rollouts`]). TRL's `rollout_func` returns the recorded
completions in place of new ones, so that all else is as with generation.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head, create_model_from_path, pad

from ..checks import files
from ..checks.weights import unsharded
from ..config import RolloutConfig
from ..data.rollouts import RECORDED, load_rollouts, text_of


FOLDER = "rollouts"  # in the output folder of a run that records its own


def dataset_for(args: RolloutConfig, given: Any) -> Dataset:
    """The training dataset of a trainer with `rollouts`, unless it has been loaded before."""
    if given is None:
        return load_rollouts(str(args.rollouts), args.num_generations)
    if RECORDED not in (getattr(given, "column_names", None) or ()):
        raise ValueError(
            f"train_dataset and rollouts={args.rollouts!r} are both given, but the prompts come with the rollouts. "
            "Remove one of them."
        )
    return given


def check_generation(args: RolloutConfig, named: Mapping[str, Any]) -> None:
    """Check that a trainer with `rollouts` gets no argument that would write completions."""
    for name in ("rollout_func", "tools", "environment_factory"):
        if named.get(name):
            raise ValueError(
                f"{name} cannot be combined with rollouts={args.rollouts!r}: completions are recorded. Remove one."
            )


def stored_reward(completions: Sequence[Any], **_: Any) -> list[None]:
    """Stand-in for a reward function where the rollouts have their rewards: new completions are unscored."""
    return [None] * len(completions)


def stored_rewards(inputs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> torch.Tensor | None:
    """Rewards `[B, number of reward functions]` that were recorded, as those of the first; `None` if none were."""
    if "reward" not in inputs[0]:
        return None
    table = torch.full((len(inputs), len(names)), torch.nan)
    table[:, 0] = torch.tensor([torch.nan if row["reward"] is None else row["reward"] for row in inputs])
    return table


def one_by_one(inputs: Sequence[Mapping[str, Any]], process: int, num_generations: int) -> list[dict[str, Any]]:
    """From the groups of each sample, `[B]`, to the samples of this process."""
    places = range(process * len(inputs), (process + 1) * len(inputs))
    return [
        {**{name: value for name, value in row.items() if name != RECORDED}, **row[RECORDED][place % num_generations]}
        for place, row in zip(places, inputs, strict=True)
    ]


def replay(samples: Sequence[Mapping[str, Any]], prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """TRL's `rollout_func` for recorded `samples`."""
    tokens: dict[str, Any] = {name: [row[name] for row in samples] for name in ("completion_ids", "logprobs")}
    return {"prompt_ids": trainer._tokenize_prompts(prompts)[0], **tokens}


def behaviour_logps(samples: Sequence[Mapping[str, Any]], like: torch.Tensor) -> torch.Tensor:
    """Recorded log-probabilities of tokens, with the shape and place of `like`, `[B, T]`."""
    logps = pad([torch.tensor(row["logprobs"]) for row in samples], padding_value=0.0, padding_side="right")
    return torch.nn.functional.pad(logps, (0, like.shape[1] - logps.shape[1])).to(like.device)


def completed(trainer: Any) -> Dataset:
    """
    The recorded dataset of a trainer, where each completion has its tokens and their log-probabilities.

    Raises:
        `ValueError`: no log-probabilities are recorded and `rollouts_model` does not say whose the completions are, it
            has another vocabulary, or a completion does not fit into `max_completion_length` or the vocabulary.
    """
    args, dataset, tokenizer = trainer.args, trainer.train_dataset, trainer._tokenizer
    if images := sorted({"image", "images"} & {*dataset.column_names}):
        raise ValueError(f"rollouts={args.rollouts!r} has a column {images[0]!r}: only text can be recorded.")
    recorded: list[list[dict[str, Any]]] = [*dataset[RECORDED]]
    for row in (row for group in recorded for row in group):
        if not row.get("completion_ids"):
            row["completion_ids"] = tokenizer(text_of(row["completion"]), add_special_tokens=False)["input_ids"]
            row["completion_ids"].append(tokenizer.eos_token_id)
    longest = max(len(row["completion_ids"]) for group in recorded for row in group)
    if args.max_completion_length is not None and longest > args.max_completion_length:
        raise ValueError(
            f"rollouts={args.rollouts!r} has completions of up to {longest:,} tokens, more than max_completion_length="
            f"{args.max_completion_length:,}. Set `max_completion_length` to {longest}, or remove the longer ones."
        )
    highest, vocabulary = max(max(row["completion_ids"]) for group in recorded for row in group), len(tokenizer)
    if highest >= vocabulary:
        raise ValueError(
            f"rollouts={args.rollouts!r} has the token {highest}, but the model's vocabulary has {vocabulary}: its "
            "completions are of another tokenizer. Record their text without `completion_ids`."
        )
    if "logprobs" not in recorded[0][0]:
        _add_logps(trainer, recorded)
    elif args.rollouts_model is not None:
        raise ValueError(
            f"rollouts_model={args.rollouts_model!r} has no effect: {args.rollouts!r} has log-probabilities of its "
            "own. Remove `rollouts_model`, or their column `logprobs`."
        )
    return dataset.remove_columns(RECORDED).add_column(RECORDED, recorded)


def _add_logps(trainer: Any, recorded: list[list[dict[str, Any]]]) -> None:
    """Add the log-probabilities under the model that wrote the completions, computed by all processes together."""
    args, prompts, model = trainer.args, trainer.train_dataset["prompt"], trainer.args.rollouts_model
    if model is None:
        raise ValueError(
            f"rollouts={args.rollouts!r} has no column `logprobs`, and whose the completions are is not known. Set "
            "`rollouts_model` to the model that wrote them."
        )
    if AutoTokenizer.from_pretrained(model).get_vocab() != trainer._tokenizer.get_vocab():
        raise ValueError(
            f"rollouts_model={model!r} has another vocabulary than the model to train. Set it to the model that wrote "
            "the completions, or record their log-probabilities where they are written."
        )
    options = {name: value for name, value in (args.model_init_kwargs or {}).items() if name != "revision"}
    with unsharded():
        author = create_model_from_path(model, **options).to(trainer.accelerator.device).eval()
    add_fused_lm_head(author, trainer.temperature, args.cast_lm_head_to_fp32)
    process, processes, found = trainer.accelerator.process_index, trainer.accelerator.num_processes, {}
    for index in range(process, len(recorded), processes):
        ids = trainer._tokenize_prompts(prompts[index : index + 1])[0][0]
        found[index] = _logps(trainer, author, ids, [row["completion_ids"] for row in recorded[index]])
    for index, group in [pair for part in gather_object([found]) for pair in part.items()]:
        for row, logps in zip(recorded[index], group, strict=True):
            row["logprobs"] = logps


@torch.no_grad()
def _logps(trainer: Any, model: Any, prompt: list[int], completions: list[list[int]]) -> list[list[float]]:
    """Log-probabilities of the tokens of one prompt's completions, at the temperature of the run."""
    padding = {"padding_value": 0, "padding_side": "right"}
    ids = pad([torch.tensor(tokens) for tokens in completions], **padding)
    mask = pad([torch.ones(len(tokens), dtype=torch.long) for tokens in completions], **padding)
    first = torch.tensor(prompt).expand(len(ids), -1)
    inputs = (torch.cat(pair, dim=1).to(model.device) for pair in ((first, ids), (torch.ones_like(first), mask)))
    size = trainer.args.per_device_train_batch_size
    logps = GRPOTrainer._get_per_token_logps_and_entropies(trainer, model, *inputs, ids.shape[1], size)[0].tolist()
    return [row[: len(tokens)] for row, tokens in zip(logps, completions, strict=True)]


def save(
    trainer: Any, inputs: Sequence[Mapping[str, Any]], rollout: Mapping[str, Any], completion_ids: list[list[int]]
) -> None:
    """Write this process's samples of a round of generation to a file of their own, which a resumed run rewrites."""
    own, done = trainer.accelerator.process_index, trainer.completions_generated
    logps = rollout.get("old_per_token_logps")
    if logps is None:
        tokens = [torch.cat([rollout[f"prompt_{x}"], rollout[f"completion_{x}"]], dim=1) for x in ("ids", "mask")]
        score = partial(GRPOTrainer._get_per_token_logps_and_entropies, trainer, trainer.model)
        with torch.no_grad():
            logps = score(*tokens, rollout["completion_ids"].shape[1], trainer.args.per_device_train_batch_size)[0]
    weights = trainer.reward_weights.to(rollout["rewards_per_func"].device)
    rewards = (rollout["rewards_per_func"] * weights).nansum(dim=1)
    unscored = rollout["rewards_per_func"].isnan().all(dim=1)
    lines = []
    for place, (row, ids) in enumerate(zip(inputs, completion_ids, strict=True)):
        sample = {
            "completion": trainer.processing_class.decode(ids, skip_special_tokens=True),
            "completion_ids": ids,
            "logprobs": logps[place, : len(ids)].tolist(),
            "reward": None if unscored[place] else rewards[place].item(),
            "group": f"{done}-{(own * len(inputs) + place) // trainer.num_generations}",
        }
        lines.append({**row, **sample})
    folder = files.inner_folder(Path(trainer.args.output_dir), FOLDER)
    files.write_lines(folder / f"{done:09}-{own}.jsonl", lines)
