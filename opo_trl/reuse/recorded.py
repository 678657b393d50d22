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
from ..data.files import column
from ..metrics.opo import ratio_ess
from ..models import adapter
from ..objective import token_sum
from ..updates.padding import with_positions
from . import conversations, recorded_logps, turns
from .agent_logs import PLACE
from .conversations import UnfaithfulError
from .reading import KNOWN, ONLY_TOKENS, RECORDED, is_reserved, load_rollouts, text_of, truncation_of


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
        """
        Check that the dataset and the trainer's arguments go with `save_rollouts` or `rollouts`, and load the latter.
        `writers` are those of the trainer's arguments, by name, that would write completions, such as `tools`.

        Raises:
            `ValueError`: names the argument or column that cannot be combined with this setting.
        """
        self.num_generations = args.num_generations
        self.dataset = train_dataset
        self.reward_func = None  # that the trainer gets if the user gives none
        columns = getattr(train_dataset, "column_names", None) or ()
        if args.save_rollouts:
            images = {"image", "images"}.intersection(columns)
            # Recorded completions would be recorded again, and JSON lines hold no images.
            for name, value in {"rollouts": args.rollouts, "images": images}.items():
                if value:
                    raise ValueError(f"save_rollouts=True cannot record {name}. Remove `save_rollouts`.")
            if isinstance(train_dataset, Dataset):
                _check_recordable(train_dataset[:1])  # Columns of a stream are checked in its first rollout.
        if args.rollouts is None:
            return
        # A dataset with the column `RECORDED` has been made of recorded rollouts already; any other one is the user's.
        is_of_prompts = train_dataset is not None and RECORDED not in columns
        for name, is_given in {**writers, "train_dataset": is_of_prompts}.items():
            if is_given:
                raise ValueError(
                    f"{name} cannot be combined with rollouts={args.rollouts!r}, which bring prompts and completions. "
                    "Remove one of them."
                )
        if train_dataset is None:
            self.dataset = load_rollouts(args.rollouts, args.num_generations, args.seed)
        if has_rewards(self.dataset):
            self.reward_func = unscored  # TRL needs some function; the recorded rewards replace its `None`s.

    def select_completions(self, inputs: Rows, process: int) -> list[dict[str, Any]]:
        """
        Choose this process's recorded completions, keep them in `completions` for the other methods, and return for
        each the row, `[B]`, that TRL passes to reward functions.

        TRL repeats the row of a group for each completion of the group: each of the `inputs` is the whole group of its
        sample. Which of the group's completions a sample is follows from its index over all processes.
        """
        first = process * len(inputs)  # index over all processes of this one's first sample
        self.completions = []
        rows = []
        for index, group in enumerate(inputs, first):
            place = index % self.num_generations
            self.completions.append(group[RECORDED][place])
            rows.append(_row_for_rewards(group, place))
        return rows

    def recall(self, prompts: list[Any], trainer: Any, *, tokenize_prompts: TokenizePrompts) -> dict[str, Any]:
        """
        TRL's `rollout_func`: it returns the recorded completions that were last selected, in place of new ones.

        The tokens of the prompts are the recorded ones or, without these, what `tokenize_prompts`, the trainer's own
        way, makes of `prompts`.
        """
        rollout = {"prompt_ids": _prompt_ids(tokenize_prompts, prompts)}
        # From the columns of recorded rollouts to TRL's names.
        entries = {
            "prompt_ids": "prompt_ids",
            "completion_ids": "completion_ids",
            "logprobs": "logprobs",
            "completion_mask": "env_mask",
        }
        for name, entry in entries.items():
            if name in self.completions[0]:
                rollout[entry] = [completion[name] for completion in self.completions]
        return rollout

    def rewards(self, weights: torch.Tensor) -> torch.Tensor | None:
        """
        The recorded rewards, as if a reward function had returned them: `[B, number of reward functions]`, such that
        TRL's weighted sum over the functions is the recorded reward. `None` if no rewards were recorded. `weights` are
        the functions', `[number of reward functions]`.
        """
        if "reward" not in self.completions[0]:
            return None
        recorded = [completion["reward"] for completion in self.completions]
        recorded = [torch.nan if reward is None else reward for reward in recorded]  # NaN: TRL's mark for unscored
        # The first function with a weight stands for all of them; it gets what gives the reward when it is weighted.
        column = int(weights.nonzero()[0])
        rewards = torch.full((len(recorded), len(weights)), torch.nan)
        rewards[:, column] = torch.tensor(recorded) / weights[column].cpu()
        return rewards

    def behaviour_logps(self, like: torch.Tensor) -> torch.Tensor:
        """
        The recorded log-probabilities of the selected completions' tokens, padded with zeros on the right to the shape
        of `like`, `[B, T]`, and on its device.
        """
        of_completions = [torch.tensor(completion["logprobs"]) for completion in self.completions]
        logps = pad(of_completions, padding_value=0, padding_side="right")
        n_missing = like.shape[1] - logps.shape[1]
        return torch.nn.functional.pad(logps, (0, n_missing)).to(like.device)

    def compare(
        self, trainer: Any, recorded: torch.Tensor, current: torch.Tensor, entropies: torch.Tensor, mask: torch.Tensor
    ) -> None:
        """
        Warn, or only print, what the recorded log-probabilities look like where they are not the policy's: those of
        another temperature, of another model and so on. This is said once, by all processes together.

        `recorded` and the policy's `current` log-probabilities, the `entropies` of the policy in nats and the `mask`
        of the sampled tokens are `[B, T]` each.
        """
        if self.are_compared:
            return
        of_tokens = torch.stack([recorded, current, entropies])[:, mask]  # `[3, sampled tokens]`
        has_sampled = mask.any(dim=1)
        log_ratios_here = token_sum(current - recorded, mask)[has_sampled]  # of completions
        parts = gather_object([(of_tokens.double().cpu().numpy(), log_ratios_here.double().cpu())])
        of_all_tokens = np.concatenate([of_process for of_process, _ in parts], axis=1)
        log_ratios = torch.cat([of_process for _, of_process in parts])
        finding = recorded_logps.compare(
            *of_all_tokens, temperature=trainer.temperature, truncation=self._truncation()
        )
        if finding is None:
            return  # They agree within rounding, or are too few to tell: those of later rollouts are compared.
        self.are_compared = True
        median_ratio = log_ratios.median().exp()
        ess = ratio_ess(log_ratios, torch.ones_like(log_ratios, dtype=torch.bool))
        sentences = (
            f"rollouts={trainer.args.rollouts!r}: the log-probabilities {finding.difference}, {finding.cause}. The "
            f"ratio of a completion is {median_ratio:.1g} in the median, the effective sample size (ESS) {ess:.0%}."
        )
        if finding.fix:
            logger.warning(f"{sentences} {finding.fix}.")
        else:  # The one finding without a fix: another policy has sampled the tokens, which is no mistake.
            trainer.accelerator.print(sentences, flush=True)

    def _truncation(self) -> str:
        """
        The settings of `top_p`, `top_k` and `min_p` by which tokens were left out when the selected completions were
        sampled, as text such as `top_p=0.9`; empty if none were recorded.
        """
        settings = set()
        for completion in self.completions:
            settings |= {f"{name}={value:g}" for name, value in truncation_of(completion).items()}
        return ", ".join(sorted(settings))

    def completed(self, trainer: Any, *, tokenize_prompts: TokenizePrompts, takes_positions: bool) -> Dataset:
        """
        The trainer's dataset of recorded rollouts, in which each completion gets the tokens and log-probabilities that
        its record lacks. A conversation that no single text can hold becomes several rows, in groups of their own.

        `tokenize_prompts` is the trainer's way to tokenize prompts; `takes_positions` says whether its model takes the
        positions of tokens.

        Raises:
            `ValueError`: the completions are of another temperature or tokenizer, or it is not known which model wrote
                them.
        """
        args = trainer.args
        dataset = trainer.train_dataset
        groups: list[list[dict[str, Any]]] = list(dataset[RECORDED])
        completions = [completion for group in groups for completion in group]  # all with the same columns
        _check_temperature(completions, args)
        tokenizer = conversations.tokenizer_of(trainer)
        if "completion_ids" in completions[0]:
            n_tokens = trainer.model.config.get_text_config().vocab_size
            _check_ids(completions, n_tokens, source=args.rollouts)
            _check_texts(completions[:100], tokenizer, source=args.rollouts)
        dataset = _with_texts_of_prompts(dataset, tokenizer)
        has_logps = "logprobs" in completions[0] and args.rollouts_model is None
        # Log-probabilities are only read with tokens, so nothing is missing, unless completions of a group have
        # prompts of their own ("prompt" in a completion), whose tokens may be missing.
        if has_logps and "prompt" not in completions[0]:
            return dataset
        if "logprobs" in completions[0] and not has_logps:
            logger.warning(
                f"rollouts_model={args.rollouts_model!r} computes log-probabilities, in place of those recorded in "
                f"rollouts={args.rollouts!r}."
            )
        tokenization = _Tokenization(trainer, dataset[0]["prompt"])
        groups_of_rows = []
        places = []  # of each of these groups, the row of the dataset from which it comes
        for place, (prompt, group) in enumerate(zip(dataset["prompt"], groups, strict=True)):
            (prompt_ids,) = _prompt_ids(tokenize_prompts, [prompt])
            rows_of_group = []
            for completion in group:
                # A completion has a prompt of its own where prompts differ within groups.
                own_prompt = completion.get("prompt", prompt)
                ids = prompt_ids if own_prompt == prompt else _prompt_ids(tokenize_prompts, [own_prompt])[0]
                rows_of_group.append(tokenization.rows(completion, own_prompt, ids))
            of_place = _split_into_groups(rows_of_group)
            groups_of_rows += of_place
            places += [place] * len(of_place)
        tokenization.warn()
        if not has_logps:
            _add_logps(trainer, groups_of_rows, takes_positions=takes_positions)
        columns = dataset.remove_columns(RECORDED)
        if len(places) > len(dataset):  # Some group has become several, which repeat its other columns.
            columns = columns.select(places)
        return columns.add_column(RECORDED, cast(Any, column(groups_of_rows)))

    def save(
        self, trainer: Any, inputs: Rows, rollout: Batch, completion_ids: Tokens, *, takes_positions: bool
    ) -> None:
        """
        Write this process's samples of a round of generation to a file of JSON lines in the run's output folder, as
        rows that `rollouts` reads. `inputs` are their rows of the dataset, `completion_ids` the generated tokens;
        `takes_positions` says whether the model takes the positions of tokens.

        The file is named after the number of completions that the run has generated, and the process: a resumed run
        replaces the files of the rounds that it repeats.
        """
        accelerator = trainer.accelerator
        # What `_generate` returned: its masks, 0 for a tool's tokens, are not changed by `mask_truncated_completions`.
        prompt_ids, _, tool_masks = self.generated[:3]
        logps = rollout.get("old_per_token_logps")  # by the server that has sampled the rollout in advance
        if logps is None and not trainer.mask_truncated_completions:
            logps = rollout.get("opo_logps")  # as TRL has computed them
        # A run that needs no log-probabilities of the rollout has none; with that option, truncated completions have
        # none. They are computed here, by the policy that has just sampled the tokens.
        if logps is None:
            logps = _scored(trainer, trainer.model, prompt_ids, completion_ids, takes_positions=takes_positions)
        rewards = _total_rewards(rollout["rewards_per_func"], trainer.reward_weights)
        n_generated = trainer.completions_generated
        first = accelerator.process_index * len(inputs)  # index over all processes of this one's first sample
        lines = []
        for place, (columns, ids) in enumerate(zip(inputs, completion_ids, strict=True)):
            _check_recordable(columns)
            line = dict(columns)
            line["prompt_ids"] = prompt_ids[place]
            line["completion"] = trainer.processing_class.decode(ids, skip_special_tokens=True)
            line["completion_ids"] = ids
            if tool_masks is not None:
                line["completion_mask"] = tool_masks[place]
            line["logprobs"] = logps[place, : len(ids)].tolist()
            line["temperature"] = trainer.temperature
            line["reward"] = rewards[place]
            group = (first + place) // trainer.num_generations
            line["group"] = f"{n_generated}-{group}"
            lines.append(line)
        folder = Path(trainer.args.output_dir) / FOLDER
        n_before = n_generated - len(inputs) * accelerator.num_processes  # completions before this round
        if accelerator.is_main_process and folder.is_dir():
            _remove_outdated(folder, n_before)
        accelerator.wait_for_everyone()
        folder.mkdir(parents=True, exist_ok=True)
        files.write_lines(folder / f"{n_generated:09}-{accelerator.process_index}.jsonl", lines)


def as_scored(dataset: Dataset) -> Dataset:
    """
    A dataset of one row, with the columns that reward functions get of the first completion of a recorded dataset:
    enough to look up which columns there are.
    """
    return Dataset.from_list([_row_for_rewards(dataset[0], 0)])


def has_rewards(dataset: Dataset) -> bool:
    """Whether the completions of a recorded dataset have been scored."""
    first_completion = dataset[0][RECORDED][0]
    return "reward" in first_completion


def unscored(completions: Sequence[Any], **_: Any) -> list[None]:
    """
    The reward function of a run whose rollouts bring their rewards, which replace its result. What the run generates
    itself, as in evaluation, stays unscored: one `None` for each completion.
    """
    return [None] * len(completions)


def _row_for_rewards(group: Mapping[str, Any], place: int) -> dict[str, Any]:
    """
    The columns that reward functions get of one completion: those of its `group`, a row of the recorded dataset, and
    those of its own, which is number `place` in the group's list. Where prompts differ in groups, it has its own.
    """
    row = {name: value for name, value in group.items() if name != RECORDED}
    for name, value in group[RECORDED][place].items():
        # `PLACE` is where it was read. The `KNOWN` columns, such as tokens, are the package's own, but for the prompt.
        if name == "prompt" or name not in (PLACE, *KNOWN):
            row[name] = value
    return row


# Recording


def _check_recordable(columns: Mapping[str, Any]) -> None:
    """
    Check that columns, of a dataset (lists of values) or of one of its rows (values), can be recorded and read again
    as they are: JSON can hold them, and none has a name that means something else in recorded rollouts.
    """
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
    """
    Each completion's weighted sum of its `rewards`, `[B, number of reward functions]`, as TRL computes it: a function
    that did not score it (NaN) adds nothing. `None` for a completion that no function has scored.
    """
    totals = (rewards * weights.to(rewards.device)).nansum(dim=1)
    is_unscored = rewards.isnan().all(dim=1)
    totals[is_unscored] = math.nan
    return [None if math.isnan(total) else total for total in totals.tolist()]


def _remove_outdated(folder: Path, n_before: int) -> None:
    """
    Clear the folder of recorded rollouts of what this run is about to replace. `n_before` is the number of completions
    that the run has generated before this round.

    If it is 0, a run begins, and the folder is an earlier run's: it is moved aside. Otherwise, files of more than
    `n_before` completions are deleted: a run that was killed may have gone on after the checkpoint from which it is
    resumed, and its rounds may have had other sizes.
    """
    if n_before == 0:
        aside = files.free(folder.with_name(f"{FOLDER}-replaced"))
        folder.rename(aside)
        logger.warning(f"The rollouts of an earlier run in {str(folder)!r} are moved to {str(aside)!r}.")
        return
    for file in folder.glob("[0-9]*-[0-9]*.jsonl"):
        n_generated, _, _ = file.stem.partition("-")  # the name is `{completions generated}-{process}.jsonl`
        if int(n_generated) > n_before:
            file.unlink()


# Checks of recorded completions


def _check_temperature(completions: Rows, args: OPOConfig) -> None:
    """Check that all completions for which a temperature was recorded were sampled at that of the run."""
    recorded = {completion.get("temperature") for completion in completions}
    # As text of six digits: a temperature that somebody has kept in float32 is the same as well.
    temperatures = sorted({f"{args.temperature if value is None else value:g}" for value in recorded})
    if temperatures != [f"{args.temperature:g}"]:
        raise ValueError(
            f"temperature={args.temperature:g}, but rollouts={args.rollouts!r} were sampled at a temperature of "
            f"{' and '.join(temperatures)}. Keep those of one temperature, and set `temperature` to it."
        )


def _check_ids(completions: Rows, n_tokens: int, *, source: str) -> None:
    """
    Check that all recorded tokens are below `n_tokens`, the size of the model's vocabulary. The run would fail only
    when it meets one that is not, perhaps after hours. `source`, the setting `rollouts`, is for the message.
    """
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
    """
    Check that the recorded tokens of at least half of the completions decode to their recorded text, as a sign that
    they are of this tokenizer. A completion without one text, such as several messages, passes. `source`, the setting
    `rollouts`, is for the message.
    """
    n_equal = 0
    for completion in completions:
        text = text_of(completion.get("completion")) or ""  # Any tokens contain the empty text.
        n_equal += _decode_to(tokenizer, completion["completion_ids"], text)
    if 2 * n_equal < len(completions):
        raise ValueError(
            f"rollouts={source!r}: the tokens of most completions say something else than their text. If they are of "
            "another tokenizer, remove `completion_ids` and `logprobs`; if not, remove `completion`."
        )


def _decode_to(tokenizer: Any, ids: Sequence[int], text: str) -> bool:
    """
    Whether tokens decode to a text that contains `text`, whatever the white space. They may say more than it: a server
    may have cut a thought, half a letter or the special tokens out of its text, or kept the special tokens.
    """
    text = _without_spaces(text)
    decoded = (tokenizer.decode(ids, skip_special_tokens=skips) for skips in (False, True))
    return any(text in _without_spaces(text_of_tokens) for text_of_tokens in decoded)


def _without_spaces(text: str) -> str:
    """A text without white space and without U+FFFD, as which a letter is decoded that is cut between two tokens."""
    return "".join(text.replace("\ufffd", "").split())


# Tokens of text


def _with_texts_of_prompts(dataset: Dataset, tokenizer: Any) -> Dataset:
    """A recorded dataset whose prompts are text: where it has only their tokens, these are decoded."""
    # Rows that were recorded with the tokens of the prompt alone have this placeholder as their prompt.
    if dataset[0]["prompt"] != ONLY_TOKENS:
        return dataset
    texts = [tokenizer.decode(group[0]["prompt_ids"]) for group in dataset[RECORDED]]
    return dataset.remove_columns("prompt").add_column("prompt", texts)


def _prompt_ids(tokenize_prompts: TokenizePrompts, prompts: Sequence[Any]) -> Tokens:
    """
    The tokens of prompts, each text or messages, with which the run itself would ask for completions: messages get the
    chat template with its generation prompt. `tokenize_prompts` is the trainer's, which returns the tokens first.
    """
    rendered = [prompt if isinstance(prompt, str) else conversations.as_rendered(prompt) for prompt in prompts]
    return tokenize_prompts(rendered)[0]


def _split_into_groups(rows_of_group: list[list[Row]]) -> list[list[Row]]:
    """
    Divide the rows of a group's conversations, a list for each conversation, into groups with one row of each.

    A conversation may have several rows: the first group has the first row of each, the second the second, and so on.
    Where a conversation has no more rows, a masked one, on which nothing is trained, has its reward. So every group
    has the rewards of all conversations, and their mean.
    """
    n_groups = max(map(len, rows_of_group))
    groups = []
    for number in range(n_groups):
        group = []
        for rows in rows_of_group:
            has_row = number < len(rows)
            group.append(rows[number] if has_row else _masked(rows[-1]))  # the last row, as all have its reward
        groups.append(group)
    return groups


def _masked(row: Row) -> Row:
    """The row with only its first token, which is not trained on (a mask of 0); its reward and the rest stay."""
    return {**row, "completion_ids": row["completion_ids"][:1], "completion_mask": [0]}


class _Tokenization:
    """
    Gives recorded completions of a trainer the tokens of their prompts and, where there are none, of their text or
    messages. A text gets the token that ends a turn, after a prompt such as `example_prompt`. A mask leaves out what
    the chat template does not render as it was.
    """

    def __init__(self, trainer: Any, example_prompt: Any):
        """
        Prepare for the recorded completions of a trainer. `example_prompt`, one of their prompts, shows whether they
        are text or messages, and so which token ends a completion.
        """
        self.tokenizer = conversations.tokenizer_of(trainer)
        self.template_options = trainer.chat_template_kwargs
        self.end_token_ids = trainer.eos_token_ids
        self.source = f"rollouts={trainer.args.rollouts!r}"  # for messages
        # The token that ends a completion; for messages, the chat template's. `None` if the tokenizer has none.
        self.end_token_id: int | None = self._end_of_turn(example_prompt)
        # Counts for the warnings at the end, of completions and of rows of conversations:
        self.n_texts = 0  # that had no tokens
        self.n_unique = 0  # texts whose tokens do not depend on whether the prompt is before them
        self.n_added_thoughts = 0  # turns to which the chat template adds an empty thought
        # By the reason why they cannot be trained on, the places in the file of those that are left out.
        self.left_out: defaultdict[str, list[str]] = defaultdict(list)

    def _end_of_turn(self, prompt: Any) -> int | None:
        """
        The token that ends a completion after a prompt such as this one. For text, it is the tokenizer's (`None` if it
        has none). For messages, it is the last end token that the chat template writes after an answer, which may be
        another one, or the tokenizer's if the template writes none.
        """
        end_of_tokenizer = self.tokenizer.eos_token_id
        if isinstance(prompt, str):
            return end_of_tokenizer
        messages = [*prompt, {"role": "assistant", "content": "x"}]
        ids = self.tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
        return next((token for token in reversed(ids) if token in self.end_token_ids), end_of_tokenizer)

    def rows(self, row: Row, prompt: Any, prompt_ids: list[int]) -> list[Row]:
        """
        The rows of one recorded completion (`row`), each with the tokens of its prompt and completion: one row, or
        several of a conversation whose turns no single text has.

        Recorded tokens are kept. A text is tokenized as it is, and gets the token that ends a turn. Messages are
        rendered by the chat template; so is a text with `tools`, which stand in the rendered prompt. A completion that
        cannot be rendered as it was is noted in `left_out`, and its row is masked.
        """
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
            return [self._masked_row(row, completion)]
        row |= _as_sampled(self._tokens_of_text(completion))
        self.n_unique += self._is_unique(row)
        return [row]

    def _rows_of_conversation(self, row: Row, prompt: Any, completion: Any, tools: Sequence[Any]) -> list[Row]:
        """
        The rows, with tokens, of a recorded `completion` of messages after a `prompt` of messages: the chat template
        renders them, and the assistant's turns in the completion count as sampled.

        Turns that the template cannot render as they were are noted in `left_out` with the reason; if no row is left,
        the conversation is one masked row. `row` has its other columns, such as the reward, which each row gets.
        """
        if not tools and any(message.get("tool_calls") for message in completion):
            logger.warning_once(f"{self.source}: no column `tools` describes those that are called.")
        messages = [*prompt, *completion]
        rows_of_turns = turns.rows(
            self.tokenizer, messages, tools, self.template_options, self.end_token_ids, first=len(prompt)
        )
        if not rows_of_turns:
            # A row with a `reason` is left out.
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
        return rows or [self._masked_row(row, conversations.spoken(completion))]

    def _masked_row(self, row: Row, text: str) -> Row:
        """
        The row of a completion that is not trained on, with the tokens of its text and a mask of 0. It stays in its
        group because reward functions read its text, and its reward is in its group's mean.
        """
        ids = self._ids(text) or row["prompt_ids"][-1:]  # A completion has at least one token.
        return row | {"completion_ids": ids, "completion_mask": [0] * len(ids)}

    def _tokens_of_text(self, text: str) -> list[int]:
        """The tokens of a completion's text, with the token that ends a completion if the text has none at its end."""
        ids = self._ids(text)
        if self.end_token_id is None or (ids and ids[-1] in self.end_token_ids):
            return ids
        return [*ids, self.end_token_id]

    def _is_unique(self, row: Row) -> bool:
        """
        Whether prompt and completion, decoded and tokenized again as one text, have the tokens of the row. If not, the
        tokens that were sampled may have been others than the row's.
        """
        ids = [*row["prompt_ids"], *row["completion_ids"]]
        return self._ids(self.tokenizer.decode(ids)) == ids

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def warn(self) -> None:
        """
        Warn, once all completions have their tokens, which of them cannot be trained on, and how many may have other
        tokens than were sampled. Raises a `ValueError` if none can be trained on.
        """
        if self.left_out:
            self._report_left_out()
        if self.n_added_thoughts:
            logger.warning(
                f"{self.source}: the chat template adds an empty thought to {self.n_added_thoughts:,} turns, which "
                "counts as sampled. If the model wrote none, set `chat_template_kwargs` to {enable_thinking: false}."
            )
        if self.n_texts:
            share = 1 - self.n_unique / self.n_texts  # Those that are left out count as not unique.
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
    """
    Add to each completion of the `groups` its `logprobs`, the log-probabilities of its tokens under the model that
    wrote it (`rollouts_model`). Of n processes, each computes those of every n-th group, and all get all.
    """
    args = trainer.args
    accelerator = trainer.accelerator
    tokenizer = conversations.tokenizer_of(trainer)
    policy = _behaviour_policy(args, vocabulary=tokenizer.get_vocab())
    logps_by_group = {}
    with unsharded():
        policy = policy.to(accelerator.device).eval()
        # TRL's head computes log-probabilities at the run's temperature, without the logits of all tokens at once.
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
    """
    Load the model of `rollouts_model`, which wrote the completions, on the CPU.

    Raises:
        `ValueError`: the setting is missing, or this model's tokens are not those of `vocabulary`, the tokenizer's of
            the model to train.
    """
    model = args.rollouts_model
    if model is None:
        raise ValueError(
            f"rollouts={args.rollouts!r} has no column `logprobs`. "
            "Set `rollouts_model` to the model that wrote the completions."
        )
    options = dict(cast(dict, args.model_init_kwargs or {}))
    # These options are of the model to train: the revision is not this model's, and where it goes is decided later.
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
    """
    Log-probabilities `[B, T]`, under `model`, of the tokens of completions after the tokens of their prompts, at the
    temperature of the run; T is the longest completion's length. With `takes_positions`, the model is told the
    positions of tokens, so that padding on the left does not count.
    """
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
    """
    The lists of tokens as a tensor, and the mask of their tokens (1; 0 for padding), `[B, longest]` each. Both are
    padded with 0 on `side`, "left" or "right".
    """
    ids = [torch.tensor(ids_of_one) for ids_of_one in tokens]
    masks = [torch.ones_like(ids_of_one) for ids_of_one in ids]
    return pad(ids, 0, side), pad(masks, 0, side)
