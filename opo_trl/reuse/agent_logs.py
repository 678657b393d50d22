"""
Logs of agents and of other trainers, as recorded rollouts ([`reuse.reading`]).

`READERS` tells by their columns those that are read, and `OTHERS` some that are not, with what to do.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from ..data.prompts import is_chat
from .conversations import is_trained
from .response_items import UnreadableError, are_items, messages_of, text_of_parts, token_rows, tools_of


logger = logging.getLogger(__name__)

Row = dict[str, Any]
Rows = list[Row]

# Column of a row that is being read: its file in a folder, else "", and its number there. Messages name them.
PLACE = "row_of_rollouts"

# Settings by which tokens are left out of sampling, and the values, besides null, with which none are.
TRUNCATIONS = {"top_p": (1,), "top_k": (0, -1), "min_p": (0,)}

# Columns by which programs name the task of a conversation, so that those with the same are one group.
_NAMES_OF_GROUPS = ("group", "group_id", "group_index", "task_id", "example_id")

_TOKENS = "rows_of_tokens"

_AS_CHAT = "Write each conversation as a row with `messages`, as OpenAI's chat API takes them, and `reward`"
_LANGCHAIN = ("LangChain's", "Write what its `convert_to_openai_messages` returns")


def place_of(row: Row) -> str:
    """Where a row is, for a message."""
    file, number = row[PLACE]
    return f"{file!r}, row {number}" if file else f"row {number}"


# Traces of verifiers


def _of_verifiers(rows: Rows, source: str) -> Rows:
    """
    `traces.jsonl`, also of prime-rl: traces of agents that are trained; those with an error are unscored. Each path
    from the first message to a last one is a row, in which what an earlier row has trained on is context.
    """
    traces: Rows = []
    for episode in rows:
        of_episode = {"group": episode.get("group"), PLACE: episode[PLACE]}
        traces += [{**trace, **of_episode} for trace in episode["traces"] if trace["agent"]["trainable"]]
    with_turns = [trace for trace in traces if any(node["sampled"] for node in trace["nodes"])]
    with_tokens = [trace for trace in with_turns if _has_tokens(trace["nodes"])]
    usable = with_tokens or with_turns
    if not usable:
        raise ValueError(
            f"rollouts={source!r}, {place_of(rows[0])}: this trace of verifiers, like all others, is of an agent that "
            "is not trained, or has no turn that a model has written. Record others."
        )
    unusable = {
        "have no turn that a model has written": len(traces) - len(with_turns),
        "have no tokens": len(with_turns) - len(usable),
    }
    for reason, count in unusable.items():
        if count:
            logger.warning(
                f"rollouts={source!r}: {count:,} of its {len(traces):,} traces {reason}. They are left out."
            )
    columns_of_path = _tokens_of_path if with_tokens else _messages_of_path
    rows_of_paths = []
    for trace in usable:
        for path in _paths(trace["nodes"]):
            rows_of_paths.append(_row_of_trace(trace, path) | columns_of_path(trace, path))
    return rows_of_paths


def _paths(nodes: Rows) -> list[Rows]:
    """
    The nodes from the first message to each of the last ones; `is_own` is whether the model has written a node, and
    in no earlier path. A path without such a node is left out.
    """
    parents = {node.get("parent") for node in nodes}
    paths = []
    seen: set[int] = set()
    for leaf in range(len(nodes)):
        if leaf in parents:
            continue
        places: list[int] = []
        place: int | None = leaf
        while place is not None:
            places.insert(0, place)
            place = nodes[place].get("parent")
        path = [{**nodes[place], "is_own": nodes[place]["sampled"] and place not in seen} for place in places]
        seen.update(places)
        if any(node["is_own"] for node in path):
            paths.append(path)
    return paths


def _has_tokens(nodes: Rows) -> bool:
    """Whether all that the model has said in a trace has its tokens."""
    return all(any(node["mask"]) for node in nodes if node["sampled"])


def _row_of_trace(trace: Row, path: Rows) -> Row:
    """The columns that a path of a trace has with tokens and without."""
    row: Row = {"prompt": [node["message"] for node in path[: _first_own(path)]]}
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


def _first_own(path: Rows) -> int:
    """Where the first message is that counts as the model's."""
    return next(index for index, node in enumerate(path) if node["is_own"])


def _tokens_of_path(trace: Row, path: Rows) -> Row:
    """The columns of a path with tokens; its completion begins with the first token that the model has sampled."""
    token_ids: list[int] = []
    mask: list[bool] = []
    logps: list[float | None] = []
    last_text = ""
    for node in path:
        token_ids += node["token_ids"]
        mask += [is_sampled and node["is_own"] for is_sampled in node["mask"]]
        remaining_logps = iter(node["logprobs"])  # A trace that lacks some is rejected with its row.
        logps += [next(remaining_logps, None) if is_sampled else None for is_sampled in node["mask"]]
        if node["is_own"]:
            last_text = node["message"].get("content") or ""
    start = mask.index(True)
    return {
        "prompt_ids": token_ids[:start],
        "completion_ids": token_ids[start:],
        "completion_mask": mask[start:],
        "logprobs": logps[start:],
        "completion": last_text,  # It shows whether the tokenizer is the model's.
    }


def _messages_of_path(trace: Row, path: Rows) -> Row:
    """The columns of a path without tokens."""
    messages = []
    for node in path[_first_own(path) :]:
        message = node["message"]
        is_context = message["role"] == "assistant" and not node["is_own"]
        messages.append({**message, "trainable": False} if is_context else message)
    return {"completion": messages, "tools": tools_of(trace["tools"])}


# Items of OpenAI's Responses API, and conversations of anybody


def _of_responses(rows: Rows, source: str) -> Rows:
    """Rollouts of NeMo Gym, or an input with its output: what is in the output is the policy's."""
    left_out: defaultdict[str, list[str]] = defaultdict(list)
    n_hidden = 0
    rollouts: Rows = []
    for row in rows:
        request = row.get("responses_create_params") or row
        output = row["response"]["output"] if "response" in row else row["output"]
        try:
            if row.get("mask_sample"):
                raise UnreadableError("`mask_sample` says that it is not to be trained on")
            rollout = rollout_of_items(request, output)
        except UnreadableError as error:
            left_out[str(error)].append(place_of(row))
            continue
        n_hidden += any(turn.get("reasoning_content") == "" for turn in rollout["completion"])
        rollout["reward"] = row.get("reward")
        for name in ("_ng_task_index", *_NAMES_OF_GROUPS):
            if row.get(name) is not None:
                rollout["group"] = str(row[name])
                break
        rollouts.append({**rollout, PLACE: row[PLACE], _TOKENS: token_rows(output)})
    _warn_of_left_out(left_out, len(rows), source)
    if n_hidden:
        logger.warning(
            f"rollouts={source!r}: {n_hidden:,} of its {len(rows):,} conversations have thoughts whose text their "
            "server has kept for itself. What the model wrote after them is taken as if it had not thought."
        )
    with_tokens = [rollout for rollout in rollouts if rollout[_TOKENS]]
    rows_of_rollouts = []
    for rollout in with_tokens or rollouts:
        rows_of_tokens = rollout.pop(_TOKENS)
        if not rows_of_tokens:
            rows_of_rollouts.append(rollout)
        for tokens in rows_of_tokens:
            text = rollout["completion"][-1]["content"]
            rows_of_rollouts.append({**rollout, **tokens, "completion": text})
    return rows_of_rollouts


def rollout_of_items(request: Row, output: Rows) -> Row:
    """The columns of a request and what a model has answered, both in items."""
    if not isinstance(output, list):
        raise UnreadableError(f"its output is {output!r:.60}, and no list of items")
    prompt = messages_of(request["input"])
    if request.get("instructions"):
        prompt.insert(0, {"role": "system", "content": request["instructions"]})
    completion = messages_of(output)
    if not any(message["role"] == "assistant" for message in completion):
        raise UnreadableError("the model has answered nothing")
    return {"prompt": prompt, "completion": completion, "tools": tools_of(request.get("tools") or ())}


def _warn_of_left_out(left_out: Mapping[str, list[str]], n_rows: int, source: str) -> None:
    count = sum(map(len, left_out.values()))
    if not count:
        return
    reasons = [f"{reason} ({len(places):,}, such as {places[0]})" for reason, places in left_out.items()]
    problem = f"rollouts={source!r}: {count:,} of its {n_rows:,} conversations are left out: {'; '.join(reasons)}."
    if count == n_rows:
        raise ValueError(f"{problem} None is left.")
    logger.warning(problem)


def _of_conversations(rows: Rows, source: str) -> Rows:
    """Of anybody: the completion begins with what the assistant says first and is trained on."""
    for row in rows:
        place = f"rollouts={source!r}, {place_of(row)}"
        messages = row.pop("messages")
        if "completion" in row:
            raise ValueError(f"{place}: `completion` is not used beside `messages`. Append it to them, or remove one.")
        messages = _from_json(messages)
        if "tools" in row:
            row["tools"] = _from_json(row["tools"])
        if are_items(messages):
            try:
                messages = messages_of(messages)
                row["tools"] = tools_of(row.get("tools") or ())
            except UnreadableError as error:
                raise ValueError(f"{place}: {error}.") from error
        if not is_chat(messages):
            raise ValueError(f"{place}: {misfit('messages', messages)}.")
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError(
                f"{place}: `completion` is [], as the assistant says nothing in `messages`. "
                "Append what it has answered."
            )
        first = _first_turn(messages)
        row["prompt"] = messages[:first]
        row["completion"] = messages[first:]
        if "group" not in row:
            names = [name for name in _NAMES_OF_GROUPS if row.get(name) is not None]
            if names:
                row["group"] = row[names[0]]
    return rows


def _first_turn(messages: Rows) -> int:
    """Where the assistant's first turn is that is trained on or, if none is, its first."""
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    trained = [place for place in turns if is_trained(messages[place])]
    first, *_ = trained or turns
    return first


def _from_json(value: Any) -> Any:
    """A list that is written as JSON text; anything else as it is."""
    with suppress(TypeError, ValueError):
        decoded = json.loads(value)
        if isinstance(decoded, list):
            return decoded
    return value


def _of_trl(rows: Rows, source: str) -> Rows:
    raise ValueError(
        f"rollouts={source!r}, {place_of(rows[0])}, is TRL's table of completions, whose text lacks the special "
        "tokens, and whose rewards lack their weights. Record a run with `save_rollouts: true`."
    )


def _of_verl(rows: Rows, source: str) -> Rows:
    raise ValueError(
        f"rollouts={source!r}, {place_of(rows[0])}, is verl's `rollout_data_dir`, whose text lacks the special "
        f"tokens. {_AS_CHAT}."
    )


READERS: tuple[tuple[Collection[str], Callable[[Rows, str], Rows]], ...] = (
    (("task", "traces"), _of_verifiers),
    (("step", "prompt", "completion", "advantage"), _of_trl),
    (("input", "output", "score"), _of_verl),
    (("responses_create_params", "response"), _of_responses),
    (("input", "output"), _of_responses),
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
    (("responses_create_params",), "a task of NeMo Gym, without a response", "Name its rollouts"),
    (("choices",), "a response of OpenAI's chat API, without what was asked", _AS_CHAT),
    (("request", "response"), "a request with its response, as proxies log them", _AS_CHAT),
    (("custom_id", "response"), "a result of OpenAI's Batch API", _AS_CHAT),
    (("object", "output"), "a response of OpenAI's Responses API", _AS_CHAT),
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
        _AS_CHAT,
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
    is_one_part = isinstance(content, Mapping) and content.get("type") in ("text", "input_text", "output_text")
    if isinstance(content, list) or is_one_part:
        try:
            content = text_of_parts(content)
        except UnreadableError as error:
            raise ValueError(f"{place}: {error}.") from error
    calls = _from_json(message.get("tool_calls")) or ()
    if isinstance(calls, str):
        raise ValueError(f"{place}: {misfit('tool_calls', calls)}.")
    turn = {**message, "content": content, "tool_calls": [_as_call(call, place) for call in calls]}
    return {name: value for name, value in turn.items() if name == "content" or value not in (None, "", [], {})}


def _as_call(call: Any, place: str) -> Mapping[str, Any]:
    """A call as OpenAI writes it: `{"function": {"name": …, "arguments": …}}`; logs may lack the outer mapping."""
    function = call
    if isinstance(call, Mapping) and call.get("function"):
        function = call["function"]
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
