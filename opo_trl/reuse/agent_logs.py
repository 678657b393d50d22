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
    """Where a row was read, for a message: such as "'a.jsonl', row 3", or "row 3" if the source is no folder."""
    file, number = row[PLACE]
    return f"{file!r}, row {number}" if file else f"row {number}"


# Traces of verifiers


def _of_verifiers(rows: Rows, source: str) -> Rows:
    """
    The rows of recorded rollouts of episodes of verifiers, also as prime-rl writes them (`traces.jsonl`).

    A trace is what one agent of an episode did: a tree of messages. Of the traces of agents that are trained, each
    path from the first message to a last one is a row, in which what an earlier path has trained on is context. A
    trace with an error is unscored. If some trace has its tokens, those without are left out; if none has, the rows
    are of messages. `source`, the setting `rollouts`, is for errors and warnings.
    """
    traces: Rows = []
    for episode in rows:
        of_episode = {"group": episode.get("group"), PLACE: episode[PLACE]}
        traces += [{**trace, **of_episode} for trace in episode["traces"] if trace["agent"]["trainable"]]
    # A node is a message; a model has written it if it is "sampled".
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
    The paths through a trace's tree of messages: the nodes from the first message to each last one, which no other
    continues. A node's `parent` is the place in `nodes` of the message before it.

    Nodes get `is_own`: whether the model has written them, and they are in no earlier path, so that each is trained on
    once. A path without such a node is left out, and so is one that ends with a summary of the context with which the
    agent did not go on: verifiers does not train on it.
    """
    parents = {node.get("parent") for node in nodes}
    # Summaries with which the agent went on, in a path of its own
    used_summaries = {place for node in nodes for place in _links(node, "compaction")}
    paths = []
    seen: set[int] = set()  # places of the nodes in earlier paths
    for leaf in range(len(nodes)):
        if leaf in parents:  # It is no last message.
            continue
        if _links(nodes[leaf], "compaction_attempt") and leaf not in used_summaries:
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


def _links(node: Row, kind: str) -> list[int]:
    """The places of the messages to which a node is linked as `kind`, besides the one before it."""
    return [link["node"] for link in node.get("semantic_parents") or () if link["type"] == kind]


def _has_tokens(nodes: Rows) -> bool:
    """Whether each node that the model has written has sampled tokens, which are those with a `mask` of 1."""
    return all(any(node["mask"]) for node in nodes if node["sampled"])


def _row_of_trace(trace: Row, path: Rows) -> Row:
    """
    The columns of a path of a trace that are the same whether it has tokens or only messages: the prompt, which ends
    before the first message that counts as the model's, the settings of sampling, the reward, the group and the place.
    """
    row: Row = {"prompt": [node["message"] for node in path[: _first_own(path)]]}
    settings = [call.get("sampling") or {} for call in trace["calls"]]
    for name in ("temperature", *TRUNCATIONS):
        row[name] = _first_set(name, settings)
    row["reward"] = _reward_of_trace(trace)
    group = trace["group"] or {}
    group_name = group.get("id") or trace["task"].get("key")
    agent_name = trace["agent"]["name"]
    # An episode may have several agents: of a task, the traces of each agent are a group.
    row["group"] = f"{group_name} {agent_name}"
    row[PLACE] = trace[PLACE]
    return row


def _reward_of_trace(trace: Row) -> float | None:
    """The weighted sum of a trace's scores; `None` if it has ended with an error, or has no score."""
    scores = [score for score in trace["rewards"].values() if score]  # null where a function did not score it
    if not trace["ok"] or not scores:
        return None
    return sum(score["score"] * score["weight"] for score in scores)


def _first_set(name: str, settings: Rows) -> Any:
    """The value of the setting `name` in the first call of the model that sets it; `None` if none does."""
    for settings_of_call in settings:
        if settings_of_call.get(name) is not None:
            return settings_of_call[name]
    return None


def _first_own(path: Rows) -> int:
    """Where the first message is that counts as the model's."""
    return next(index for index, node in enumerate(path) if node["is_own"])


def _tokens_of_path(trace: Row, path: Rows) -> Row:
    """
    The columns of a path whose nodes have tokens. The prompt is all before the first token that counts as the model's
    (sampled, in a node that is its own); the mask is true for these tokens. `trace` is not used: it is there because
    [`_messages_of_path`] needs it.
    """
    token_ids: list[int] = []
    mask: list[bool] = []
    logps: list[float | None] = []
    last_text = ""
    for node in path:
        token_ids += node["token_ids"]
        mask += [is_sampled and node["is_own"] for is_sampled in node["mask"]]
        # A node has log-probabilities of its sampled tokens only. Where some are missing, `None` is put in their
        # place, for which the row is rejected later.
        remaining_logps = iter(node["logprobs"])
        logps += [next(remaining_logps, None) if is_sampled else None for is_sampled in node["mask"]]
        if node["is_own"]:
            last_text = node["message"].get("content") or ""
    start = mask.index(True)
    return {
        "prompt_ids": token_ids[:start],
        "completion_ids": token_ids[start:],
        "completion_mask": mask[start:],
        "logprobs": logps[start:],
        "completion": last_text,  # The tokens must have it in them, or they are of another tokenizer.
    }


def _messages_of_path(trace: Row, path: Rows) -> Row:
    """
    The columns of a path without tokens: the messages from the first one that counts as the model's, and the tools
    that the model was given. The assistant's messages that do not count are marked as not to be trained on.
    """
    messages = []
    for node in path[_first_own(path) :]:
        message = node["message"]
        is_context = message["role"] == "assistant" and not node["is_own"]
        messages.append({**message, "trainable": False} if is_context else message)
    # The first message of a path has the tools of its requests; the trace has those of all its requests together.
    names_tools = any(node.get("tools") for node in trace["nodes"])
    tools = path[0].get("tools") or () if names_tools else trace["tools"]
    return {"completion": messages, "tools": tools_of(tools)}


# Items of OpenAI's Responses API, and conversations of anybody


def _of_responses(rows: Rows, source: str) -> Rows:
    """
    The rows of recorded rollouts that logs in items of OpenAI's Responses API have: of NeMo Gym, or of requests with
    `input` and `output`. What the assistant says in the output is the policy's.

    Rows that cannot be read, or that NeMo Gym says not to train on, are left out with a warning. If some rows have the
    tokens of the model's calls, only these are taken: each becomes one row, or several if a call does not continue the
    one before. `source`, the setting `rollouts`, is for errors and warnings.
    """
    left_out: defaultdict[str, list[str]] = defaultdict(list)
    n_hidden = 0  # conversations with a thought of which the log has no text
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
        # A thought without text is "": the server has kept it for itself.
        n_hidden += any(turn.get("reasoning_content") == "" for turn in rollout["completion"])
        rollout["reward"] = row.get("reward")
        # Columns by which NeMo Gym and other programs name the task: rollouts of the same task are one group.
        for name in ("_ng_task_index", *_NAMES_OF_GROUPS):
            if row.get(name) is not None:
                rollout["group"] = str(row[name])
                break
        # `_TOKENS` holds the rows of tokens until it is known whether some rollout has any.
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
        rows_of_rollouts += [{**rollout, **tokens} for tokens in rows_of_tokens]
    return rows_of_rollouts


def rollout_of_items(request: Row, output: Rows) -> Row:
    """
    The columns `prompt`, `completion` and `tools` of a request and the model's `output`, both in items of OpenAI's
    Responses API: messages and tools as chat templates take them.

    Raises:
        [`UnreadableError`]: an item cannot be read as a message or tool, or the output has nothing of the model.
    """
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
    """
    Warn how many of the `n_rows` conversations are left out, by the reasons in `left_out`, which has for each reason
    the places of its rows. A `ValueError` if none is left.
    """
    count = sum(map(len, left_out.values()))
    if not count:
        return
    reasons = [f"{reason} ({len(places):,}, such as {places[0]})" for reason, places in left_out.items()]
    problem = f"rollouts={source!r}: {count:,} of its {n_rows:,} conversations are left out: {'; '.join(reasons)}."
    if count == n_rows:
        raise ValueError(f"{problem} None is left.")
    logger.warning(problem)


def _of_conversations(rows: Rows, source: str) -> Rows:
    """
    The rows of recorded rollouts that conversations in a column `messages` have, whoever wrote them: the prompt is all
    before the first turn of the assistant that is to be trained on, the completion all from there. The messages may be
    JSON, or items of OpenAI's Responses API. Conversations in which the assistant answers nothing are left out with a
    warning. `source`, the setting `rollouts`, is for errors and warnings.
    """
    rollouts: Rows = []
    unanswered: list[str] = []  # their places
    for row in rows:
        place = f"rollouts={source!r}, {place_of(row)}"
        messages = row.pop("messages")
        if "completion" in row:
            raise ValueError(f"{place}: `completion` is not used beside `messages`. Append it to them, or remove one.")
        messages = _from_json(messages)
        if "tools" in row:
            row["tools"] = _from_json(row["tools"])
        if are_items(messages):  # of OpenAI's Responses API
            try:
                messages = messages_of(messages)
                row["tools"] = tools_of(row.get("tools") or ())
            except UnreadableError as error:
                raise ValueError(f"{place}: {error}.") from error
        if messages and not is_chat(messages):
            raise ValueError(f"{place}: {misfit('messages', messages)}.")
        # What the assistant says at the very beginning answers nothing.
        if not messages or not any(message["role"] == "assistant" for message in messages[1:]):
            unanswered.append(place_of(row))
            continue
        first = _first_turn(messages)
        row["prompt"] = messages[:first]
        row["completion"] = messages[first:]
        if "group" not in row:  # Another column may name the task: conversations of the same task are one group.
            names = [name for name in _NAMES_OF_GROUPS if row.get(name) is not None]
            if names:
                row["group"] = row[names[0]]
        rollouts.append(row)
    left_out = {"the assistant answers nothing": unanswered} if unanswered else {}
    _warn_of_left_out(left_out, len(rows), source)
    return rollouts


def _first_turn(messages: Rows) -> int:
    """
    The place of the assistant's first turn that no field marks as not to be trained on; if all are, its first. A turn
    that begins the conversation is context: there is no prompt before it.
    """
    turns = [place for place, message in enumerate(messages) if place and message["role"] == "assistant"]
    trained = [place for place in turns if is_trained(messages[place])]
    first, *_ = trained or turns
    return first


def _from_json(value: Any) -> Any:
    """A list that is written as JSON text, decoded; any other value as it is."""
    with suppress(TypeError, ValueError):  # The value is no text, or no JSON.
        decoded = json.loads(value)
        if isinstance(decoded, list):
            return decoded
    return value


def _of_trl(rows: Rows, source: str) -> Rows:
    """Reject the table of completions that TRL logs: as a reader of rows, it only says what to do instead."""
    raise ValueError(
        f"rollouts={source!r}, {place_of(rows[0])}, is TRL's table of completions, whose text lacks the special "
        "tokens, and whose rewards lack their weights. Record a run with `save_rollouts: true`."
    )


def _of_verl(rows: Rows, source: str) -> Rows:
    """Reject what verl writes of its rollouts: as a reader of rows, it only says what to do instead."""
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
    """
    What is wrong with the value of the column `name`, which has been found unusable, and what to do: a sentence
    without its full stop. It may be JSON text instead of a list, messages of another program, or anything else.
    """
    # In other columns than these, text is a list that was written as JSON.
    if isinstance(value, str) and name not in ("prompt", "completion", "reward", "temperature"):
        return f"`{name}` is {value!r:.60}, which is text. Write the list itself, not its JSON"
    for message in value if isinstance(value, list) else ():
        if not isinstance(message, Mapping):
            continue
        fields = {field: content for field, content in message.items() if content is not None}
        kind = None if "role" in fields else _kind_of(fields)
        if kind is not None:  # another program's message, which has no `role`
            what, fix = kind
            return f"`{name}` has {fields!r:.60}, which is {what}. {fix}"
    return f"`{name}` is {value!r:.60}, which it cannot be. See docs/reuse.md"


def _kind_of(message: Mapping[str, Any]) -> tuple[str, str] | None:
    """Which program's a message without `role` is, by its fields, and what to do; `None` if it is of no known one."""
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
    A message as chat templates take it: its text in one, calls as OpenAI writes them, and no empty fields but
    `content`. `place` says where it is, for errors. Content of another kind, such as a number, stays what it is.
    """
    content = message.get("content") or ""
    # Some logs have a single part, `{"type": "text", "text": …}`, where the API has a list of such.
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
    """
    A call as OpenAI writes it: `{"function": {"name": …, "arguments": …}}`. One without the outer mapping gets it.
    Anything else is a `ValueError`, which says where (`place`), what it is and what to do.
    """
    function = call
    if isinstance(call, Mapping) and call.get("function"):
        function = call["function"]
    is_function = isinstance(function, Mapping) and "arguments" in function
    if is_function and isinstance(function.get("name"), str):
        has_outer_mapping = function is not call
        return call if has_outer_mapping else _with_outer_mapping(call)
    kind = "not as OpenAI writes it"
    fix = 'Write {"function": {"name": …, "arguments": …}} for each call'
    if isinstance(function, str):
        kind = "text"
    elif isinstance(function, Mapping) and "args" in function:
        kind, fix = _LANGCHAIN
    raise ValueError(f"{place}: `tool_calls` has {function!r:.60}, which is {kind}. {fix}.")


def _with_outer_mapping(function: Mapping[str, Any]) -> Row:
    return {"type": "function", "function": {name: function[name] for name in ("name", "arguments")}}
