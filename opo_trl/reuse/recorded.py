"""
Training on recorded rollouts (`rollouts`), and recording those of a run (`save_rollouts`).

The trainer's dataset then has one row per group ([`reuse.reading`]). TRL's `rollout_func` returns the recorded
completions in place of new ones, so that all else is as with generation.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

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
from . import conversations, turns
from .agent_logs import PLACE
from .conversations import UnfaithfulError
from .reading import KNOWN, ONLY_TOKENS, RECORDED, is_reserved, load_rollouts, text_of, truncation_of
from .recorded_logps import compare


logger = get_logger(__name__)

FOLDER = "rollouts"  # in the output folder of a run that records its own

Row = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]
Tokens = list[list[int]]
TokenizePrompts = Callable[[list[Any]], Any]


class Recorded:
    """
    Recorded rollouts of a trainer, its `dataset`, if it has `rollouts`; or else those that it records, of its
    `train_dataset`. `writers` are its other arguments that write completions, or parts of them.
    """

    completions: Rows = ()  # of the current rollout
    generated: Any = None  # the current round of generation, as TRL's `_generate` returns it
    are_compared = False  # whether it was said what the recorded log-probabilities look like

    def __init__(self, args: OPOConfig, train_dataset: Any, writers: Mapping[str, Any]):
        self.num_generations = args.num_generations
        self.dataset = train_dataset
        self.reward_func = None  # in place of a reward function
        columns = getattr(train_dataset, "column_names", None) or ()
        if args.save_rollouts:
            images = {"image", "images"}.intersection(columns)
            for name, value in {"rollouts": args.rollouts, "images": images}.items():
                if value:
                    raise ValueError(f"save_rollouts=True cannot record {name}. Remove `save_rollouts`.")
            if isinstance(train_dataset, Dataset):
                _check_recordable(train_dataset[:1])  # Columns of a stream are checked in its first rollout.
        if args.rollouts is None:
            return
        others = {**writers, "train_dataset": train_dataset is not None and RECORDED not in columns}
        for name, value in others.items():
            if value:
                raise ValueError(
                    f"{name} cannot be combined with rollouts={args.rollouts!r}, which bring prompts and completions. "
                    "Remove one of them."
                )
        if train_dataset is None:
            self.dataset = load_rollouts(args.rollouts, args.num_generations, args.seed)
        if has_rewards(self.dataset):
            self.reward_func = unscored

    def select_completions(self, inputs: Rows, process: int) -> list[dict[str, Any]]:
        """
        The rows of this process's samples, `[B]`, for reward functions. Each of the `inputs` is its sample's group;
        the place in it follows from the sample's index over all processes.
        """
        first = process * len(inputs)
        self.completions = []
        rows = []
        for index, group in enumerate(inputs, first):
            place = index % self.num_generations
            self.completions.append(group[RECORDED][place])
            rows.append(_row_for_rewards(group, place))
        return rows

    def recall(self, prompts: list[Any], trainer: Any, *, tokenize_prompts: TokenizePrompts) -> dict[str, Any]:
        """TRL's `rollout_func`, with the trainer's way to tokenize prompts."""
        rollout = {"prompt_ids": _prompt_ids(tokenize_prompts, prompts)}
        entries = {
            "prompt_ids": "prompt_ids",
            "completion_ids": "completion_ids",
            "logprobs": "logprobs",
            "completion_mask": "env_mask",
        }
        for column, entry in entries.items():
            if column in self.completions[0]:
                rollout[entry] = [completion[column] for completion in self.completions]
        return rollout

    def rewards(self, weights: torch.Tensor) -> torch.Tensor | None:
        """
        Recorded rewards `[B, number of reward functions]`, such that TRL's sum with `weights` is the reward; `None` if
        none were recorded.
        """
        if "reward" not in self.completions[0]:
            return None
        recorded = [completion["reward"] for completion in self.completions]
        recorded = [torch.nan if reward is None else reward for reward in recorded]
        column = int(weights.nonzero()[0])
        rewards = torch.full((len(recorded), len(weights)), torch.nan)
        rewards[:, column] = torch.tensor(recorded) / weights[column].cpu()
        return rewards

    def behaviour_logps(self, like: torch.Tensor) -> torch.Tensor:
        """Recorded log-probabilities of tokens, with the shape and place of `like`, `[B, T]`."""
        of_completions = [torch.tensor(completion["logprobs"]) for completion in self.completions]
        logps = pad(of_completions, padding_value=0, padding_side="right")
        n_missing = like.shape[1] - logps.shape[1]
        return torch.nn.functional.pad(logps, (0, n_missing)).to(like.device)

    def compare(
        self, trainer: Any, recorded: torch.Tensor, current: torch.Tensor, entropies: torch.Tensor, mask: torch.Tensor
    ) -> None:
        """
        Say once, for all processes, what recorded log-probabilities look like if they are not the `current` ones
        of the policy, whose are the `entropies`, too. `mask` has the sampled tokens. `[B, T]` each.
        """
        if self.are_compared:
            return
        of_tokens = torch.stack([recorded, current, entropies])[:, mask]
        is_sampled = mask.any(dim=1)
        of_completions = token_sum(current - recorded, mask)[is_sampled]
        parts = gather_object([(of_tokens.double().cpu().numpy(), of_completions.double().cpu())])
        of_all_tokens = np.concatenate([of_process for of_process, _ in parts], axis=1)
        log_ratios = torch.cat([of_process for _, of_process in parts])
        finding = compare(*of_all_tokens, temperature=trainer.temperature, truncation=self._truncation())
        if finding is None:
            return
        self.are_compared = True
        median = log_ratios.median().exp()
        ess = ratio_ess(log_ratios, torch.ones_like(log_ratios, dtype=torch.bool))
        sentences = (
            f"rollouts={trainer.args.rollouts!r}: the log-probabilities {finding.difference}, {finding.cause}. The "
            f"ratio of a completion is {median:.1g} in the median, the effective sample size (ESS) {ess:.0%}."
        )
        if finding.fix:
            logger.warning(f"{sentences} {finding.fix}.")
        else:
            trainer.accelerator.print(sentences, flush=True)

    def _truncation(self) -> str:
        """By which settings tokens were left out of sampling, such as `top_p=0.9`; empty if unknown."""
        settings = set()
        for completion in self.completions:
            settings |= {f"{name}={value:g}" for name, value in truncation_of(completion).items()}
        return ", ".join(sorted(settings))

    def completed(self, trainer: Any, *, tokenize_prompts: TokenizePrompts, takes_positions: bool) -> Dataset:
        """
        The dataset of recorded rollouts, where each completion has its tokens and their log-probabilities.

        `tokenize_prompts` is the trainer's way to tokenize prompts; `takes_positions` says whether its model takes the
        positions of tokens.

        Raises:
            `ValueError`: the completions are of another temperature or tokenizer, or it is not known which model wrote
                them.
        """
        args = trainer.args
        dataset = trainer.train_dataset
        groups: list[list[dict[str, Any]]] = list(dataset[RECORDED])
        completions = [completion for group in groups for completion in group]
        _check_temperature(completions, args)
        tokenizer = conversations.tokenizer_of(trainer)
        if "completion_ids" in completions[0]:
            n_tokens = trainer.model.config.get_text_config().vocab_size
            _check_ids(completions, n_tokens, source=args.rollouts)
            _check_texts(completions[:100], tokenizer, source=args.rollouts)
        dataset = _with_texts_of_prompts(dataset, tokenizer)
        has_logps = "logprobs" in completions[0] and args.rollouts_model is None
        if has_logps and "prompt" not in completions[0]:
            return dataset
        if "logprobs" in completions[0] and not has_logps:
            logger.warning(
                f"rollouts_model={args.rollouts_model!r} computes log-probabilities, in place of those recorded in "
                f"rollouts={args.rollouts!r}."
            )
        tokenization = _Tokenization(trainer, dataset[0]["prompt"])
        places = []
        groups_of_rows = []
        for place, (prompt, group) in enumerate(zip(dataset["prompt"], groups, strict=True)):
            (prompt_ids,) = _prompt_ids(tokenize_prompts, [prompt])
            rows_of_group = []
            for completion in group:
                own_prompt = completion.pop("prompt", prompt)
                ids = prompt_ids if own_prompt == prompt else _prompt_ids(tokenize_prompts, [own_prompt])[0]
                rows_of_group.append(tokenization.rows(completion, own_prompt, ids))
            of_place = _groups_of_rows(rows_of_group)
            groups_of_rows += of_place
            places += [place] * len(of_place)
        tokenization.warn()
        if not has_logps:
            _add_logps(trainer, groups_of_rows, takes_positions=takes_positions)
        columns = dataset.remove_columns(RECORDED)
        if len(places) > len(dataset):
            columns = columns.select(places)
        return columns.add_column(RECORDED, groups_of_rows)

    def save(
        self, trainer: Any, inputs: Rows, rollout: Batch, completion_ids: Tokens, *, takes_positions: bool
    ) -> None:
        """Write this process's samples of a round of generation to a file, which a resumed run rewrites."""
        accelerator = trainer.accelerator
        prompt_ids, _, masks = self.generated[:3]  # where `mask_truncated_completions` has masked nothing yet
        logps = rollout.get("old_per_token_logps", rollout.get("opo_logps"))
        # Without a pass over the rollout there are none; with this option, none of truncated completions.
        if logps is None or trainer.mask_truncated_completions:
            logps = _scored(trainer, trainer.model, prompt_ids, completion_ids, takes_positions=takes_positions)
        rewards = _total_rewards(rollout["rewards_per_func"], trainer.reward_weights)
        n_generated = trainer.completions_generated
        first = accelerator.process_index * len(inputs)
        lines = []
        for place, (columns, ids) in enumerate(zip(inputs, completion_ids, strict=True)):
            _check_recordable(columns)
            line = dict(columns)
            line["prompt_ids"] = prompt_ids[place]
            line["completion"] = trainer.processing_class.decode(ids, skip_special_tokens=True)
            line["completion_ids"] = ids
            if masks is not None:
                line["completion_mask"] = masks[place]
            line["logprobs"] = logps[place, : len(ids)].tolist()
            line["temperature"] = trainer.temperature
            line["reward"] = rewards[place]
            group = (first + place) // trainer.num_generations
            line["group"] = f"{n_generated}-{group}"
            lines.append(line)
        folder = Path(trainer.args.output_dir) / FOLDER
        n_before = n_generated - len(inputs) * accelerator.num_processes
        if accelerator.is_main_process and folder.is_dir():
            _make_way(folder, n_before)
        accelerator.wait_for_everyone()
        folder.mkdir(parents=True, exist_ok=True)
        files.write_lines(folder / f"{n_generated:09}-{accelerator.process_index}.jsonl", lines)


def as_scored(dataset: Dataset) -> Dataset:
    """One row of a recorded dataset, with the columns that reward functions get."""
    return Dataset.from_list([_row_for_rewards(dataset[0], 0)])


def has_rewards(dataset: Dataset) -> bool:
    """Whether the completions of a recorded dataset have been scored."""
    first_completion = dataset[0][RECORDED][0]
    return "reward" in first_completion


def unscored(completions: Sequence[Any], **_: Any) -> list[None]:
    """Stand-in for a reward function where the rollouts have their rewards: new completions are unscored."""
    return [None] * len(completions)


def _row_for_rewards(group: Mapping[str, Any], place: int) -> dict[str, Any]:
    """The columns that reward functions get of the completion in a place of its group."""
    row = {name: value for name, value in group.items() if name != RECORDED}
    for name, value in group[RECORDED][place].items():
        if name != PLACE and name not in KNOWN:
            row[name] = value
    return row


# Recording


def _check_recordable(columns: Mapping[str, Any]) -> None:
    """Check that columns of a dataset, or of one of its rows, can be recorded, and read again as they are."""
    # Rows that bring their prompts' tokens, and the tools in them, are recorded with both.
    usable = {"prompt", "prompt_ids", "tools"} if "prompt_ids" in columns else {"prompt"}
    for name, value in columns.items():
        problem = f"save_rollouts=True cannot record the column {name!r}"
        if name not in usable and is_reserved(name):
            raise ValueError(
                f"{problem}: that name has a meaning in recorded rows. Rename it, or remove `save_rollouts`."
            )
        try:
            json.dumps(value)
        except TypeError as error:
            raise ValueError(
                f"{problem}: {error}. Make its values text or numbers, or remove `save_rollouts`."
            ) from error


def _total_rewards(rewards: torch.Tensor, weights: torch.Tensor) -> list[float | None]:
    """TRL's weighted sum of the rewards `[B, number of reward functions]`; `None` for an unscored completion."""
    totals = (rewards * weights.to(rewards.device)).nansum(dim=1)
    is_unscored = rewards.isnan().all(dim=1)
    totals[is_unscored] = math.nan
    return [None if math.isnan(total) else total for total in totals.tolist()]


def _make_way(folder: Path, n_before: int) -> None:
    """
    Move the rollouts of an earlier run aside if this one begins; if it was resumed after `n_before` completions,
    remove later files: before it was killed it may have gone further, in other steps.
    """
    if n_before == 0:
        aside = files.free(folder.with_name(f"{FOLDER}-replaced"))
        folder.rename(aside)
        logger.warning(f"The rollouts of an earlier run in {str(folder)!r} are moved to {str(aside)!r}.")
        return
    for file in folder.glob("[0-9]*-[0-9]*.jsonl"):
        n_generated, _, _ = file.stem.partition("-")
        if int(n_generated) > n_before:
            file.unlink()


# Checks of recorded completions


def _check_temperature(completions: Rows, args: OPOConfig) -> None:
    """Check that all completions were sampled at the temperature of the run, in float32 perhaps."""
    recorded = {completion.get("temperature") for completion in completions}
    temperatures = sorted({f"{args.temperature if value is None else value:g}" for value in recorded})
    if temperatures != [f"{args.temperature:g}"]:
        raise ValueError(
            f"temperature={args.temperature:g}, but rollouts={args.rollouts!r} were sampled at a temperature of "
            f"{' and '.join(temperatures)}. Keep those of one temperature, and set `temperature` to it."
        )


def _check_ids(completions: Rows, n_tokens: int, *, source: str) -> None:
    """Check that the model has all tokens of recorded completions: it would fail only where it meets another one."""
    for completion in completions:
        for name in ("prompt_ids", "completion_ids"):
            largest = max(completion.get(name) or (0,))
            if largest >= n_tokens:
                raise ValueError(
                    f"rollouts={source!r}, {completion[PLACE]}: `{name}` has {largest}, but the model has only "
                    f"{n_tokens:,} tokens. If the tokens are of another tokenizer, remove them and `logprobs`, and "
                    "keep the text."
                )


def _check_texts(completions: Rows, tokenizer: Any, *, source: str) -> None:
    """Check of completions that also have their text that the tokens of most say the same."""
    n_equal = 0
    for completion in completions:
        text = text_of(completion.get("completion")) or ""
        n_equal += _says(tokenizer, completion["completion_ids"], text)
    if 2 * n_equal < len(completions):
        raise ValueError(
            f"rollouts={source!r}: the tokens of most completions say something else than their text. If they are of "
            "another tokenizer, remove `completion_ids` and `logprobs`; if not, remove `completion`."
        )


def _says(tokenizer: Any, ids: Sequence[int], text: str) -> bool:
    """Whether tokens say a text, or more: a server may have cut a thought, half a letter or special tokens out."""
    text = _letters(text)
    decoded = (tokenizer.decode(ids, skip_special_tokens=skips) for skips in (False, True))
    return any(text in _letters(text_of_tokens) for text_of_tokens in decoded)


def _letters(text: str) -> str:
    """A text without white space, and without the sign for half a letter."""
    return "".join(text.replace("\ufffd", "").split())


# Tokens of text


def _with_texts_of_prompts(dataset: Dataset, tokenizer: Any) -> Dataset:
    """A recorded dataset with the text of prompts of which it has only the tokens."""
    if dataset[0]["prompt"] != ONLY_TOKENS:
        return dataset
    texts = [tokenizer.decode(group[0]["prompt_ids"]) for group in dataset[RECORDED]]
    return dataset.remove_columns("prompt").add_column("prompt", texts)


def _prompt_ids(tokenize_prompts: TokenizePrompts, prompts: Sequence[Any]) -> Tokens:
    """Tokens of prompts, as the run itself would ask for completions."""
    rendered = [prompt if isinstance(prompt, str) else conversations.as_rendered(prompt) for prompt in prompts]
    return tokenize_prompts(rendered)[0]


def _groups_of_rows(rows_of_group: list[list[Row]]) -> list[list[Row]]:
    """
    The groups of a group of conversations, some of which have several rows: in each, every conversation has another of
    its rows or, once it has no more, one that is masked. So each group has the rewards of all conversations.
    """
    n_groups = max(map(len, rows_of_group))
    groups = []
    for number in range(n_groups):
        group = []
        for rows in rows_of_group:
            has_row = number < len(rows)
            group.append(rows[number] if has_row else _masked(rows[-1]))
        groups.append(group)
    return groups


def _masked(row: Row) -> Row:
    """A row of which nothing is trained on, with the same reward."""
    return {**row, "completion_ids": row["completion_ids"][:1], "completion_mask": [0]}


class _Tokenization:
    """
    Gives recorded completions of a trainer the tokens of their prompts and, where there are none, of their text or
    messages. A text gets the token that ends a turn, after a prompt such as `prompt`. A mask leaves out what the chat
    template does not render as it was.
    """

    def __init__(self, trainer: Any, prompt: Any):
        self.tokenizer = conversations.tokenizer_of(trainer)
        self.template_options = trainer.chat_template_kwargs
        self.end_token_ids = trainer.eos_token_ids
        self.source = f"rollouts={trainer.args.rollouts!r}"
        self.end_token_id = self._end_of_turn(prompt)
        # For a warning and notes at the end:
        self.n_texts = 0
        self.n_unique = 0  # texts whose tokens do not depend on whether the prompt is before them
        self.n_added_thoughts = 0  # turns to which the chat template adds an empty thought
        self.left_out: defaultdict[str, list[str]] = defaultdict(list)  # by reason, where they are

    def _end_of_turn(self, prompt: Any) -> int | None:
        """The token that ends a completion; a chat template may end a turn by another one than the tokenizer's."""
        end = self.tokenizer.eos_token_id
        if isinstance(prompt, str):
            return end
        messages = [*prompt, {"role": "assistant", "content": "x"}]
        ids = self.tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
        return next((token for token in reversed(ids) if token in self.end_token_ids), end)

    def rows(self, row: Row, prompt: Any, prompt_ids: list[int]) -> list[Row]:
        """The rows of a completion with tokens: one, or several of a conversation."""
        row.setdefault("prompt_ids", prompt_ids)
        completion = row.pop("completion", None)
        tools = row.pop("tools", None)
        if "completion_ids" in row:
            return [row]
        if not isinstance(completion, str):
            return self._rows_of_conversation(row, prompt, completion, tools or ())
        if tools:
            messages = [{"role": "assistant", "content": completion}]
            return self._rows_of_conversation(row, prompt, messages, tools)
        self.n_texts += 1
        try:
            if not isinstance(prompt, str):
                turns.check_prompt(self.tokenizer, prompt, self.template_options)
        except UnfaithfulError as reason:
            self.left_out[str(reason)].append(row[PLACE])
            return [self._unrendered(row, completion)]
        row |= _as_sampled(self._tokens_of_text(completion))
        self.n_unique += self._is_unique(row)
        return [row]

    def _rows_of_conversation(self, row: Row, prompt: Any, completion: Any, tools: Sequence[Any]) -> list[Row]:
        if not tools and any(message.get("tool_calls") for message in completion):
            logger.warning_once(f"{self.source}: no column `tools` describes those that are called.")
        messages = [*prompt, *completion]
        rows_of_turns = turns.rows(
            self.tokenizer, messages, tools, self.template_options, self.end_token_ids, first=len(prompt)
        )
        if not rows_of_turns:
            rows_of_turns = [turns.TurnRow("", reason="no turn of the assistant is to be trained on")]
        if len(rows_of_turns) > 1 and "reward" not in row:
            reason = "a conversation that gives several rows has no `reward`, and no function can score a part of it"
            rows_of_turns = [turns.TurnRow("", reason=reason)]
        self.n_texts += len(rows_of_turns)
        rows = []
        for of_turns in rows_of_turns:
            if of_turns.reason is not None:
                self.left_out[of_turns.reason].append(row[PLACE])
                continue
            rows.append(row | of_turns.tokens(self.tokenizer))
            self.n_unique += self._is_unique(rows[-1])
            self.n_added_thoughts += turns.n_added_thoughts(of_turns, messages)
        return rows or [self._unrendered(row, conversations.spoken(completion))]

    def _unrendered(self, row: Row, text: str) -> Row:
        """A row that is not trained on: reward functions read its text, and its reward is in its group's mean."""
        ids = self._ids(text) or row["prompt_ids"][-1:]
        return row | {"completion_ids": ids, "completion_mask": [0] * len(ids)}

    def _tokens_of_text(self, text: str) -> list[int]:
        ids = self._ids(text)
        if self.end_token_id is None or (ids and ids[-1] in self.end_token_ids):
            return ids
        return [*ids, self.end_token_id]

    def _is_unique(self, row: Row) -> bool:
        """Whether the text of prompt and completion has the tokens that they have each for itself."""
        ids = [*row["prompt_ids"], *row["completion_ids"]]
        return self._ids(self.tokenizer.decode(ids)) == ids

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def warn(self) -> None:
        """Say which completions cannot be trained on, and how their tokens may differ from those that were sampled."""
        if self.left_out:
            self._report_left_out()
        if self.n_added_thoughts:
            logger.warning(
                f"{self.source}: the chat template adds an empty thought to {self.n_added_thoughts:,} turns, which "
                "counts as sampled. If the model wrote none, set `chat_template_kwargs` to {enable_thinking: false}."
            )
        if self.n_texts:
            share = 1 - self.n_unique / self.n_texts
            or_left_out = ", or they are left out" if self.left_out else ""
            logger.warning(
                f"{self.source} has no tokens: its text is tokenized again, perhaps otherwise than sampled. For "
                f"{share:.1%} of completions, that depends on whether the prompt is before them{or_left_out}."
            )

    def _report_left_out(self) -> None:
        """Warn of the completions that cannot be trained on, by reason; a `ValueError` if none is left."""
        count = sum(map(len, self.left_out.values()))
        reasons = [f"{reason} ({len(places):,}, such as {places[0]})" for reason, places in self.left_out.items()]
        problem = (
            f"{self.source}: {count:,} of its {self.n_texts:,} completions cannot be trained on: {'; '.join(reasons)}"
        )
        if count == self.n_texts:
            raise ValueError(f"{problem}. None is left: record their tokens, or change their messages.")
        logger.warning(f"{problem}. They are left out.")


def _as_sampled(ids: list[int]) -> dict[str, list[int]]:
    """The columns of a completion all of whose tokens the policy has sampled."""
    return {"completion_ids": ids, "completion_mask": [1] * len(ids)}


# Log-probabilities


def _add_logps(trainer: Any, groups: list[list[dict[str, Any]]], *, takes_positions: bool) -> None:
    """Add the log-probabilities under the model that wrote the completions, computed by all processes together."""
    args = trainer.args
    accelerator = trainer.accelerator
    tokenizer = conversations.tokenizer_of(trainer)
    policy = _behaviour_policy(args, vocabulary=tokenizer.get_vocab())
    logps_by_group = {}
    with unsharded():
        policy = policy.to(accelerator.device).eval()
        base = policy.get_base_model() if is_peft_model(policy) else policy
        add_fused_lm_head(base, trainer.temperature, args.cast_lm_head_to_fp32)
        for index in range(accelerator.process_index, len(groups), accelerator.num_processes):
            prompts = [completion["prompt_ids"] for completion in groups[index]]
            completions = [completion["completion_ids"] for completion in groups[index]]
            logps = _scored(trainer, policy, prompts, completions, takes_positions=takes_positions)
            pairs = zip(logps, completions, strict=True)
            logps_by_group[index] = [of_tokens[: len(ids)].tolist() for of_tokens, ids in pairs]
    for of_process in gather_object([logps_by_group]):
        for index, logps_of_group in of_process.items():
            for completion, logps in zip(groups[index], logps_of_group, strict=True):
                completion["logprobs"] = logps


def _behaviour_policy(args: OPOConfig, *, vocabulary: Mapping[str, int]) -> Any:
    """The model of `rollouts_model`, which wrote the completions."""
    model = args.rollouts_model
    if model is None:
        raise ValueError(
            f"rollouts={args.rollouts!r} has no column `logprobs`. "
            "Set `rollouts_model` to the model that wrote the completions."
        )
    options = dict(cast(dict, args.model_init_kwargs or {}))
    options["device_map"] = None
    options.pop("revision", None)
    with unsharded():
        policy = adapter.load(model, field="rollouts_model", trains=False, **options)
    source, revision = adapter.tokenizer_source(model, {})
    tokenizer = AutoTokenizer.from_pretrained(source, revision=revision)
    if tokenizer.get_vocab() != vocabulary:
        raise ValueError(
            f"rollouts_model={model!r} has another vocabulary than the model to train. "
            "Record log-probabilities where completions are written."
        )
    return policy


@torch.no_grad()
def _scored(trainer: Any, model: Any, prompts: Tokens, completions: Tokens, *, takes_positions: bool) -> torch.Tensor:
    """Log-probabilities `[B, T]` of completions' tokens after their prompts, at the temperature of the run."""
    prompt_ids, prompt_mask = _padded(prompts, "left")
    completion_ids, completion_mask = _padded(completions, "right")
    device = trainer.accelerator.device
    ids = torch.cat([prompt_ids, completion_ids], dim=1).to(device)
    mask = torch.cat([prompt_mask, completion_mask], dim=1).to(device)
    width = completion_ids.shape[1]
    batch_size = trainer.args.per_device_train_batch_size
    call = partial(with_positions, model) if takes_positions else model
    with disable_gradient_checkpointing(model, trainer.args.gradient_checkpointing_kwargs):
        logps_of_trl = GRPOTrainer._get_per_token_logps_and_entropies
        logps, *_ = logps_of_trl(trainer, call, ids, mask, width, batch_size)
    return logps


def _padded(tokens: Tokens, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, `[B, longest]` each, padded on a side."""
    ids = [torch.tensor(ids_of_one) for ids_of_one in tokens]
    masks = [torch.ones_like(ids_of_one) for ids_of_one in ids]
    return pad(ids, 0, side), pad(masks, 0, side)
