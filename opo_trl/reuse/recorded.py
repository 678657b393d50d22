"""
Training on recorded rollouts (`rollouts`), and recording those of a run (`save_rollouts`).

The trainer's dataset then has one row per group ([`reuse.reading`]). TRL's `rollout_func` returns the recorded
completions in place of new ones, so that all else is as with generation.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object, is_peft_model
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import add_fused_lm_head, pad

from ..batch import Batch
from ..checks import files
from ..checks.weights import unsharded
from ..config import OPOConfig
from ..metrics.opo import ratio_ess
from ..models import adapter
from ..objective import token_sum
from ..updates.padding import with_positions
from . import conversations
from .agent_logs import PLACE
from .reading import KNOWN, RECORDED, cuts_of, is_reserved, load_rollouts, text_of
from .recorded_logps import compare


logger = get_logger(__name__)

FOLDER = "rollouts"  # in the output folder of a run that records its own

Rows = Sequence[Mapping[str, Any]]


class Recorded:
    """
    Recorded rollouts of a trainer, its `dataset`, if it has `rollouts`; or else those that it records, of the dataset
    that it was `given`. `writers` are its other arguments that write completions, or parts of them.
    """

    samples: Rows = ()  # of the current rollout
    generated: Any = None  # the current round of generation, as TRL's `_generate` returns it
    are_compared = False  # whether it was said what the recorded log-probabilities look like

    def __init__(self, args: OPOConfig, given: Any, writers: Mapping[str, Any]):
        columns = {*(getattr(given, "column_names", None) or ())}
        others: dict[str, Any] = {"rollouts": args.rollouts, "images": {"image", "images"} & columns}
        if args.save_rollouts and (found := [name for name, value in others.items() if value]):
            raise ValueError(f"save_rollouts=True cannot record {found[0]}. Remove `save_rollouts`.")
        if args.save_rollouts and isinstance(given, Dataset):
            _check_recordable(given[:1])  # columns of a stream are checked in its first rollout
        others = {**writers, "train_dataset": given is not None and RECORDED not in columns}
        if args.rollouts is not None and (found := [name for name, value in others.items() if value]):
            said = f"{found[0]} cannot be combined with rollouts={args.rollouts!r}"
            raise ValueError(f"{said}, which bring prompts and completions. Remove one of them.")
        loads = args.rollouts is not None and given is None
        self.dataset = load_rollouts(args.rollouts, args.num_generations, args.seed) if loads else given
        self.num_generations = args.num_generations
        # In place of a reward function
        self.reward_func = unscored if args.rollouts is not None and has_rewards(self.dataset) else None

    def one_by_one(self, inputs: Rows, process: int) -> list[dict[str, Any]]:
        """From the group of each of this process's samples, `[B]`, to its row for reward functions."""
        places = [place % self.num_generations for place in range(process * len(inputs), (process + 1) * len(inputs))]
        self.samples = [row[RECORDED][place] for row, place in zip(inputs, places, strict=True)]
        return [_of_place(row, place) for row, place in zip(inputs, places, strict=True)]

    def recall(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """TRL's `rollout_func`."""
        names = {name: name for name in ("prompt_ids", "completion_ids", "logprobs")} | {"completion_mask": "env_mask"}
        found = {to: [row[name] for row in self.samples] for name, to in names.items() if name in self.samples[0]}
        return {"prompt_ids": _prompt_ids(trainer, prompts), **found}

    def rewards(self, weights: torch.Tensor) -> torch.Tensor | None:
        """
        Recorded rewards `[B, number of reward functions]`, such that TRL's sum with `weights` is the reward; `None` if
        none were recorded.
        """
        if "reward" not in self.samples[0]:
            return None
        table, column = torch.full((len(self.samples), len(weights)), torch.nan), int(weights.nonzero()[0])
        given = [torch.nan if row["reward"] is None else row["reward"] for row in self.samples]
        table[:, column] = torch.tensor(given) / weights[column].cpu()
        return table

    def behaviour_logps(self, like: torch.Tensor) -> torch.Tensor:
        """Recorded log-probabilities of tokens, with the shape and place of `like`, `[B, T]`."""
        logps = pad([torch.tensor(row["logprobs"]) for row in self.samples], padding_value=0, padding_side="right")
        return torch.nn.functional.pad(logps, (0, like.shape[1] - logps.shape[1])).to(like.device)

    def compare(
        self, trainer: Any, recorded: torch.Tensor, own: torch.Tensor, entropies: torch.Tensor, mask: torch.Tensor
    ) -> None:
        """
        Say once, for all processes, what recorded log-probabilities look like if they are not the policy's own.
        `entropies` are the policy's, and `mask` has the sampled tokens, `[B, T]` each.
        """
        if self.are_compared:
            return
        tokens = torch.stack([recorded, own, entropies])[:, mask].double().cpu().numpy()
        of_completions = token_sum(own - recorded, mask)[mask.any(dim=1)]
        parts = gather_object([(tokens, of_completions.double().cpu())])
        cuts = {f"{name}={value:g}" for row in self.samples for name, value in cuts_of(row).items()}
        of_all = np.concatenate([of_process for of_process, _ in parts], axis=1)
        found = compare(*of_all, temperature=trainer.temperature, cut=", ".join(sorted(cuts)))
        self.are_compared = found is not None
        if found is None:
            return
        log_ratios = torch.cat([of_process for _, of_process in parts])
        median, ess = log_ratios.median().exp(), ratio_ess(log_ratios, torch.ones_like(log_ratios, dtype=torch.bool))
        said = f"rollouts={trainer.args.rollouts!r}: the log-probabilities {found.difference}, {found.cause}"
        ratios = f"The ratio of a completion is {median:.1g} in the median, the effective sample size (ESS) {ess:.0%}"
        if found.fix:
            logger.warning(f"{said}. {ratios}. {found.fix}.")
        else:
            trainer.accelerator.print(f"{said}. {ratios}.", flush=True)

    def completed(self, trainer: Any) -> Dataset:
        """
        The dataset of recorded rollouts, where each completion has its tokens and their log-probabilities.

        Raises:
            `ValueError`: the completions are of another temperature or tokenizer, or it is not known which model wrote
                them.
        """
        args, dataset = trainer.args, trainer.train_dataset
        groups: list[list[dict[str, Any]]] = [*dataset[RECORDED]]
        samples = [row for group in groups for row in group]
        known = [args.temperature if row.get("temperature") is None else row["temperature"] for row in samples]
        sampled = sorted({f"{temperature:g}" for temperature in known})  # in float32, perhaps
        if sampled != [f"{args.temperature:g}"]:
            said = f"rollouts={args.rollouts!r} were sampled at a temperature of {' and '.join(sampled)}"
            fix = "Keep those of one temperature, and set `temperature` to it"
            raise ValueError(f"temperature={args.temperature:g}, but {said}. {fix}.")
        if "completion_ids" in samples[0]:
            _check_ids(trainer, samples)
            _check_texts(trainer, samples[:100])
        if "logprobs" in samples[0]:
            if args.rollouts_model is None:
                return dataset
            instead = f"in place of those recorded in rollouts={args.rollouts!r}"
            logger.warning(f"rollouts_model={args.rollouts_model!r} computes log-probabilities, {instead}.")
        _tokenize(trainer, groups)
        _add_logps(trainer, groups)
        return dataset.remove_columns(RECORDED).add_column(RECORDED, groups)

    def save(self, trainer: Any, inputs: Rows, rollout: Batch, completion_ids: list[list[int]]) -> None:
        """Write this process's samples of a round of generation to a file, which a resumed run rewrites."""
        accelerator, done = trainer.accelerator, trainer.completions_generated
        prompt_ids, _, masks = self.generated[:3]  # where `mask_truncated_completions` has masked nothing yet
        logps = rollout.get("old_per_token_logps", rollout.get("opo_logps"))
        if logps is None or trainer.mask_truncated_completions:  # without a pass over the rollout, or all of it
            logps = _scored(trainer, trainer.model, prompt_ids, completion_ids)
        rewards = rollout["rewards_per_func"]
        totals = (rewards * trainer.reward_weights.to(rewards.device)).nansum(dim=1)
        totals[rewards.isnan().all(dim=1)] = math.nan
        first = accelerator.process_index * len(inputs)
        for row in inputs:
            _check_recordable(row)
        lines = [
            {
                **row,
                "prompt_ids": prompt_ids[place],
                "completion": trainer.processing_class.decode(ids, skip_special_tokens=True),
                "completion_ids": ids,
                **({} if masks is None else {"completion_mask": masks[place]}),
                "logprobs": logps[place, : len(ids)].tolist(),
                "temperature": trainer.temperature,
                "reward": None if totals[place].isnan() else totals[place].item(),
                "group": f"{done}-{(first + place) // trainer.num_generations}",
            }
            for place, (row, ids) in enumerate(zip(inputs, completion_ids, strict=True))
        ]
        folder = Path(trainer.args.output_dir) / FOLDER
        before = done - len(inputs) * accelerator.num_processes
        if accelerator.is_main_process and folder.is_dir():
            if before == 0:
                aside = files.free(folder.with_name(f"{FOLDER}-replaced"))
                folder.rename(aside)
                logger.warning(f"The rollouts of an earlier run in {str(folder)!r} are moved to {str(aside)!r}.")
            else:  # before it was killed, this run may have gone further, in other steps
                for file in folder.glob("[0-9]*-[0-9]*.jsonl"):
                    if int(file.stem.partition("-")[0]) > before:
                        file.unlink()
        accelerator.wait_for_everyone()
        folder.mkdir(parents=True, exist_ok=True)
        files.write_lines(folder / f"{done:09}-{accelerator.process_index}.jsonl", lines)


def _check_recordable(columns: Mapping[str, Any]) -> None:
    """Check that columns of a dataset, or of one of its rows, can be recorded, and read again as they are."""
    for name, value in columns.items():
        said = f"save_rollouts=True cannot record the column {name!r}"
        if name != "prompt" and is_reserved(name):
            fix = "Rename it, or remove `save_rollouts`"
            raise ValueError(f"{said}: that name has a meaning in recorded rows. {fix}.")
        try:
            json.dumps(value)
        except TypeError as error:
            raise ValueError(
                f"{said}: {error}. Make its values text or numbers, or remove `save_rollouts`."
            ) from error


def as_scored(dataset: Dataset) -> Dataset:
    """One row of a recorded dataset, with the columns that reward functions get."""
    return Dataset.from_list([_of_place(dataset[0], 0)])


def has_rewards(dataset: Dataset) -> bool:
    """Whether the completions of a recorded dataset have been scored."""
    return "reward" in dataset[0][RECORDED][0]


def unscored(completions: Sequence[Any], **_: Any) -> list[None]:
    """Stand-in for a reward function where the rollouts have their rewards: new completions are unscored."""
    return [None] * len(completions)


def _of_place(row: Mapping[str, Any], place: int) -> dict[str, Any]:
    own = {name: value for name, value in row[RECORDED][place].items() if name not in (*KNOWN, PLACE)}
    return {name: value for name, value in row.items() if name != RECORDED} | own


def _check_texts(trainer: Any, samples: Rows) -> None:
    """Check of completions that also have their text that the tokens of most say the same."""

    tokenizer = conversations.tokenizer_of(trainer)

    def says(ids: Sequence[int], text: str) -> bool:
        # A server may have cut a block of thinking, half a letter or special tokens out of the text.
        texts = (text, *(tokenizer.decode(ids, skip_special_tokens=skip) for skip in (False, True)))
        own, *said = ("".join(each.replace("\ufffd", "").split()) for each in texts)
        return any(own in each for each in said)

    known = [(row["completion_ids"], text_of(row.get("completion")) or "") for row in samples]
    if 2 * sum(says(ids, text) for ids, text in known) < len(known):
        said = f"rollouts={trainer.args.rollouts!r}: the tokens of most completions say something else than their text"
        fix = "If they are of another tokenizer, remove `completion_ids` and `logprobs`; if not, remove `completion`"
        raise ValueError(f"{said}. {fix}.")


def _check_ids(trainer: Any, samples: Rows) -> None:
    """Check that the model has all tokens of recorded completions: it would fail only where it meets another one."""
    size = trainer.model.config.get_text_config().vocab_size
    for row in samples:
        for name in ("prompt_ids", "completion_ids"):
            if (largest := max(row.get(name) or (0,))) >= size:
                said = f"rollouts={trainer.args.rollouts!r}, {row[PLACE]}: `{name}` has {largest}"
                fix = "If the tokens are of another tokenizer, remove them and `logprobs`, and keep the text"
                raise ValueError(f"{said}, but the model has only {size:,} tokens. {fix}.")


def _prompt_ids(trainer: Any, prompts: Sequence[Any]) -> list[list[int]]:
    """Tokens of prompts, as the run itself would ask for completions."""
    rendered = [prompt if isinstance(prompt, str) else conversations.as_rendered(prompt) for prompt in prompts]
    return trainer._tokenize_prompts(rendered)[0]


def _tokenize(trainer: Any, groups: list[list[dict[str, Any]]]) -> None:
    """
    Add the tokens of prompts and, where there are none, of completions: a text gets the token that ends a turn. A mask
    leaves out what the chat template does not render as it was.
    """
    tokenizer, prompts = conversations.tokenizer_of(trainer), trainer.train_dataset["prompt"]
    end = tokenizer.eos_token_id
    if isinstance(prompts[0], list):  # a chat template may end a turn by another token
        turns = [*prompts[0], {"role": "assistant", "content": "x"}]
        ids = tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]
        end = next((token for token in reversed(ids) if token in trainer.eos_token_ids), end)
    template, unique, left_out, added_thoughts = None, [], defaultdict(list), 0
    source = f"rollouts={trainer.args.rollouts!r}"
    for prompt, group in zip(prompts, groups, strict=True):
        (prompt_ids,) = _prompt_ids(trainer, [prompt])
        for row in group:
            row.setdefault("prompt_ids", prompt_ids)
            completion, tools = row.pop("completion", None), row.pop("tools", None)
            if "completion_ids" in row:
                continue
            text = text_of(completion)
            turns = completion if text is None else [{"role": "assistant", "content": text}]
            try:
                if text is None or tools:
                    if not tools and any(turn.get("tool_calls") for turn in turns):
                        logger.warning_once(f"{source}: no column `tools` describes those that are called.")
                    template = template or conversations.marking_template(tokenizer)
                    row |= conversations.tokenized(trainer, template, prompt, turns, tools or ())
                    added_thoughts += conversations.empty_thoughts(tokenizer, row, turns)
                else:
                    if not isinstance(prompt, str):
                        conversations.check_prompt(trainer, prompt)
                    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
                    ids = ids if end is None or (ids and ids[-1] in trainer.eos_token_ids) else [*ids, end]
                    row |= {"completion_ids": ids, "completion_mask": [1] * len(ids)}
                both = [*row["prompt_ids"], *row["completion_ids"]]
                unique.append(tokenizer(tokenizer.decode(both), add_special_tokens=False)["input_ids"] == both)
            except conversations.UnfaithfulError as reason:
                left_out[str(reason)].append(row[PLACE])
                unique.append(False)
                # Not nothing: reward functions read it, and the reward counts in the mean of its group.
                ids = tokenizer(conversations.spoken(turns), add_special_tokens=False)["input_ids"] or prompt_ids[-1:]
                row |= {"completion_ids": ids, "completion_mask": [0] * len(ids)}
    if left_out:
        count = sum(map(len, left_out.values()))
        reasons = "; ".join(f"{why} ({len(places):,}, such as {places[0]})" for why, places in left_out.items())
        said = f"{source}: {count:,} of its {len(unique):,} completions cannot be trained on: {reasons}"
        if count == len(unique):
            raise ValueError(f"{said}. None is left: record their tokens, or change their messages.")
        logger.warning(f"{said}. They are left out.")
    if added_thoughts:
        said = f"the chat template adds an empty thought to {added_thoughts:,} turns, which counts as sampled"
        fix = "If the model wrote none, set `chat_template_kwargs` to {enable_thinking: false}"
        logger.warning(f"{source}: {said}. {fix}.")
    if unique:
        share = 1 - sum(unique) / len(unique)
        said = f"{source} has no tokens: its text is tokenized again, perhaps otherwise than sampled"
        depends = "that depends on whether the prompt is before them" + ", or they are left out" * bool(left_out)
        logger.warning(f"{said}. For {share:.1%} of completions, {depends}.")


def _add_logps(trainer: Any, groups: list[list[dict[str, Any]]]) -> None:
    """Add the log-probabilities under the model that wrote the completions, computed by all processes together."""
    args, model = trainer.args, trainer.args.rollouts_model
    if model is None:
        fix = "Set `rollouts_model` to the model that wrote the completions"
        raise ValueError(f"rollouts={args.rollouts!r} has no column `logprobs`. {fix}.")
    options = {name: value for name, value in (args.model_init_kwargs or {}).items() if name != "revision"}
    with unsharded():
        author = adapter.load(model, field="rollouts_model", trains=False, **{**options, "device_map": None})
    source, revision = adapter.tokenizer_source(model, {})
    tokenizer = AutoTokenizer.from_pretrained(source, revision=revision)
    if tokenizer.get_vocab() != conversations.tokenizer_of(trainer).get_vocab():
        fix = "Record log-probabilities where completions are written"
        raise ValueError(f"rollouts_model={model!r} has another vocabulary than the model to train. {fix}.")
    process, processes, found = trainer.accelerator.process_index, trainer.accelerator.num_processes, {}
    with unsharded():
        author = author.to(trainer.accelerator.device).eval()
        scorer = author.get_base_model() if is_peft_model(author) else author
        add_fused_lm_head(scorer, trainer.temperature, args.cast_lm_head_to_fp32)
        for index in range(process, len(groups), processes):
            prompts, completions = ([row[name] for row in groups[index]] for name in ("prompt_ids", "completion_ids"))
            logps = _scored(trainer, author, prompts, completions)
            found[index] = [row[: len(ids)].tolist() for row, ids in zip(logps, completions, strict=True)]
    for index, group in [pair for part in gather_object([found]) for pair in part.items()]:
        for row, logps in zip(groups[index], group, strict=True):
            row["logprobs"] = logps


@torch.no_grad()
def _scored(trainer: Any, model: Any, prompts: list[list[int]], completions: list[list[int]]) -> torch.Tensor:
    """Log-probabilities `[B, T]` of completions' tokens after their prompts, at the temperature of the run."""
    parts = []
    for tokens, side in ((prompts, "left"), (completions, "right")):
        ids = [torch.tensor(each) for each in tokens]
        parts.append([pad(each, 0, side) for each in (ids, [torch.ones_like(each) for each in ids])])
    inputs = [torch.cat(pair, dim=1).to(trainer.accelerator.device) for pair in zip(*parts, strict=True)]
    width, size = parts[1][0].shape[1], trainer.args.per_device_train_batch_size
    call = partial(with_positions, model) if trainer._takes_positions else model
    with disable_gradient_checkpointing(model, trainer.args.gradient_checkpointing_kwargs):
        return GRPOTrainer._get_per_token_logps_and_entropies(trainer, call, *inputs, width, size)[0]
