"""Items of OpenAI's Responses API as messages of its chat API, which chat templates take."""

from collections.abc import Mapping, Sequence
from typing import Any


Item = Mapping[str, Any]


def messages(items: str | Sequence[Item], instructions: str | None = None) -> list[dict[str, Any]]:
    """The messages of items. What the assistant thinks, says and calls in a row is one message."""
    chat: list[dict[str, Any]] = []
    if instructions:
        chat.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call_output":
            chat.append({"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])})
        elif kind == "message" and item["role"] != "assistant":
            role = "system" if item["role"] == "developer" else item["role"]
            chat.append({"role": role, "content": _text(item["content"])})
        elif kind in ("message", "reasoning", "function_call"):
            if not chat or chat[-1]["role"] != "assistant":
                chat.append({"role": "assistant", "content": ""})
            _add(chat[-1], kind, item)
        else:
            raise ValueError(f"an item of type {kind!r} is none of a message, a thought, a call and its output.")
    return chat


def tool(described: Item) -> dict[str, Any]:
    """A tool as the chat API describes it."""
    if "function" in described:
        return dict(described)
    function = {name: described[name] for name in ("name", "description", "parameters") if described.get(name)}
    return {"type": "function", "function": function}


def _add(turn: dict[str, Any], kind: str, item: Item) -> None:
    """Add an item of the assistant's to its message."""
    if kind == "message":
        turn["content"] += _text(item["content"])
    elif kind == "reasoning":
        thought = _text(item.get("content") or item.get("summary") or "")
        turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
    else:
        function = {"name": item["name"], "arguments": item["arguments"]}
        calls = turn.setdefault("tool_calls", [])
        calls.append({"type": "function", "id": item.get("call_id") or f"call_{len(calls)}", "function": function})


def _text(content: Any) -> str:
    """The text of content that is text, or parts with text."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content)
