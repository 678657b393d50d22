"""
Plays games with a model, prints how many it wins of each kind, and writes their log:

    python -m recipes.agent.play MODEL [--games 300] [--split test] [--greedy] [--seed 0]
    python -m recipes.agent.play MODEL --split train --games 128 --repeats 8 --output LOG.jsonl

A line of the log is a game, as an agent's log has it: `messages` and `tools` as of OpenAI's chat API, and `reward`.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.utils import get_json_schema
from trl.chat_template_utils import parse_response

from .storeroom import HELD_OUT, KINDS, Storeroom, draw


TOOL_NAMES = ("find", "take", "order", "ship")
TOOLS = [get_json_schema(getattr(Storeroom(), name)) for name in TOOL_NAMES]
MAX_TURNS, MAX_TOKENS_OF_TURN, BATCH = 9, 24, 256

Game = tuple[str, int, str]  # the kind of a task, its seed and its split


class Player:
    """A model that plays: its policy, sampled at temperature 1, or greedily."""

    def __init__(self, model: str | Path, greedy: bool = False):
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.sampling: dict[str, Any] = {"do_sample": False}
        if not greedy:
            self.sampling = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}

    def play(self, games: Sequence[Game]) -> list[tuple[list[dict], float]]:
        """Play games side by side; returns the messages and the reward of each."""
        played = []
        for start in range(0, len(games), BATCH):
            played += self._play(games[start : start + BATCH])
        return played

    def _play(self, games: Sequence[Game]) -> list[tuple[list[dict], float]]:
        rooms = [Storeroom() for _ in games]
        conversations: list[list[dict]] = []
        for room, game in zip(rooms, games, strict=True):
            room.reset(*game)
            conversations.append([{"role": "user", "content": draw(*game).text}])
        going_on = list(range(len(games)))
        for _ in range(MAX_TURNS):
            answers = self._answer([conversations[index] for index in going_on]) if going_on else []
            for index, answer in zip(going_on, answers, strict=True):
                results = [_run(rooms[index], call["function"]) for call in answer.get("tool_calls") or []]
                conversations[index] += [answer, *results]
            going_on = [index for index in going_on if conversations[index][-1]["role"] == "tool"]
        rewards = [room.get_reward() for room in rooms]
        return list(zip(conversations, rewards, strict=True))

    @torch.no_grad()
    def _answer(self, conversations: list[list[dict]]) -> list[dict]:
        """The next message of the assistant in each conversation."""
        rendered = [
            self.tokenizer.apply_chat_template(
                conversation, tools=TOOLS, add_generation_prompt=True, tokenize=True, return_dict=False
            )
            for conversation in conversations
        ]
        inputs = self.tokenizer.pad({"input_ids": rendered}, padding_side="left", return_tensors="pt")
        sampled = self.model.generate(**inputs, max_new_tokens=MAX_TOKENS_OF_TURN, **self.sampling)
        width = inputs["input_ids"].shape[1]
        answers = []
        for prompt, ids in zip(rendered, sampled[:, width:].tolist(), strict=True):
            if self.tokenizer.eos_token_id in ids:
                ids = ids[: ids.index(self.tokenizer.eos_token_id) + 1]
            answers.append(parse_response(self.tokenizer, ids, prefix=prompt, tools=TOOLS))
        return answers


def _run(room: Storeroom, function: dict) -> dict:
    """The message with what a call returns. As in TRL, the model is told of an error."""
    name = function["name"]
    try:
        if name not in TOOL_NAMES:
            raise ValueError(f"Tool {name} not found.")
        content = getattr(room, name)(**function["arguments"])
    except Exception as error:
        content = str({"error": str(error)})
    return {"role": "tool", "name": name, "content": content}


def success(played: Sequence[tuple[list[dict], float]]) -> float:
    """The share of games that are won."""
    return sum(reward for _, reward in played) / len(played)


def as_log_line(messages: list[dict], reward: float, kind: str, seed: int) -> str:
    """A game as a line of a log. Games of one task are a group."""
    for message in messages:
        for call in message.get("tool_calls") or []:
            arguments = call["function"]["arguments"]
            if not isinstance(arguments, str):
                call["function"]["arguments"] = json.dumps(arguments)
    row = {"messages": messages, "tools": TOOLS, "reward": reward, "group": f"{kind} {seed}"}
    return json.dumps(row) + "\n"


def main() -> None:
    """Play, print, and write a log."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("--games", type=int, default=300, help="tasks of each kind")
    parser.add_argument("--repeats", type=int, default=1, help="games of each task")
    parser.add_argument("--split", choices=("train", "test"), default="test", help="tasks of which split")
    parser.add_argument("--greedy", action="store_true", help="the most likely token instead of samples")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling")
    parser.add_argument("--output", type=Path, help="a log to write, of the training kinds only")
    arguments = parser.parse_args()
    set_seed(arguments.seed)
    player = Player(arguments.model, arguments.greedy)
    lines = []
    kinds = KINDS if arguments.output else (*KINDS, HELD_OUT)
    for kind in kinds:
        games = [(kind, seed, arguments.split) for seed in range(arguments.games) for _ in range(arguments.repeats)]
        played = player.play(games)
        print(f"{kind:<10} {success(played):6.1%} of {len(played):,} games won", flush=True)
        lines += [as_log_line(*result, *game[:2]) for result, game in zip(played, games, strict=True)]
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text("".join(lines))


if __name__ == "__main__":
    main()
