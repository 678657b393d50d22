"""
Logs of agents and of other trainers, as recorded rollouts ([`reuse.reading`]).

`READERS` tells by their columns those that are read, and `OTHERS` some that are not, with what to do.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any

from ..data.prompts import is_chat


logger = logging.getLogger(__name__)

Row = dict[str, Any]
Rows = list[Row]

# Column of a row that is being read: its file in a folder, else "", and its number there. Messages name them.
PLACE = "row_of_rollouts"

# Settings by which tokens are left out of sampling, and the values, besides null, with which none are.
TRUNCATIONS = {"top_p": (1,), "top_k": (0, -1), "min_p": (0,)}

_AS_CHAT = "Write each conversation as a row with `messages`, as OpenAI's chat API takes them, and `reward`"
_LANGCHAIN = ("LangChain's", "Write what its `convert_to_openai_messages` returns")


def place_of(row: Row) -> str:
    """Where a row is, for a message."""
    file, number = row[PLACE]
    return f"{file!r}, row {number}" if file else f"row {number}"


# Traces of verifiers


def _of_verifiers(rows: Rows, source: str) -> Rows:
    """`traces.jsonl`, also of prime-rl: traces of agents that are trained; those with an error are unscored."""
    traces: Rows = []
    for episode in rows:
        of_episode = {"group": episode.get("group"), PLACE: episode[PLACE]}
        traces += [{**trace, **of_episode} for trace in episode["traces"] if trace["agent"]["trainable"]]
    paths = [trace for trace in traces if _is_one_path(trace["nodes"])]
    with_tokens = [trace for trace in paths if _has_tokens(trace["nodes"])]
    usable = with_tokens or paths
    one_path = "one conversation, whose assistant's turns the model has written"
    if not usable:
        raise ValueError(
            f"rollouts={source!r}, {place_of(rows[0])}: this trace of verifiers, like all others, is of an agent that "
            f"is not trained, or not {one_path}. "
            "Record others, or write each of their branches as a row with `messages` and `reward`."
        )
    unusable = {f"are not {one_path}": len(traces) - len(paths), "have no tokens": len(paths) - len(usable)}
    for reason, count in unusable.items():
        if count:
            logger.warning(
                f"rollouts={source!r}: {count:,} of its {len(traces):,} traces {reason}. They are left out."
            )
    columns_of_trace = _tokens_of_trace if with_tokens else _messages_of_trace
    return [_row_of_trace(trace) | columns_of_trace(trace) for trace in usable]


def _is_one_path(nodes: Rows) -> bool:
    """Whether the messages of a trace are one conversation, in which the model has said what the assistant says."""
    parents = {node.get("parent") for node in nodes}
    parents.discard(None)
    n_leaves = len(nodes) - len(parents)
    are_sampled = [node["sampled"] for node in nodes if node["message"]["role"] == "assistant"]
    if n_leaves != 1 or not any(are_sampled):
        return False
    first = are_sampled.index(True)
    return all(are_sampled[first:])


def _has_tokens(nodes: Rows) -> bool:
    """Whether all that the model has said in a trace has its tokens."""
    return all(any(node["mask"]) for node in nodes if node["sampled"])


def _row_of_trace(trace: Row) -> Row:
    """The columns that a trace has with tokens and without."""
    first = _first_sampled(trace["nodes"])
    row: Row = {"prompt": _messages(trace["nodes"][:first])}
    settings = [call.get("sampling") or {} for call in trace["calls"]]
    for name in ("temperature", *TRUNCATIONS):
        row[name] = _first_set(name, settings)
    row["reward"] = _reward_of_trace(trace)
    group = trace["group"] or {}
    group_name = group.get("id") or trace["task"].get("key")
    agent_name = trace["agent"]["name"]
    row["group"] = f"{group_name} {agent_name}"
    row[PLACE] = trace[PLACE]
    return row


def _reward_of_trace(trace: Row) -> float | None:
    """The weighted sum of a trace's scores; `None` if it has ended with an error, or has no score."""
    scores = [score for score in trace["rewards"].values() if score]
    if not trace["ok"] or not scores:
        return None
    return sum(score["score"] * score["weight"] for score in scores)


def _first_set(name: str, settings: Rows) -> Any:
    """The first value of a setting that is set; `None` if none is."""
    for settings_of_call in settings:
        if settings_of_call.get(name) is not None:
            return settings_of_call[name]
    return None


def _first_sampled(nodes: Rows) -> int:
    """Where the first message is that the model has written."""
    return next(index for index, node in enumerate(nodes) if node["sampled"])


def _messages(nodes: Rows) -> list[Any]:
    return [node["message"] for node in nodes]


def _tokens_of_trace(trace: Row) -> Row:
    """The columns of a trace with tokens; its completion begins with the first token that the model has sampled."""
    token_ids: list[int] = []
    mask: list[bool] = []
    sampled_logps: list[float] = []
    last_text = ""
    for node in trace["nodes"]:
        token_ids += node["token_ids"]
        mask += node["mask"]
        sampled_logps += node["logprobs"]
        if node["sampled"]:
            last_text = node["message"].get("content") or ""
    start = mask.index(True)
    remaining_logps = iter(sampled_logps)  # A trace that lacks some is rejected with its row.
    return {
        "prompt_ids": token_ids[:start],
        "completion_ids": token_ids[start:],
        "completion_mask": mask[start:],
        "logprobs": [next(remaining_logps, None) if is_sampled else None for is_sampled in mask[start:]],
        "completion": last_text,  # It shows whether the tokenizer is the model's.
    }


def _messages_of_trace(trace: Row) -> Row:
    """The columns of a trace without tokens."""
    first = _first_sampled(trace["nodes"])
    tools = [_function(tool, "name", "description", "parameters") for tool in trace["tools"]]
    return {"completion": _messages(trace["nodes"][first:]), "tools": tools}


# Tables of verl and TRL, and conversations of anybody


def _of_verl(rows: Rows, source: str) -> Rows:
    logger.warning(
        f"rollouts={source!r}: verl's `rollout_data_dir` has text without special tokens: prompts lack those of the "
        "chat template, and what tools have written counts as sampled."
    )
    columns = {"prompt": "input", "completion": "output", "reward": "score", "group": "step", PLACE: PLACE}
    return [{ours: row.get(theirs) for ours, theirs in columns.items()} for row in rows]


def _of_trl(rows: Rows, source: str) -> Rows:
    """`completions_*.parquet`. Weights of rewards are not in there: if there are several, the advantage is taken."""
    logger.warning(
        f"rollouts={source!r} is of TRL: a file of a step at which the run evaluated has those completions, too. "
        "Leave it out."
    )
    others = rows[0].keys() - {"step", "prompt", "completion", "advantage"}
    scores = []
    for name in others:
        if all(isinstance(row[name], float | None) for row in rows):
            scores.append(name)
    reward = scores[0] if len(scores) == 1 else "advantage"
    rows_of_rollouts = []
    previous = None
    for _, rows_with_step in groupby(rows, key=itemgetter("step")):
        rows_of_step = list(rows_with_step)
        rollout = [{name: row[name] for name in row.keys() - {"step", PLACE}} for row in rows_of_step]
        if rollout != previous:  # TRL writes a rollout again at each step that it serves.
            rows_of_rollouts += rows_of_step
        previous = rollout
    return [_row_of_trl(row, reward, scores) for row in rows_of_rollouts]


def _row_of_trl(row: Row, reward: str, scores: Collection[str]) -> Row:
    """A row whose reward is in the column of this name; without any of the `scores`, it is unscored."""
    is_scored = any(row[name] is not None for name in scores)
    return {
        "prompt": row["prompt"],
        "completion": row["completion"],
        "reward": row[reward] if is_scored else None,
        "group": row["step"],
        PLACE: row[PLACE],
    }


def _of_conversations(rows: Rows, source: str) -> Rows:
    """Of anybody: the completion begins with what the assistant says first."""
    for row in rows:
        place = f"rollouts={source!r}, {place_of(row)}"
        messages = row.pop("messages")
        if "completion" in row:
            raise ValueError(f"{place}: `completion` is not used beside `messages`. Append it to them, or remove one.")
        if not is_chat(messages):
            raise ValueError(f"{place}: {misfit('messages', messages)}.")
        roles = [message["role"] for message in messages]
        if "assistant" not in roles:
            raise ValueError(
                f"{place}: `completion` is [], as the assistant says nothing in `messages`. "
                "Append what it has answered."
            )
        first = roles.index("assistant")
        row["prompt"] = messages[:first]
        row["completion"] = messages[first:]
    return rows


READERS: tuple[tuple[Collection[str], Callable[[Rows, str], Rows]], ...] = (
    (("task", "traces"), _of_verifiers),
    (("input", "output", "score"), _of_verl),
    (("step", "prompt", "completion", "advantage"), _of_trl),
    (("messages",), _of_conversations),
)

# Columns of rows that are not read, what such a row is, and what to do.
OTHERS: tuple[tuple[Collection[str], str, str], ...] = (
    (
        ("token_ids", "loss_mask", "inference_logprobs"),
        "prime-rl's `token_exports`, which have advantages, but no rewards and no groups, of which targets are made",
        "Name a `traces.jsonl` in `rollouts` of that run's folder instead",
    ),
    (("task", "nodes"), "a trace of verifiers without its episode", "Write rows with `task` and a list of `traces`"),
    (("responses_create_params",), "a rollout of NeMo Gym, in items of OpenAI's Responses API", _AS_CHAT),
    (("choices",), "a response of OpenAI's chat API, without what was asked", _AS_CHAT),
    (("request", "response"), "a request with its response, as proxies log them", _AS_CHAT),
    (("custom_id", "response"), "a result of OpenAI's Batch API", _AS_CHAT),
    (("object", "output"), "a response of OpenAI's Responses API", _AS_CHAT),
    (("input", "output"), "an input with its output, such as OpenAI's Responses API has", _AS_CHAT),
    (("inputs", "outputs"), "a run as LangSmith and other tracers export it", _AS_CHAT),
    (
        ("conversations",),
        "a conversation under another name than `messages`",
        f"{_AS_CHAT}. ShareGPT's `from` and `value` are `role` and `content`, human is user, and gpt assistant",
    ),
    (("columns", "data"), "a whole table, as Weights & Biases writes it", "Write one row for each of its `data`"),
    (("chosen", "rejected"), "a preference", "Write it as two rows with `prompt`, `completion` and `reward`"),
    (
        ("prompt", "reward_model"),
        "a problem of verl, without completions",
        "Name a folder that verl has written as its `rollout_data_dir`",
    ),
)


def misfit(name: str, value: Any) -> str:
    """What the value of a column is, which cannot be used, and what to do: a sentence without its end."""
    if isinstance(value, str) and name not in ("prompt", "completion", "reward", "temperature"):
        return f"`{name}` is {value!r:.60}, which is text. Write the list itself, not its JSON"
    for message in value if isinstance(value, list) else ():
        if not isinstance(message, Mapping):
            continue
        fields = {field: content for field, content in message.items() if content is not None}
        kind = None if "role" in fields else _kind_of(fields)
        if kind is not None:
            what, fix = kind
            return f"`{name}` has {fields!r:.60}, which is {what}. {fix}"
    return f"`{name}` is {value!r:.60}, which it cannot be. See docs/reuse.md"


def _kind_of(message: Mapping[str, Any]) -> tuple[str, str] | None:
    """Whose message it is that has no `role`, and what to do; nothing if that is not known."""
    if "from" in message and "value" in message:
        return "ShareGPT's", "Write `role` and `content`, with the roles system, user and assistant"
    if "lc" in message or message.get("type") in ("human", "ai", "system", "tool", "function"):
        return _LANGCHAIN
    if "type" in message:
        return "an item of OpenAI's Responses API", _AS_CHAT
    return None


# Messages


def as_chat(message: Row, place: str) -> Row:
    """
    A message as chat templates take it: its text in one, calls as OpenAI writes them, and no empty fields. `place`
    says where it is, for errors. Content that is neither text nor a list stays what it is.
    """
    content = message.get("content") or ""
    if isinstance(content, list):
        content = _joined_parts(content, place)
    calls = message.get("tool_calls") or ()
    if isinstance(calls, str):
        raise ValueError(f"{place}: {misfit('tool_calls', calls)}.")
    turn = {**message, "content": content, "tool_calls": [_as_call(call, place) for call in calls]}
    return {name: value for name, value in turn.items() if name == "content" or value not in (None, "", [], {})}


def _joined_parts(parts: list[Any], place: str) -> str:
    """The text of content that is written in parts."""
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise ValueError(f"{place}: a message has {part!r:.60}, and only text can be trained on.")
        texts.append(text)
    return "".join(texts)


def _as_call(call: Any, place: str) -> Mapping[str, Any]:
    """A call as OpenAI writes it, also if it is written without `function`."""
    function = call.get("function") or call if isinstance(call, Mapping) else call
    if isinstance(function, Mapping) and {"name", "arguments"} <= function.keys():
        return _function(call, "name", "arguments") if function is call else call
    kind = "not as OpenAI writes it"
    fix = 'Write {"function": {"name": …, "arguments": …}} for each call'
    if isinstance(function, str):
        kind = "text"
    elif isinstance(function, Mapping) and "args" in function:
        kind, fix = _LANGCHAIN
    raise ValueError(f"{place}: `tool_calls` has {function!r:.60}, which is {kind}. {fix}.")


def _function(fields: Mapping[str, Any], *names: str) -> Row:
    return {"type": "function", "function": {name: fields[name] for name in names}}
