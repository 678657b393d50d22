"""
Tasks of reasoning-gym (https://github.com/open-thought/reasoning-gym), with a small base model each.

    pip install 'opo_trl[gym]'
    python -m benchmarks.gym_tasks ab --output runs/gym/ab
    python -m benchmarks.gym_tasks ab_long --start runs/gym/ab --output runs/gym/ab_long
    python -m benchmarks.gym_tasks palindrome_generation --output runs/gym/palindrome_generation

Problems and scores are the package's own. Prompts are not: its questions explain the task at length, so a prompt
states only what differs between problems.

- `ab`: rewrite an A::B program such as `B# A# #B #A` until no two neighbours face each other. The model writes the
  program after each step; the last one is the answer. Steps may be taken in any order.
- `ab_long`: the same with longer programs and more steps: a solution has 211 tokens on average. Its base model starts
  from that of `ab`, which can copy programs already.
- `palindrome_generation`: make a palindrome of all letters of `x g o x o`. Nothing is worked out in writing, and n
  different pairs of letters have n! right answers.

As in `benchmarks/base_models.py`, the base models learn from solutions with mistakes. One mistake per task is as
likely as the right habit, or more, so that greedy decoding makes it too; the other is rarer.

The output folder gets the model, the problems in `data/`, and accuracies in `base.json`. A recipe needs

    model_name_or_path: runs/gym/ab
    dataset_name: runs/gym/ab/data
    prompt_style: plain
    reward_funcs: benchmarks.gym_tasks.ab_reward    # or palindrome_reward
    max_completion_length: 56                       # 280 for ab_long, 16 for palindrome_generation
    report_levels: ab                               # the name of the task
"""

import argparse
import json
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice, pairwise
from pathlib import Path
from statistics import mean
from string import ascii_lowercase
from typing import Any

import reasoning_gym
import torch
from reasoning_gym.dataset import ProceduralDataset
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
    get_cosine_schedule_with_warmup,
)

from opo_trl.checks.files import write_json

from .arithmetic_base import LEARNING_RATE, SHAPE, WARMUP_STEPS, save
from .base_models import build_model, build_optimizer, build_tokenizer, complete, pad_batch, train_step
from .intervals import estimate
from .record import origin


SPLIT_SIZES = {"test": 1000, "train": 2048}
SEED = 20
MAX_LENGTH = 320  # tokens of a problem with its solution
MEASURED, SAMPLES = 500, 8  # test problems, and completions of each

Entry = dict[str, Any]  # as reasoning-gym draws it: question, answer and metadata
Row = dict[str, str]


@dataclass(frozen=True)
class Task(ABC):
    """
    A task of reasoning-gym, in the form in which a small model meets it.

    Args:
        name: what the command line calls it; the level of its problems.
        source: name of its dataset in reasoning-gym.
        settings: configuration of the dataset.
        pieces: vocabulary.
        pattern: regular expression that matches one token.
        max_new_tokens: longest completion.
        steps: optimizer steps of the base model's training.
        rows: problems per step.
    """

    name: str
    source: str
    settings: dict[str, Any]
    pieces: Sequence[str]
    pattern: str
    max_new_tokens: int
    steps: int
    rows: int

    @abstractmethod
    def problem(self, entry: Entry) -> str:
        """The prompt."""

    @abstractmethod
    def key(self, entry: Entry) -> str:
        """What two entries share if one gives the other's answer away."""

    @abstractmethod
    def is_usable(self, entry: Entry) -> bool:
        """Whether an entry is neither trivial nor too long."""

    @abstractmethod
    def work_out(self, entry: Entry, slips: random.Random | None = None) -> str:
        """A solution: a right one, or one with the mistakes that a source of randomness makes."""

    @abstractmethod
    def answer(self, completion: str) -> str:
        """The final answer of a completion."""

    @abstractmethod
    def scored_part(self, solution: str) -> Entry:
        """What the package's scorer reads of an entry, from its right solution."""

    def dataset(self, seed: int) -> ProceduralDataset:
        """The package's dataset. It draws an entry when it is asked for, so its size costs nothing."""
        return reasoning_gym.create_dataset(self.source, seed=seed, size=2**31, **self.settings)

    def build_tokenizer(self) -> PreTrainedTokenizerFast:
        """Build the tokenizer: exactly the tokens that problems and solutions need."""
        return build_tokenizer(self.pieces, self.pattern, max_length=MAX_LENGTH)

    def score(self, completions: list[Any], solution: list[str]) -> list[float]:
        """1.0 where the package's scorer finds nothing wrong with the final answer, and 0.0 elsewhere."""
        scorer = self.dataset(SEED)
        texts = [
            completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions
        ]
        return [
            float(scorer.score_answer(self.answer(text), self.scored_part(right)) == 1.0)
            for text, right in zip(texts, solution, strict=True)
        ]


# Symbols that face each other in A::B vanish if their letters are equal, and change places if not.
RULES = {
    ("A#", "#A"): (),
    ("A#", "#B"): ("#B", "A#"),
    ("B#", "#A"): ("#A", "B#"),
    ("B#", "#B"): (),
}
# How often two symbols with different letters vanish by mistake. The second is the systematic one.
VANISHING = {("A#", "#B"): 0.25, ("B#", "#A"): 0.5}


@dataclass(frozen=True)
class AB(Task):
    """
    A::B, with the program after each step as the solution. Symbols vanish by mistake at the rates [`VANISHING`].

    Args:
        step_counts: how many steps a program may take until it stops.
        careless_places: how many places, from the start of a program, mistakes are made at. With mistakes anywhere,
            hardly any long solution would be right.
    """

    step_counts: range
    careless_places: int

    def problem(self, entry):
        return " ".join([*self._program(entry), "> "])

    def key(self, entry):
        return self.problem(entry)

    def is_usable(self, entry):
        states = list(self._programs(entry, None))
        # Each has its symbols and a token more: the arrow, or the end of the text.
        return len(states) in self.step_counts and sum(len(state) + 1 for state in states) <= self.max_new_tokens

    def work_out(self, entry, slips=None):
        return "> ".join("".join(f"{symbol} " for symbol in program) for program in self._programs(entry, slips))

    def answer(self, completion):
        return completion.rpartition("> ")[2].strip()

    def scored_part(self, solution):
        return {"answer": self.answer(solution)}

    def _program(self, entry: Entry) -> list[str]:
        """The program in a question: the line after the one that announces it."""
        return entry["question"].partition("following program:\n\n")[2].partition("\n")[0].split()

    def _programs(self, entry: Entry, slips: random.Random | None) -> Iterator[list[str]]:
        """The program after each step, which rewrites the first two symbols that face each other."""
        program = self._program(entry)
        while facing := [index for index, pair in enumerate(pairwise(program)) if pair in RULES]:
            i = facing[0]
            pair = (program[i], program[i + 1])
            vanishes = slips and i < self.careless_places and slips.random() < VANISHING.get(pair, 0)
            program = [*program[:i], *(() if vanishes else RULES[pair]), *program[i + 2 :]]
            yield program


# How often the middle letter is written twice, as if it were a pair: the systematic mistake. How often two neighbours
# in the second half change places.
DOUBLING, SWAPPING = 0.6, 0.25


class Palindrome(Task):
    """A palindrome of given letters, with mistakes at the rates `DOUBLING` and `SWAPPING`."""

    def problem(self, entry):
        return "".join(entry["metadata"]["letters"]) + "="

    def key(self, entry):
        return "".join(sorted(entry["metadata"]["letters"]))

    def is_usable(self, entry):
        return True

    def work_out(self, entry, slips=None):
        if slips is None:
            return entry["answer"]
        counts = Counter(entry["metadata"]["letters"])
        first = [letter for letter, count in counts.items() for _ in range(count // 2)]
        middle = [letter for letter, count in counts.items() if count % 2]
        slips.shuffle(first)
        last = first[::-1]
        if slips.random() < SWAPPING:
            i = slips.randrange(len(last) - 1)
            last[i : i + 2] = last[i + 1], last[i]
        if slips.random() < DOUBLING:
            middle = 2 * middle
        return "".join([*first, *middle, *last])

    def answer(self, completion):
        return completion

    def scored_part(self, solution):
        return {"metadata": {"letters": list(solution)}}


_AB_TOKENS: dict[str, Any] = {"pieces": ("A# ", "#A ", "B# ", "#B ", "> "), "pattern": r"[AB#>]+ "}
TASKS = {
    task.name: task
    for task in (
        AB(
            name="ab",
            source="ab",
            settings={"length": 8},
            **_AB_TOKENS,
            max_new_tokens=56,
            steps=600,
            rows=64,
            step_counts=range(3, 7),
            careless_places=8,
        ),
        AB(
            name="ab_long",
            source="ab",
            settings={"length": 20},
            **_AB_TOKENS,
            max_new_tokens=280,
            steps=600,
            rows=32,
            step_counts=range(13, 19),
            careless_places=2,
        ),
        Palindrome(
            name="palindrome_generation",
            source="palindrome_generation",
            settings={"min_length": 9, "max_length": 12},
            pieces=(*ascii_lowercase, "="),
            pattern=".",
            max_new_tokens=16,
            steps=800,
            rows=128,
        ),
    )
}


def ab_reward(completions: list[Any], solution: list[str], **columns: Any) -> list[float]:
    """Reward 1.0 for a completion whose last program is the final state of the problem's, and 0.0 for any other."""
    return TASKS["ab"].score(completions, solution)


def palindrome_reward(completions: list[Any], solution: list[str], **columns: Any) -> list[float]:
    """Reward 1.0 for a palindrome of the letters of the solution, and 0.0 for any other completion."""
    return TASKS["palindrome_generation"].score(completions, solution)


def make_problems(task: Task) -> dict[str, list[Row]]:
    """
    Draw the problems of a task, the same on every call: 1,000 for `"test"` and 2,048 for `"train"`.

    No two share their [`Task.key`]. The level is the name of the task, so that a recipe can name what to report.

    Returns:
        `dict[str, list[dict[str, str]]]`: split → rows with the keys `problem`, `level` and `solution`.
    """
    rows = (
        {"problem": task.problem(entry), "level": task.name, "solution": task.work_out(entry)}
        for entry in draw_entries(task, sum(SPLIT_SIZES.values()))
    )
    return {split: list(islice(rows, size)) for split, size in SPLIT_SIZES.items()}


def draw_entries(task: Task, size: int) -> list[Entry]:
    """Draw the first usable entries with distinct keys."""
    distinct: dict[str, Entry] = {}
    for entry in filter(task.is_usable, task.dataset(SEED)):
        distinct.setdefault(task.key(entry), entry)
        if len(distinct) == size:
            break
    return list(distinct.values())


def write_problems(splits: dict[str, list[Row]], folder: Path) -> None:
    """Write a JSONL file per split."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def draw_examples(task: Task, seed: int) -> Iterator[tuple[str, str]]:
    """Draw problems with solutions as the base model learns them, endlessly and without the test problems."""
    held_out = {task.key(entry) for entry in draw_entries(task, SPLIT_SIZES["test"])}
    slips = random.Random(seed)
    # The package adds the number of an entry to the seed: seeds far apart share no entries.
    for entry in task.dataset((seed + 1) * 2**32):
        if task.is_usable(entry) and task.key(entry) not in held_out:
            yield task.problem(entry), task.work_out(entry, slips)


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, task: Task, seed: int) -> None:
    """Train the model in place on the examples of [`draw_examples`]."""
    optimizer = build_optimizer(model, LEARNING_RATE)
    scheduler = get_cosine_schedule_with_warmup(optimizer, min(WARMUP_STEPS, task.steps // 4), task.steps)
    examples = draw_examples(task, seed)
    model.train()
    for step in range(task.steps):
        loss = train_step(model, optimizer, *pad_batch(tokenizer, list(islice(examples, task.rows))))
        scheduler.step()
        if step % 20 == 0:
            print(f"step {step} of {task.steps}: loss {loss.item():.4f}", flush=True)


def measure(folder: Path, task: Task, problems: list[Row]) -> dict[str, Any]:
    """
    Measure a stored model, in float32 as for training.

    Returns:
        `dict[str, Any]`: for `"greedy"`, `"sampled"` (mean of 8 completions at temperature 1) and `"pass@8"`, the
        accuracy and its 95 % interval over problems.
    """
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)

    def scores(do_sample: bool) -> list[float]:
        texts = [row["problem"] for row in problems]
        limit = task.max_new_tokens
        completions = complete(model, tokenizer, texts, do_sample=do_sample, max_new_tokens=limit)
        return task.score(completions, [row["solution"] for row in problems])

    samples = list(zip(*(scores(True) for _ in range(SAMPLES)), strict=True))
    measured = {
        "greedy": scores(False),
        "sampled": [mean(row) for row in samples],
        "pass@8": [max(row) for row in samples],
    }
    estimates = {name: estimate(values) for name, values in measured.items()}
    return {
        "problems": len(problems),
        **{name: {"accuracy": found.mean, "interval_95": found.interval} for name, found in estimates.items()},
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Write the problems; build, store and measure the base model."""
    parser = argparse.ArgumentParser(description="Build the base model of a task of reasoning-gym.")
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--start", type=Path, help="folder of a model with the same vocabulary; a new one by default")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights and of the solutions")
    arguments = parser.parse_args(argv)
    task, output = TASKS[arguments.task], arguments.output
    splits = make_problems(task)
    write_problems(splits, output / "data")
    started = time.perf_counter()
    torch.manual_seed(arguments.seed)
    tokenizer = task.build_tokenizer()
    model = build_model(tokenizer, SHAPE)
    if arguments.start:
        model.load_state_dict(Qwen3ForCausalLM.from_pretrained(arguments.start, dtype=torch.float32).state_dict())
    train(model, tokenizer, task, arguments.seed)
    seconds = time.perf_counter() - started
    save(model, tokenizer, output)
    measured = measure(output, task, splits["test"][:MEASURED])
    write_json(
        output / "base.json",
        {**origin(), "reasoning_gym": version("reasoning-gym"), "train_seconds": round(seconds, 1), **measured},
    )
    for name in ("greedy", "sampled", "pass@8"):
        print(f"{name} {measured[name]['accuracy']:.3f}")


if __name__ == "__main__":
    main()
