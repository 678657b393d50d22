"""
Logs of agents and of other trainers, as recorded rollouts ([`reuse.reading`]).

`READERS` tells by their columns those that are read, and `OTHERS` some that are not, with what to do.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

from ..data.prompts import is_chat


logger = logging.getLogger(__name__)

Rows = list[dict[str, Any]]

# Column of a row that is being read: its file in a folder, else "", and its number there. Messages name them.
PLACE = "row_of_rollouts"

# Columns that say which tokens were left out of sampling, and the values, besides null, with which none were.
CUTS = {"top_p": (1,), "top_k": (0, -1), "min_p": (0,)}

_AS_CHAT = "Write each conversation as a row with `messages`, as OpenAI's chat API takes them, and `reward`"
_LANGCHAIN = ("LangChain's", "Write what its `convert_to_openai_messages` returns")


def place_of(row: Mapping[str, Any]) -> str:
    """Where a row is, for a message."""
    file, number = row[PLACE]
    return f"{file!r}, row {number}" if file else f"row {number}"


def _of_verifiers(rows: Rows, source: str) -> Rows:
    """`traces.jsonl`, also of prime-rl: traces of agents that are trained; those with an error are unscored."""
    traces = [(episode, trace) for episode in rows for trace in episode["traces"] if trace["agent"]["trainable"]]
    paths = [(episode, trace) for episode, trace in traces if _is_one_path(trace["nodes"])]
    with_tokens = [(episode, trace) for episode, trace in paths if _has_tokens(trace["nodes"])]
    usable = with_tokens or paths
    one_path = "one conversation, whose assistant's turns the model has written"
    if not usable:
        said = f"this trace of verifiers, like all others, is of an agent that is not trained, or not {one_path}"
        fix = "Record others, or write each of their branches as a row with `messages` and `reward`"
        raise ValueError(f"rollouts={source!r}, {place_of(rows[0])}: {said}. {fix}.")
    unusable = {f"are not {one_path}": len(traces) - len(paths), "have no tokens": len(paths) - len(usable)}
    for why, count in unusable.items():
        if count:
            logger.warning(f"rollouts={source!r}: {count:,} of its {len(traces):,} traces {why}. They are left out.")
    made = []
    for episode, trace in usable:
        nodes, scores = trace["nodes"], [score for score in trace["rewards"].values() if score]
        first = next(place for place, node in enumerate(nodes) if node["sampled"])
        last = next(node for node in reversed(nodes) if node["sampled"])
        settings = [call.get("sampling") or {} for call in trace["calls"]]
        group = (episode.get("group") or {}).get("id") or trace["task"].get("key")
        row: dict[str, Any] = {
            "prompt": [node["message"] for node in nodes[:first]],
            **{name: _first_of(name, settings) for name in ("temperature", *CUTS)},
            "reward": sum(one["score"] * one["weight"] for one in scores) if trace["ok"] and scores else None,
            "group": f"{group} {trace['agent']['name']}",
            PLACE: episode[PLACE],
        }
        if with_tokens:
            ids, mask = ([*chain.from_iterable(node[name] for node in nodes)] for name in ("token_ids", "mask"))
            start, logps = mask.index(True), chain.from_iterable(node["logprobs"] for node in nodes)
            row |= {"prompt_ids": ids[:start], "completion_ids": ids[start:], "completion_mask": mask[start:]}
            row["logprobs"] = [next(logps, None) if own else None for own in mask[start:]]
            row["completion"] = last["message"].get("content") or ""  # says whether the tokenizer is the model's
        else:
            row["completion"] = [node["message"] for node in nodes[first:]]
            row["tools"] = [_function(tool, "name", "description", "parameters") for tool in trace["tools"]]
        made.append(row)
    return made


def _first_of(name: str, settings: Rows) -> Any:
    """The first value of a setting that is set; `None` if none is."""
    return next((setting[name] for setting in settings if setting.get(name) is not None), None)


def _is_one_path(nodes: Rows) -> bool:
    """Whether the messages of a trace are one conversation, in which the model has said what the assistant says."""
    parents = {node.get("parent") for node in nodes} - {None}
    sampled = [node["sampled"] for node in nodes if node["message"]["role"] == "assistant"]
    return len(nodes) - len(parents) == 1 and any(sampled) and all(sampled[sampled.index(True) :])


def _has_tokens(nodes: Rows) -> bool:
    """Whether all that the model has said in a trace has its tokens."""
    return all(any(node["mask"]) for node in nodes if node["sampled"])


def _of_verl(rows: Rows, source: str) -> Rows:
    said = "verl's `rollout_data_dir` has text without special tokens: prompts lack those of the chat template"
    logger.warning(f"rollouts={source!r}: {said}, and what tools have written counts as sampled.")
    named = {"prompt": "input", "completion": "output", "reward": "score", "group": "step", PLACE: PLACE}
    return [{ours: row.get(theirs) for ours, theirs in named.items()} for row in rows]


def _of_trl(rows: Rows, source: str) -> Rows:
    """`completions_*.parquet`. Weights of rewards are not in there: if there are several, the advantage is taken."""
    said = "a file of a step at which the run evaluated has those completions, too. Leave it out"
    logger.warning(f"rollouts={source!r} is of TRL: {said}.")
    others = rows[0].keys() - {"step", "prompt", "completion", "advantage"}
    scores = [name for name in others if all(isinstance(row[name], float | None) for row in rows)]
    reward = scores[0] if len(scores) == 1 else "advantage"
    made, last = Rows(), None
    for step, part in groupby(rows, key=itemgetter("step")):
        of_step = [*part]
        rollout = [{name: row[name] for name in row.keys() - {"step", PLACE}} for row in of_step]
        for row in of_step if rollout != last else ():  # TRL writes one again at each step that it serves
            score = row[reward] if any(row[name] is not None for name in scores) else None
            texts = {"prompt": row["prompt"], "completion": row["completion"]}
            made.append({**texts, "reward": score, "group": step, PLACE: row[PLACE]})
        last = rollout
    return made


def _of_conversations(rows: Rows, source: str) -> Rows:
    """Of anybody: the completion begins with what the assistant says first."""
    for row in rows:
        at = f"rollouts={source!r}, {place_of(row)}"
        messages = row.pop("messages")
        if "completion" in row:
            raise ValueError(f"{at}: `completion` is not used beside `messages`. Append it to them, or remove one.")
        if not is_chat(messages):
            raise ValueError(f"{at}: {misfit('messages', messages)}.")
        first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
        if first == len(messages):
            fix = "Append what it has answered"
            raise ValueError(f"{at}: `completion` is [], as the assistant says nothing in `messages`. {fix}.")
        row |= {"prompt": messages[:first], "completion": messages[first:]}
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
    for item in value if isinstance(value, list) else ():
        fields = {name: part for name, part in item.items() if part is not None} if isinstance(item, Mapping) else {}
        if "role" not in fields and (known := _kind_of(fields)):
            what, fix = known
            return f"`{name}` has {fields!r:.60}, which is {what}. {fix}"
    return f"`{name}` is {value!r:.60}, which it cannot be. See docs/reuse.md"


def _kind_of(item: Mapping[str, Any]) -> tuple[str, str] | None:
    """Whose message it is that has no `role`, and what to do; nothing if that is not known."""
    if "from" in item and "value" in item:
        return "ShareGPT's", "Write `role` and `content`, with the roles system, user and assistant"
    if "lc" in item or item.get("type") in ("human", "ai", "system", "tool", "function"):
        return _LANGCHAIN
    return ("an item of OpenAI's Responses API", _AS_CHAT) if "type" in item else None


def as_chat(message: Mapping[str, Any], at: str) -> dict[str, Any]:
    """
    A message as chat templates take it: its text in one, calls as OpenAI writes them, and no empty fields. `at` says
    where it is, for errors. Content that is neither text nor a list stays what it is.
    """
    text, calls = message.get("content") or "", message.get("tool_calls") or ()
    if isinstance(text, list):
        other = [part for part in text if not (isinstance(part, Mapping) and isinstance(part.get("text"), str))]
        if other:
            raise ValueError(f"{at}: a message has {other[0]!r:.60}, and only text can be trained on.")
        text = "".join(part["text"] for part in text)
    if isinstance(calls, str):
        raise ValueError(f"{at}: {misfit('tool_calls', calls)}.")
    turn = {**message, "content": text, "tool_calls": [_as_call(call, at) for call in calls]}
    return {name: value for name, value in turn.items() if name == "content" or value not in (None, "", [], {})}


def _as_call(call: Any, at: str) -> Mapping[str, Any]:
    """A call as OpenAI writes it, also if it is written without `function`."""
    function = call.get("function") or call if isinstance(call, Mapping) else call
    if isinstance(function, Mapping) and {"name", "arguments"} <= function.keys():
        return _function(call, "name", "arguments") if function is call else call
    kind, fix = "not as OpenAI writes it", 'Write {"function": {"name": …, "arguments": …}} for each call'
    if isinstance(function, str):
        kind = "text"
    elif isinstance(function, Mapping) and "args" in function:
        kind, fix = _LANGCHAIN
    raise ValueError(f"{at}: `tool_calls` has {function!r:.60}, which is {kind}. {fix}.")


def _function(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {"type": "function", "function": {name: given[name] for name in names}}
