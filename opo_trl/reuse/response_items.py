"""Items of OpenAI's Responses API, in which NeMo Gym and OpenAI's agents SDK log, as messages of its chat API."""

from collections.abc import Mapping, Sequence
from typing import Any

from trl.trainer.utils import remove_none_values


Item = Mapping[str, Any]
Message = dict[str, Any]

_TYPES = ("message", "reasoning", "function_call", "function_call_output")


class UnreadableError(ValueError):
    """Something in a log cannot be read as a message; the error says what."""


def are_items(messages: Any) -> bool:
    """Whether a list has items that are no messages of the chat API, and all of them are known."""
    if not isinstance(messages, list) or not all(isinstance(item, Mapping) for item in messages):
        return False
    types = {item.get("type") or "message" for item in messages}
    return types <= set(_TYPES) and types != {"message"}


def messages_of(items: str | Sequence[Item]) -> list[Message]:
    """
    Messages of a list of items, or of a text, which the user says. What a model has written at once, such as a
    thought, a text and several calls, is one message.

    Raises:
        [`UnreadableError`]: an item is of another type, or lacks something.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    for item_of_file in items:
        # A table has each field of any item in all of them.
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
    """Add what the assistant has written to its turn, the last of the messages, or begin a new one."""
    turn: Message = messages[-1] if messages else {"role": ""}
    if turn["role"] != "assistant" or not _continues(turn, kind):
        turn = {"role": "assistant"}
        messages.append(turn)
    if kind == "reasoning":
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
    """Whether an item may belong to the same turn: a model thinks, then speaks, then calls."""
    has_only_thoughts = "content" not in turn and "tool_calls" not in turn
    return kind == "function_call" or has_only_thoughts


def _thought(item: Item) -> str:
    """The text of a thought, or else its summary; empty if its server keeps it for itself."""
    return text_of_parts(item.get("content") or item.get("summary") or "")


def text_of_parts(content: Any) -> str:
    """
    The text of content that may be written in parts.

    Raises:
        [`UnreadableError`]: a part is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise UnreadableError(f"a message has {part!r:.60}, and only text can be trained on")
        texts.append(text)
    return "".join(texts)


def tools_of(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """
    Tools as chat templates take them.

    Raises:
        [`UnreadableError`]: one is no function, such as a server's own search.
    """
    functions = []
    for tool in remove_none_values(list(tools)):
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
    The rows of items with tokens (`prompt_token_ids`, `generation_token_ids` and `generation_log_probs`): calls of the
    model of which each continues the one before are one row, others are rows of their own.
    """
    rows: list[dict[str, Any]] = []
    ids_of_row: list[int] = []
    for item in items:
        if not item.get("generation_token_ids"):
            continue
        prompt_ids = list(item["prompt_token_ids"])
        ids = list(item["generation_token_ids"])
        logps = list(item["generation_log_probs"])
        if not rows or prompt_ids[: len(ids_of_row)] != ids_of_row:
            rows.append({"prompt_ids": prompt_ids, "completion_ids": [], "completion_mask": [], "logprobs": []})
            ids_of_row = prompt_ids
        row = rows[-1]
        between = prompt_ids[len(ids_of_row) :]
        row["completion_ids"] += between + ids
        row["completion_mask"] += [0] * len(between) + [1] * len(ids)
        row["logprobs"] += [None] * len(between) + logps
        ids_of_row = prompt_ids + ids
    return rows
