"""A game of several turns, and a small model that plays it: for tests of tools and environments."""

import random
import re
from pathlib import Path

import torch
from datasets import Dataset

from benchmarks.models.base_models import build_model, build_tokenizer
from opo_trl.data import to_prompts


NUMBERS = range(1, 7)
CALL, END_OF_CALL = '<tool_call>{"name": "guess", "arguments": {"number": ', "}}</tool_call>"
RESULT, END_OF_RESULT = "<tool_response>", "</tool_response>"
TOOL_WROTE = (RESULT, "higher", "lower", "right", END_OF_RESULT)
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>"
    "{% else %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{% if m.role == 'assistant' %}<eos>{% endif %}{% endif %}{% endfor %}"
)
CALLS = {"open": "<tool_call>", "close_pattern": "</tool_call>", "repeats": True, "content": "json"}
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"\.|</tool_response>",  # the last one in the prompt is its end
    "fields": {
        "tool_calls": {**CALLS, "transform": {"type": "function", "function": "{content}"}},
        "content": {"close_pattern": "<eos>", "content": "text"},
    },
}


class Guessing:
    """A number to be guessed; the reward is 1 if it was found."""

    def reset(self, solution: str, **row) -> None:
        self.number, self.found = int(solution), False

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: your guess.
        """
        self.found |= int(number) == self.number
        return "right" if int(number) == self.number else "higher" if self.number > int(number) else "lower"

    def get_reward(self) -> float:
        return float(self.found)


def guess(number: int) -> str:
    """
    Guess the number.

    Args:
        number: your guess.
    """
    return "higher" if number < 5 else "right"


def games(first: int, n: int) -> list[dict[str, str]]:
    """Rows of a dataset, each with a problem of its own."""
    return [{"problem": f"Game {i}.", "solution": str(1 + i % len(NUMBERS))} for i in range(first, first + n)]


GAMES = to_prompts(Dataset.from_list([{**row, "level": ""} for row in games(0, 60)]), instruction="")


def save_player(folder: Path) -> str:
    """Save a model that has learnt to call the tool with any number, up to four times; returns the folder as text."""
    texts = ["Game ", ".", CALL, END_OF_CALL, *TOOL_WROTE]
    pattern = "|".join([*map(re.escape, texts), r"\d"])
    tokenizer = build_tokenizer([*texts, *map(str, range(10))], pattern, max_length=128)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    model = build_model(tokenizer, {**shape, "num_attention_heads": 2, "num_key_value_heads": 1})
    # `float64_reference.Reference` takes gradients by each parameter.
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    rng, optimizer = random.Random(0), torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(150):
        batch = tokenizer([_played(rng) for _ in range(32)], padding=True, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def _played(rng: random.Random) -> str:
    (row,), game = games(rng.randrange(200), 1), Guessing()
    game.reset(**row)
    text = row["problem"]
    for _ in range(4):
        number = rng.choice(NUMBERS)
        hint = game.guess(number)
        text += f"{CALL}{number}{END_OF_CALL}<eos>{RESULT}{hint}{END_OF_RESULT}"
        if hint == "right":
            break
    return text + "<eos>"
