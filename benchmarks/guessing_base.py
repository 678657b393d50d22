"""
Builds the stored base model of the guessing game: a small Qwen3, trained on games of a timid player. It writes the
calls of the tool, and mostly guesses one of the two lowest numbers that are left; only one guess in four is the
middle. To build it again (about four minutes on one CPU core):

    python -m benchmarks.guessing_base --output opo_trl/data/guessing/base

The mistake is systematic on purpose, as in `benchmarks/base_models.py`: greedy decoding plays timidly, too, and the
better guess is sampled often enough to be rewarded. The script ends by measuring how often the stored weights find the
number in the test games of every level, and writes it to `ACCURACY.json` next to them. The same seed draws the same
games everywhere; the weights may differ in the last bits between machines and numbers of threads.
"""

import argparse
import json
import random
import re
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from opo_trl.data.guessing.game import (
    HIGHER,
    LARGEST,
    LEVELS,
    LOWER,
    OVER,
    RIGHT,
    SMALLEST,
    Guessing,
    guesses,
    make_games,
    problem,
    ranges,
)
from opo_trl.evaluate import wilson_interval

from . import base_models
from .arithmetic_base import SHAPE, save
from .base_models import build_model, build_optimizer, train_step


TIMID = 0.75  # share of guesses near the lower end
LEARNING_RATE = 2e-3
WARMUP_STEPS, STEPS = 50, 600
GAMES_PER_BATCH = 96
MAX_LENGTH = 128

# What is written for a call and for its result, apart from the number and the word, is one token each.
CALL, END_OF_CALL = '<tool_call>{"name": "guess", "arguments": {"number": ', "}}</tool_call>"
RESULT, END_OF_RESULT = "<tool_response>", "</tool_response>"
PROMPT = tuple(re.split(r"\d+", problem(SMALLEST, LARGEST, LEVELS[0])))  # its " to " is that of a result, too
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>"
    "{% else %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{% if m.role == 'assistant' %}<eos>{% endif %}{% endif %}{% endfor %}"
)
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"guesses\.|</tool_response>",  # the last one in the prompt is its end
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": "<eos>", "content": "text"},
    },
}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer: a token for each number, and for each piece of text that the game needs."""
    texts = [*PROMPT, CALL, END_OF_CALL, RESULT, END_OF_RESULT, f"{HIGHER}: ", f"{LOWER}: ", RIGHT, OVER]
    numbers = [*(str(guesses(level)) for level in LEVELS), *map(str, range(SMALLEST, LARGEST + 1))]
    pattern = "|".join([*map(re.escape, texts), r"\d+"])
    tokenizer = base_models.build_tokenizer([*texts, *numbers], pattern, MAX_LENGTH)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE
    return tokenizer


def timid_guess(low: int, high: int, rng: random.Random) -> int:
    """A guess of what is left, mostly one of the two lowest numbers, otherwise the middle."""
    return min(low + rng.randrange(2), high) if rng.random() < TIMID else (low + high) // 2


def play(level: str, rng: random.Random, known: list[tuple[int, int]]) -> list[tuple[str, bool]]:
    """A game of the timid player, as pieces of text, each with whether the player wrote it."""
    low, high = rng.choice(known)
    game = Guessing()
    asked = problem(low, high, level)
    game.reset([{"role": "user", "content": asked}], str(rng.randint(low, high)), level)
    parts, heard = [(asked, False)], ""
    while heard not in (RIGHT, OVER):
        guess = timid_guess(game.low, game.high, rng)
        heard = game.guess(guess)
        parts += [(f"{CALL}{guess}{END_OF_CALL}<eos>", True), (f"{RESULT}{heard}{END_OF_RESULT}", False)]
    return [*parts, ("<eos>", True)]


def draw_batch(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, known: dict[str, list[tuple[int, int]]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw games of random levels: token ids and labels `[B, T]`; the labels have only what the player wrote."""
    rows = []
    for _ in range(GAMES_PER_BATCH):
        level = rng.choice(LEVELS)
        parts = play(level, rng, known[level])
        rows.append([(token, own) for text, own in parts for token in tokenizer(text)["input_ids"]])
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), -100)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor([token for token, _ in row])
        labels[i, : len(row)] = torch.tensor([token if own else -100 for token, own in row])
    return ids, labels


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Train the model in place on games of all levels, on the ranges of the training split."""
    rng, known = random.Random(seed), {level: ranges("train", level) for level in LEVELS}
    optimizer = build_optimizer(model, LEARNING_RATE)
    model.train()
    for step in range(STEPS):
        fraction = min((step + 1) / WARMUP_STEPS, (STEPS - step) / (STEPS - WARMUP_STEPS))
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * fraction
        loss = train_step(model, optimizer, *draw_batch(tokenizer, rng, known))
        if step % 100 == 0:
            print(f"step {step} of {STEPS}: loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def found(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, level: str, *, do_sample: bool) -> int:
    """Play the test games of a level, all at once; how many numbers were found."""
    games, texts = [], []
    for row in make_games("test", [level]):
        game = Guessing()
        game.reset([{"role": "user", "content": row["problem"]}], row["solution"][len("\\boxed{") : -1], level)
        games.append(game)
        texts.append(row["problem"])
    number = re.compile(re.escape(CALL) + r"(\d+)" + re.escape(END_OF_CALL))
    for _ in range(guesses(level)):
        inputs = tokenizer(texts, padding=True, return_tensors="pt")
        options = {"temperature": 1.0, "top_p": 1.0, "top_k": 0} if do_sample else {}
        made = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=8,
            do_sample=do_sample,
            **options,
        )
        for i, text in enumerate(tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :])):
            if call := number.match(text):
                heard = games[i].guess(int(call[1]))
                texts[i] += f"{call[0]}<eos>{RESULT}{heard}{END_OF_RESULT}"
    return sum(game.found for game in games)


def measure_stored(folder: Path) -> None:
    """Measure the stored weights, loaded in float32 as for training, and write `ACCURACY.json` next to them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(0)
    accuracy: dict[str, dict] = {}
    for level in LEVELS:
        total = len(make_games("test", [level]))
        for mode in ("sampled", "greedy"):
            right = found(model, tokenizer, level, do_sample=mode == "sampled")
            interval = [round(bound, 4) for bound in wilson_interval(right, total)]
            figures = {"games": total, "found": right, "accuracy": round(right / total, 4), "interval_95": interval}
            accuracy.setdefault(level, {})[mode] = figures
        print(level, *(f"{mode} {figures['accuracy']:.3f}" for mode, figures in accuracy[level].items()))
    (folder / "ACCURACY.json").write_text(json.dumps(accuracy, indent=2) + "\n")


def main() -> None:
    """Build, store and measure the base model."""
    parser = argparse.ArgumentParser(description="Build the base model of the guessing game.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights and of the games")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, SHAPE)
    train(model, tokenizer, arguments.seed)
    save(model, tokenizer, arguments.output)
    measure_stored(arguments.output)


if __name__ == "__main__":
    main()
