"""
Pivots: the turns of logged conversations as prompts for reinforcement learning (PivotRL, arXiv 2603.21383).

Each turn of the assistant is a row of a dataset: what the model read before it, as tokens, and what it did there. The
policy acts in that state, and [`rewards.action_reward`] says whether it does the same. docs/pivots.md explains it.
"""

import json
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa
from datasets import Dataset, DatasetDict
from tqdm import tqdm

from ..data.files import column
from ..data.prompt_ids import PROMPT_IDS
from ..rewards.actions import SAME, ActionReader, logged_action
from . import turns
from .agent_logs import PLACE, Row, Rows, place_of, rollout_of_items
from .conversations import UnfaithfulError, as_rendered, is_trained
from .reading import KNOWN, load_conversations, load_files
from .response_items import UnreadableError


logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]

# Columns of a pivot; those of the log that have another name follow them.
COLUMNS = ("prompt", PROMPT_IDS, "action", "tools", "trajectory", "turn")
_AS_JSON = ("prompt", "action", "tools", "overlap")  # Their parts have several types.

# Reward of an action that a file names as the expected one: it is at least any `min_reward`.
_EXPECTED = math.inf


@dataclass
class Trajectory:
    """A logged conversation, of whose messages the assistant's from the place `first` on are states to act in."""

    name: str
    messages: list[Row]
    tools: list[Any]
    first: int
    reward: float | None = None
    columns: Row = field(default_factory=dict)  # of the log, for reward functions

    @property
    def actions(self) -> list[int]:
        """The places of the messages that are actions."""
        places = range(self.first, len(self.messages))
        return [place for place in places if self.messages[place]["role"] == "assistant"]

    @property
    def beginning(self) -> str:
        """What stands before the assistant's first answer to the user: the same for all trajectories of a task."""
        roles = [message["role"] for message in self.messages]
        spoken = [place for place, role in enumerate(roles) if role == "assistant"]
        # A greeting, which may be the same in all tasks, is no answer.
        answers = [place for place in spoken if "user" in roles[:place]]
        first, *_ = answers or spoken
        return json.dumps([self.tools, self.messages[:first]], default=str)


class LeftOut:
    """States that are left out, by reason."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.examples: dict[str, str] = {}  # the first state of each reason

    def add(self, reason: str, trajectory: Trajectory, turn: int | None = None, count: int = 1) -> None:
        """
        Count `count` states of a trajectory that are left out for this reason: the one in which the message `turn` was
        the action or, without it, all of the trajectory. The first of each reason is kept as an example.
        """
        example = trajectory.name if turn is None else f"{trajectory.name}, message {turn}"
        self.counts[reason] = self.counts.get(reason, 0) + count
        self.examples.setdefault(reason, example)

    def __str__(self) -> str:
        parts = [f"{count:,} {reason} (first: {self.examples[reason]})" for reason, count in self.counts.items()]
        return "; ".join(parts)


def to_pivots(
    source: str,
    tokenizer: Any,
    *,
    min_reward: float | None = None,
    messages: bool = False,
    max_prompt_length: int | None = None,
    test_fraction: float = 0.0,
    seed: int = 42,
    overlap: Mapping[str, float] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> DatasetDict:
    """
    The turns of logged conversations as a dataset with a row for each state in which the assistant has acted.

    Its columns are `prompt`, the messages before the turn; `prompt_ids`, the tokens that the model gets for them, with
    the tools of this conversation; `action`, the message with which the assistant went on; `tools`; `trajectory`, a
    name; `turn`, the place of the action among the messages; and those of the log.

    Args:
        source (`str`):
            A file, a folder or a dataset on the Hub with conversations, as for `rollouts` (docs/reuse.md), or rows of
            NeMo Gym with `expected_action`, which are taken as they are.
        tokenizer (`PreTrainedTokenizerBase`):
            That of the model to train.
        min_reward (`float`, *optional*):
            Least reward of a conversation whose turns are taken: a logged mistake is no model. By default the best
            reward in the log. Without rewards, all turns are taken, with a warning.
        messages (`bool`, *optional*, defaults to `False`):
            Whether to take turns that are messages without calls, too. Any message is right there.
        max_prompt_length (`int`, *optional*):
            Most tokens of a prompt. By default any number.
        test_fraction (`float`, *optional*, defaults to `0.0`), seed (`int`, *optional*, defaults to `42`):
            Share to hold out as the split `test`, in `[0, 1)`, and which: of tasks, that is of trajectories that begin
            alike, at least one. The rows of a task stay together.
        overlap (`dict[str, float]`, *optional*):
            Parameters (`tool.parameter`) whose text only needs this share of the logged words, in `[0, 1]`.
        chat_template_kwargs (`dict`, *optional*):
            Options of the chat template, such as `{"enable_thinking": False}`. They are part of the tokens.

    Returns:
        `DatasetDict`: the splits `train` and, if rows are held out, `test`. A warning counts by reason what is left
        out.

    Raises:
        `ValueError`: `test_fraction` is out of its range, the log cannot be read, it has no rewards for `min_reward`,
            the tokenizer does not say how its model writes calls, or no state, or no trajectory to train on, is left.
    """
    if not 0 <= test_fraction < 1:
        raise ValueError(f"test_fraction={test_fraction!r} must be a share from 0 to less than 1.")
    reader = ActionReader(tokenizer)
    trajectories = _trajectories(source)
    left_out = LeftOut()
    chosen = _rewarded(trajectories, min_reward, left_out, source)
    _warn_of_undeclared(chosen, source)
    states = partial(_states, reader, left_out, messages, max_prompt_length, chat_template_kwargs or {})
    rows: Rows = []
    beginnings: list[str] = []  # of each row's trajectory
    for trajectory, row in _without_repetition(states, chosen, left_out):
        rows.append({**row, "overlap": dict(overlap)} if overlap else row)
        beginnings.append(trajectory.beginning)
    if left_out.counts:
        logger.warning(f"{source!r}: states that are left out: {left_out}.")
    if not rows:
        raise ValueError(f"{source!r} has no state to train on: {left_out or 'the assistant does nothing'}.")
    return _splits(rows, beginnings, test_fraction, seed)


def _without_repetition(
    states: Callable[[Trajectory], Iterator[Row]], trajectories: Sequence[Trajectory], left_out: LeftOut
) -> Iterator[tuple[Trajectory, Row]]:
    """
    The rows that `states` makes of trajectories, each with its trajectory. Those that repeat an earlier state and
    action are counted in `left_out`.
    """
    known: set[str] = set()  # states with their actions
    for trajectory in tqdm(trajectories, "trajectories", leave=False, delay=1):
        for row in states(trajectory):
            # `logged_action` makes actions equal that are written differently, such as arguments as JSON.
            key = repr((row[PROMPT_IDS], logged_action(row["action"])))
            if key in known:
                left_out.add("that repeat an earlier state and action", trajectory, row["turn"])
                continue
            known.add(key)
            yield trajectory, row


def _states(
    reader: ActionReader,
    left_out: LeftOut,
    takes_messages: bool,
    max_prompt_length: int | None,
    chat_template_kwargs: Mapping[str, Any],
    trajectory: Trajectory,
) -> Iterator[Row]:
    """
    The rows of the states of a trajectory, one for each of its actions: what the model read before, as messages and as
    tokens, and what it did. States that cannot be learnt from are counted in `left_out`, with the reason.

    `takes_messages`: whether an action may be a message without calls. `max_prompt_length`: most tokens of a prompt;
    `None` for any number.
    """
    for place in trajectory.actions:
        action = _action(trajectory.messages[place])
        reason = _why_not_taken(trajectory.messages[place], action, takes_messages=takes_messages)
        if reason is not None:
            left_out.add(reason, trajectory, place)
            continue
        before = trajectory.messages[:place]
        try:
            ids = _prompt_ids(reader, before, action, trajectory.tools, chat_template_kwargs)
        except UnfaithfulError as error:
            left_out.add(f"for which {error}", trajectory, place)
            continue
        if max_prompt_length is not None and len(ids) > max_prompt_length:
            left_out.add(f"whose prompt has more than {max_prompt_length:,} tokens", trajectory, place)
            continue
        yield {
            **trajectory.columns,
            "prompt": [_plain(message) for message in before],
            PROMPT_IDS: ids,
            "action": action,
            "tools": trajectory.tools,
            "trajectory": trajectory.name,
            "turn": place,
        }


def _rewarded(
    trajectories: Sequence[Trajectory], min_reward: float | None, left_out: LeftOut, source: str
) -> list[Trajectory]:
    """
    The trajectories with at least `min_reward` or, without it, with the highest reward of all. If none has a reward,
    all of them, with a warning; a `min_reward` is a `ValueError` then. Those that are not chosen are counted in
    `left_out`; `source`, the log's name, is for messages.
    """
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
    if not rewards:
        if min_reward is not None:
            raise ValueError(f"min_reward={min_reward:g}, but {source!r} has no rewards. Remove it.")
        n_states = sum(len(trajectory.actions) for trajectory in trajectories)
        logger.warning(
            f"{source!r} has no rewards: all {n_states:,} states of its {len(trajectories):,} trajectories are taken "
            "as good examples. Add `reward` to leave out those that have failed."
        )
        return list(trajectories)
    best = max(rewards)
    least = best if min_reward is None else min_reward
    if min_reward is None and min(rewards) == best <= 0:
        logger.warning(
            f"{source!r}: all {len(rewards):,} rewards are {best:g}, so trajectories that have failed would be taken "
            "as good examples. Set `min_reward` (`--min-reward`) above it to leave them out."
        )
    chosen = []
    for trajectory in trajectories:
        reward = trajectory.reward
        # A sum of parts may be 0.9999999999999999 where another is 1.
        if reward is not None and (reward >= least or math.isclose(reward, least)):
            chosen.append(trajectory)
        else:
            reason = f"of a trajectory with a reward below {least:g}, or with none"
            left_out.add(reason, trajectory, count=len(trajectory.actions))
    return chosen


def _warn_of_undeclared(trajectories: Sequence[Trajectory], source: str) -> None:
    """
    Warn how many trajectories call a tool that is not among their `tools`, so that their prompts do not tell the model
    of it. `source`, the log's name, is for the message.
    """
    examples = []
    for trajectory in trajectories:
        declared = {tool.get("function", tool).get("name") for tool in trajectory.tools}
        actions = [trajectory.messages[place] for place in trajectory.actions]
        called = [call["function"]["name"] for action in actions for call in action.get("tool_calls") or ()]
        undeclared = [name for name in called if name not in declared]
        if undeclared:
            examples.append(f"{trajectory.name}: {undeclared[0]!r}")
    if examples:
        logger.warning(
            f"{source!r}: {len(examples):,} of its {len(trajectories):,} trajectories call tools that are not "
            f"in their `tools` (first: {examples[0]}). The prompt does not show them. Add what the agent had."
        )


def _why_not_taken(message: Row, action: Row, *, takes_messages: bool) -> str | None:
    """
    Why a logged message is no action to learn, as the rest of a sentence that begins with "states"; `None` if it is
    one. `action` is what the message says and calls. `takes_messages`: whether an action may be a message without
    calls.
    """
    if not is_trained(message):
        return "that are marked as not to be trained on"
    calls = action.get("tool_calls")
    if calls:
        are_objects = all(isinstance(call["function"]["arguments"], Mapping) for call in calls)
        return None if are_objects else "whose logged call has arguments that are no JSON object"
    if message.get("function_call"):
        return "whose logged call is a `function_call`: write it as `tool_calls`"
    if not str(action["content"]).strip():
        return "whose logged action is empty"
    return None if takes_messages else "whose logged action is a message"


def _prompt_ids(
    reader: ActionReader, before: Messages, action: Row, tools: Sequence[Any], options: Mapping[str, Any]
) -> list[int]:
    """
    The tokens that a model gets for the messages `before` an action: the chat template with its generation prompt, the
    `tools` and the run's `options`. They are checked as well: the logged `action`, rendered behind them, has to be
    read by `reader` as the same action, as the policy's will be.

    Raises:
        [`UnfaithfulError`]: the chat template leaves something of the messages out, or writes the action such that it
            is read as another one.
    """
    tokenizer = reader.tokenizer
    text, ids = turns.context(tokenizer, before, tools, options)
    # The action is as templates take it, with the nulls in the arguments of its calls.
    text_with_action = turns.ChatTemplate(tokenizer, tools, options).text([*as_rendered(before), action])
    if not text_with_action.startswith(text):
        return ids  # The prompt opens a thought that the log does not have: the policy writes its own.
    written = tokenizer(text_with_action.removeprefix(text), add_special_tokens=False)["input_ids"]
    done = reader.read(written, prompt_ids=ids, tools=tools)
    verdict = reader.verdict(logged_action(action), done, tools, {})  # `{}`: no text that only has to overlap
    if verdict != SAME:
        raise UnfaithfulError(f"the chat template writes the logged action such that it is read as: {verdict}")
    return ids


def _plain(message: Mapping[str, Any]) -> Row:
    """
    A copy of a message with the fields that chat templates know and that are not `None`, as the templates take them,
    and always with `content`.
    """
    names = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
    (plain,) = as_rendered([{name: message[name] for name in names if message.get(name) is not None}])
    plain.setdefault("content", "")
    return plain


def _action(message: Mapping[str, Any]) -> Row:
    """
    What a message of the assistant does: what it says, and the functions that it calls with their arguments. What it
    thinks, and the ids of its calls, are left out.
    """
    plain = _plain(message)
    action = {"role": "assistant", "content": plain["content"]}
    if plain.get("tool_calls"):
        functions = [call["function"] for call in plain["tool_calls"]]
        action["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return action


def _splits(rows: Rows, beginnings: Sequence[str], test_fraction: float, seed: int) -> DatasetDict:
    """
    The rows as datasets: `train` and, with a `test_fraction`, `test`. `beginnings` has for each row what its
    trajectory begins with, which is the same for all trajectories of a task. The share is of different beginnings,
    drawn with the `seed`, so that no task is in both; at least one is held out.
    """
    names = list(dict.fromkeys(beginnings))
    n_held_out = round(test_fraction * len(names))
    if test_fraction:
        n_held_out = max(n_held_out, 1)
    if n_held_out >= len(names):
        raise ValueError(
            f"test_fraction={test_fraction:g} of {len(names)} different beginnings of trajectories leaves none to "
            "train on. Lower it, to 0 to hold out none, or name a log with more tasks."
        )
    held_out = set(random.Random(seed).sample(names, n_held_out))
    splits: dict[str, Rows] = {"train": [], "test": []}
    for row, beginning in zip(rows, beginnings, strict=True):
        splits["test" if beginning in held_out else "train"].append(row)
    return DatasetDict({name: _dataset(of_split) for name, of_split in splits.items() if of_split})


def _dataset(rows: Rows) -> Dataset:
    """The rows as a dataset, with the columns that some row has; a value that a row lacks is `None`."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        if name in _AS_JSON:
            # Parts of several types are kept as JSON, which the dataset decodes again.
            columns[name] = pa.array([json.dumps(value) for value in values], pa.json_())
        else:
            columns[name] = column(values)
    return Dataset.from_dict(columns)


# Reading


def _trajectories(source: str) -> list[Trajectory]:
    """
    The conversations of a log: `source` is a file, a folder or a dataset on the Hub. Rows of NeMo Gym with
    `expected_action` are conversations with one action; in others, the assistant's turns after the prompt are actions.
    A `ValueError` if they are text instead of messages.
    """
    rows_by_file = load_files(source)
    first_row = next((row for rows in rows_by_file.values() for row in rows), {})
    if {"responses_create_params", "expected_action"} <= first_row.keys():
        trajectories = []
        for file, rows in rows_by_file.items():
            trajectories += [_of_nemo_gym(row, (file, number)) for number, row in enumerate(rows, 1)]
        return trajectories
    trajectories = []
    for row in load_conversations(source):
        prompt, completion = row["prompt"], row.get("completion")
        if isinstance(prompt, str) or not isinstance(completion, list):
            raise ValueError(
                f"{source!r}, {place_of(row)}: this is text, and states are made of messages. "
                "Write each conversation as a row with `messages`, `tools` and `reward`."
            )
        columns = {name: value for name, value in row.items() if _is_of_log(name)}
        name = str(row.get("trajectory") or place_of(row))
        messages = [*prompt, *completion]
        tools = list(row.get("tools") or ())
        trajectories.append(Trajectory(name, messages, tools, len(prompt), row.get("reward"), columns))
    return trajectories


def _is_of_log(name: str) -> bool:
    """Whether a column goes on to reward functions: it is none that the package reads or writes itself."""
    return name not in (PLACE, "group", "overlap", *KNOWN, *COLUMNS)


def _of_nemo_gym(row: Row, place: tuple[str, int]) -> Trajectory:
    """
    The trajectory of a row of NeMo Gym: the messages of its request, and its `expected_action` as the only action. The
    row's `reward` is of another answer, so it is not used. `place` is the row's file (or "") and number.
    """
    name = str(row.get("uuid") or place_of({PLACE: place}))
    expected = row["expected_action"]
    items = expected["calls"] if expected["type"] == "function_call_batch" else [expected]
    action = [{"role": "assistant", **item} for item in items]
    try:
        rollout = rollout_of_items(row["responses_create_params"], action)
    except UnreadableError as error:
        raise ValueError(f"{name}: {error}.") from error
    for message in rollout["prompt"]:
        if message["role"] == "developer":  # OpenAI's newer name, which few chat templates know
            message["role"] = "system"
    messages = [*rollout["prompt"], *rollout["completion"]]
    # An expected action is always taken, whatever `min_reward`.
    return Trajectory(name, messages, rollout["tools"], first=len(rollout["prompt"]), reward=_EXPECTED)
