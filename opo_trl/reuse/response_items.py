"""Items of OpenAI's Responses API, in which NeMo Gym and OpenAI's agents SDK log, as messages of its chat API."""

from collections.abc import Mapping, Sequence
from typing import Any

from .conversations import without_none


Item = Mapping[str, Any]
Message = dict[str, Any]

_ANTHROPIC = "which is Anthropic's. Write `tool_calls`, and messages of `tool`, as OpenAI's chat API takes them"

_TYPES = ("message", "reasoning", "function_call", "function_call_output")


class UnreadableError(ValueError):
    """Something in a log cannot be read as a message; the error says what."""


def are_items(messages: Any) -> bool:
    """
    Whether a value is a list of items of OpenAI's Responses API, all of types that are read. A list of messages only
    is not: each of them is a message of the chat API as well.
    """
    if not isinstance(messages, list) or not all(isinstance(item, Mapping) for item in messages):
        return False
    types = {item.get("type") or "message" for item in messages}
    return types <= set(_TYPES) and types != {"message"}


def messages_of(items: str | Sequence[Item]) -> list[Message]:
    """
    The messages of OpenAI's chat API that say the same as items of its Responses API. A text instead of a list is a
    message of the user. What a model has written at once, such as a thought, a text and several calls, has an item for
    each of these, and is one message.

    Raises:
        [`UnreadableError`]: an item is of another type, or lacks something.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    for item_of_file in items:
        # In a table, each item has the fields of all others, as `None`.
        item = {name: value for name, value in item_of_file.items() if value is not None}
        kind = item.get("type", "message")
        if kind not in _TYPES:
            raise UnreadableError(f"an item is of type {kind!r}")
        try:
            if kind == "function_call_output":
                messages.append(_result(item))
            elif kind == "message" and item["role"] != "assistant":
                messages.append({"role": item["role"], "content": text_of_parts(item["content"])})
            else:
                _add_to_turn(messages, kind, item)
        except KeyError as error:
            raise UnreadableError(f"an item of type {kind!r} lacks {error}") from error
    return messages


def _result(item: Item) -> Message:
    """The message of a tool with what a call has returned."""
    return {"role": "tool", "tool_call_id": item["call_id"], "content": text_of_parts(item["output"])}


def _add_to_turn(messages: list[Message], kind: str, item: Item) -> None:
    """
    Add an item of the assistant's, of the type `kind` ("reasoning", "message" or "function_call"), to its turn, which
    is the last of the `messages` if the item may continue it, or else a new one. Changes `messages`.
    """
    turn: Message = messages[-1] if messages else {"role": ""}
    if turn["role"] != "assistant" or not _continues(turn, kind):
        turn = {"role": "assistant"}
        messages.append(turn)
    if kind == "reasoning":
        # A turn may have several thoughts, each with a line of its own.
        thoughts = [turn["reasoning_content"]] if "reasoning_content" in turn else []
        thoughts.append(_thought(item))
        turn["reasoning_content"] = "\n".join(thoughts)
    elif kind == "message":
        turn["content"] = text_of_parts(item["content"])
    else:
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"type": "function", "id": item.get("call_id"), "function": function}
        turn.setdefault("tool_calls", []).append(call)


def _continues(turn: Message, kind: str) -> bool:
    """
    Whether an item of the type `kind` may belong to this turn of the assistant, the one before it: a model thinks,
    then speaks, then calls. So a call always may, a thought or a text only if there are no more than thoughts yet.
    """
    has_only_thoughts = "content" not in turn and "tool_calls" not in turn
    return kind == "function_call" or has_only_thoughts


def _thought(item: Item) -> str:
    """The text of a thought, or else its summary; empty if its server keeps it for itself."""
    return text_of_parts(item.get("content") or item.get("summary") or "")


def text_of_parts(content: Any) -> str:
    """
    The text of a message's content: a text, a part with a `text`, or a list of such parts, which are joined; empty for
    `None`.

    Raises:
        [`UnreadableError`]: a part is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            of_anthropic = isinstance(part, Mapping) and part.get("type") in ("tool_use", "tool_result")
            why = _ANTHROPIC if of_anthropic else "and only text can be trained on"
            raise UnreadableError(f"a message has {part!r:.60}, {why}")
        texts.append(text)
    return "".join(texts)


def tools_of(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """
    Tools as chat templates take them: `{"type": "function", "function": {"name": …}}`. OpenAI's Responses API has the
    name and the other fields in the tool itself, its chat API in `function`.

    Raises:
        [`UnreadableError`]: one is no function, such as a server's own search.
    """
    functions = []
    for tool in map(without_none, tools):
        if "function" in tool:
            functions.append({"type": "function", "function": tool["function"]})
            continue
        if tool.get("type", "function") != "function" or "name" not in tool:
            raise UnreadableError(f"a tool is {tool!r:.60}, which is no function")
        function = {name: tool[name] for name in ("name", "description", "parameters") if name in tool}
        functions.append({"type": "function", "function": function})
    return functions


def token_rows(items: Sequence[Item]) -> list[dict[str, Any]]:
    """
    The columns of tokens of recorded rollouts, for the items that have tokens (`prompt_token_ids`,
    `generation_token_ids` and `generation_log_probs`), each of which is the last of what the model wrote in one call.

    A call whose prompt begins with all tokens of the row before continues that row: what the prompt has further, such
    as a tool's result, has a mask of 0 and no log-probabilities. Any other call begins a row.

    `completion` is the last text that a call of the row has ended with, or empty: the tokens must have it in them, or
    they are of another tokenizer.
    """
    rows: list[dict[str, Any]] = []
    ids_of_row: list[int] = []  # all tokens of the last row so far, with its prompt
    for item in items:
        if not item.get("generation_token_ids"):
            continue
        prompt_ids = list(item["prompt_token_ids"])
        ids = list(item["generation_token_ids"])
        logps = list(item["generation_log_probs"])
        if not rows or prompt_ids[: len(ids_of_row)] != ids_of_row:
            tokens = {"prompt_ids": prompt_ids, "completion_ids": [], "completion_mask": [], "logprobs": []}
            rows.append({**tokens, "completion": ""})
            ids_of_row = prompt_ids
        row = rows[-1]
        between = prompt_ids[len(ids_of_row) :]  # not the model's; none in a new row
        row["completion_ids"] += between + ids
        row["completion_mask"] += [0] * len(between) + [1] * len(ids)
        row["logprobs"] += [None] * len(between) + logps
        if item.get("type", "message") == "message":
            row["completion"] = text_of_parts(item["content"])
        ids_of_row = prompt_ids + ids
    return rows
