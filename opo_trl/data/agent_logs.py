"""Logs of agents and of other trainers, as recorded rollouts ([`data.rollouts`]). `READERS` tells them by columns."""

import logging
from collections.abc import Callable, Collection, Mapping
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

from .prompts import is_chat


logger = logging.getLogger(__name__)

Rows = list[dict[str, Any]]


def _of_verifiers(rows: Rows, source: str) -> Rows:
    """`traces.jsonl`, also of prime-rl: traces of agents that are trained; those with an error are unscored."""
    found = [(episode, trace) for episode in rows for trace in episode["traces"] if trace["agent"]["trainable"]]
    usable = [(episode, trace) for episode, trace in found if _is_one_path(trace["nodes"])]
    if left := len(found) - len(usable):
        why = "are not one conversation, whose assistant's turns the model has written. They are left out"
        logger.warning(f"rollouts={source!r}: {left:,} of its {len(found):,} traces {why}.")
    have_tokens = all(any(any(node["mask"]) for node in trace["nodes"]) for _, trace in usable)
    made = []
    for episode, trace in usable:
        nodes, scores = trace["nodes"], [score for score in trace["rewards"].values() if score]
        first = next(place for place, node in enumerate(nodes) if node["sampled"])
        last = next(node for node in reversed(nodes) if node["sampled"])
        temperatures = ((call.get("sampling") or {}).get("temperature") for call in trace["calls"])
        group = (episode.get("group") or {}).get("id") or trace["task"].get("key")
        row: dict[str, Any] = {
            "prompt": [_turn(node["message"], source) for node in nodes[:first]],
            "temperature": next((value for value in temperatures if value is not None), None),
            "reward": sum(one["score"] * one["weight"] for one in scores) if trace["ok"] and scores else None,
            "group": f"{group} {trace['agent']['name']}",
        }
        if have_tokens:
            ids, mask = ([*chain.from_iterable(node[name] for node in nodes)] for name in ("token_ids", "mask"))
            start, logps = mask.index(True), chain.from_iterable(node["logprobs"] for node in nodes)
            row |= {"prompt_ids": ids[:start], "completion_ids": ids[start:], "completion_mask": mask[start:]}
            row["logprobs"] = [next(logps, None) if own else None for own in mask[start:]]
            row["completion"] = last["message"].get("content") or ""  # says whether the tokenizer is the model's
        else:
            row["completion"] = [_turn(node["message"], source) for node in nodes[first:]]
            row["tools"] = [_function(tool, "name", "description", "parameters") for tool in trace["tools"]]
        made.append(row)
    return made


def _is_one_path(nodes: Rows) -> bool:
    """Whether the messages of a trace are one conversation, in which the model has said what the assistant says."""
    parents = {node.get("parent") for node in nodes} - {None}
    sampled = [node["sampled"] for node in nodes if node["message"]["role"] == "assistant"]
    return len(nodes) - len(parents) == 1 and any(sampled) and all(sampled[sampled.index(True) :])


def _turn(message: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A message as chat templates take it: its text in one, and calls as OpenAI writes them."""
    text, calls = message.get("content") or "", message.get("tool_calls") or ()
    if isinstance(text, list):
        if other := [part for part in text if part.get("text") is None]:
            raise ValueError(f"rollouts={source!r}: a message has {other[0]!r:.60}, and only text can be trained on.")
        text = "".join(part["text"] for part in text)
    calls = [call if call.get("function") else _function(call, "name", "arguments") for call in calls]
    turn = {**message, "content": text, "tool_calls": calls}
    return {name: value for name, value in turn.items() if value or name == "content"}


def _function(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {"type": "function", "function": {name: given[name] for name in names}}


def _of_prime_rl(rows: Rows, source: str) -> Rows:
    said = "prime-rl's `token_exports` have advantages, but no rewards and no groups, of which targets are made"
    raise ValueError(f"rollouts={source!r}: {said}. Name a `traces.jsonl` in `rollouts` of that run's folder instead.")


def _of_verl(rows: Rows, source: str) -> Rows:
    said = "verl's `rollout_data_dir` has text without special tokens: prompts lack those of the chat template"
    logger.warning(f"rollouts={source!r}: {said}, and what tools have written counts as sampled.")
    named = {"prompt": "input", "completion": "output", "reward": "score", "group": "step"}
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
        rollout = [{name: value for name, value in row.items() if name != "step"} for row in part]
        for row in rollout if rollout != last else ():  # TRL writes one again at each step that it serves
            score = row[reward] if any(row[name] is not None for name in scores) else None
            made.append({"prompt": row["prompt"], "completion": row["completion"], "reward": score, "group": step})
        last = rollout
    return made


def _of_conversations(rows: Rows, source: str) -> Rows:
    """Of anybody: the completion begins with what the assistant says first."""
    for row in rows:
        turns = row.pop("messages")
        turns = [_turn(message, source) for message in turns] if is_chat(turns) else []
        first = next((place for place, turn in enumerate(turns) if turn["role"] == "assistant"), len(turns))
        row |= {"prompt": turns[:first], "completion": turns[first:]}
    return rows


READERS: tuple[tuple[Collection[str], Callable[[Rows, str], Rows]], ...] = (
    (("task", "traces"), _of_verifiers),
    (("token_ids", "loss_mask", "inference_logprobs"), _of_prime_rl),
    (("input", "output", "score"), _of_verl),
    (("step", "prompt", "completion", "advantage"), _of_trl),
    (("messages",), _of_conversations),
)
