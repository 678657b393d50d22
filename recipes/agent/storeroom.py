"""
A storeroom: a game of several turns to train an agent in, and its scripted expert, who makes mistakes.

A customer orders one or two items, as in `Ada: 3 nails, 2 bolts.` The agent finds each item's shelf, takes what is
there, orders what the shelf lacks, and ships all of it to the customer. A game is won if the customer has got exactly
what was ordered. All is drawn by seed.

To train in a game of yours, replace this file: `prepare.py` and `play.py` use `KINDS`, `HELD_OUT`, `WORDS`, `draw`,
`Storeroom` and `play_by_script` only, and recipes name `recipes.agent.storeroom.Storeroom`.
"""

import json
import random
import zlib
from dataclasses import dataclass
from typing import Any


ITEMS = ("nails", "bolts", "hooks", "pipes", "ropes", "lamps", "tiles", "tapes")
CUSTOMERS = ("Ada", "Ben", "Eve", "Kim", "Leo", "Mia")
LARGEST = 9  # of numbers, so that each is one digit

# Kinds of tasks: how many items are ordered, and how many of these the shelf has too few of. A game takes 3 calls for
# one item and 5 for two, and one more for a shortage.
N_ITEMS_AND_SHORTAGES = {"one": (1, 0), "one_short": (1, 1), "two": (2, 0), "two_short": (2, 1), "rare_short": (1, 1)}
KINDS = ("one", "one_short", "two", "two_short")  # to train on
# Never trained on: there are too few of an item of which there are always enough elsewhere.
HELD_OUT, RARELY_SHORT = "rare_short", ("lamps", "tiles", "tapes")

# How often the script makes a mistake where it could. The first two are habits, about as likely as what is right.
OVERLOOKS_SHORTAGE, FORGETS_ITEM, MISREADS_SHELF, MISTAKES_CUSTOMER = 0.5, 0.4, 0.05, 0.08

# The words of orders and results, for the tokenizer of the small model.
WORDS = (
    *(*ITEMS, *CUSTOMERS, *map(str, range(LARGEST + 1)), ": ", " ", ", ", ".", "done"),
    *("shelf ", " has ", "taken", "too many", "ordered", "is there", "unknown", "shipped", "closed"),
)


@dataclass(frozen=True)
class Task:
    """An order, by item, and where each item of the storeroom is: its shelf, and how many are there."""

    customer: str
    wanted: dict[str, int]
    shelves: dict[str, int]
    stock: dict[str, int]

    @property
    def text(self) -> str:
        """What the customer says."""
        parts = [f"{count} {item}" for item, count in self.wanted.items()]
        return f"{self.customer}: {', '.join(parts)}."


def draw(kind: str, seed: int, split: str = "train") -> Task:
    """
    The task with a seed. Orders of the split `"test"` are never those of `"train"`: the text decides, for one in five.
    """
    rng = random.Random(f"{kind} {seed}")
    while True:
        task = _draw(kind, rng)
        is_test = zlib.crc32(task.text.encode()) % 5 == 0
        if is_test == (split == "test"):
            return task


def _draw(kind: str, rng: random.Random) -> Task:
    n_items, n_shortages = N_ITEMS_AND_SHORTAGES[kind]
    may_be_short = [item for item in ITEMS if (item in RARELY_SHORT) == (kind == HELD_OUT)]
    short = rng.sample(may_be_short, n_shortages)
    others = rng.sample([item for item in ITEMS if item not in short], n_items - n_shortages)
    items = rng.sample([*short, *others], n_items)
    wanted = {item: rng.randint(2, 6) for item in items}
    numbers = rng.sample(range(1, LARGEST + 1), len(ITEMS))
    stock = {item: rng.randint(wanted.get(item, 1), LARGEST) for item in ITEMS}
    for item in short:
        stock[item] = rng.randint(1, wanted[item] - 1)
    return Task(rng.choice(CUSTOMERS), wanted, dict(zip(ITEMS, numbers, strict=True)), stock)


class Storeroom:
    """The environment: each public method but `reset` and `get_reward` is a tool."""

    def reset(self, level: str, seed: int, split: str, **row: Any) -> None:
        """Begin the game of a row of the dataset, whose `level` is the kind of its task."""
        self._task = draw(level, seed, split)
        self._stock = dict(self._task.stock)
        self._collected: dict[str, int] = {}
        self._shipped: tuple[str, list[str]] | None = None

    def find(self, item: str) -> str:
        """
        Find the shelf of an item, and how many are there.

        Args:
            item: the item's name.
        """
        if item not in self._stock:
            return "unknown"
        return f"shelf {self._task.shelves[item]} has {self._stock[item]}"

    def take(self, shelf: int, count: int) -> str:
        """
        Take items from a shelf.

        Args:
            shelf: the shelf's number.
            count: how many to take.
        """
        for item, number in self._task.shelves.items():
            if number == shelf:
                if count > self._stock[item]:
                    return "too many"
                self._stock[item] -= count
                self._collect(item, count)
                return "taken"
        return "unknown"

    def order(self, item: str, count: int) -> str:
        """
        Order what an empty shelf lacks.

        Args:
            item: the item's name.
            count: how many to order.
        """
        if item not in self._stock:
            return "unknown"
        if self._stock[item]:
            return "is there"
        self._collect(item, count)
        return "ordered"

    def ship(self, customer: str, items: list[str]) -> str:
        """
        Ship items that were collected, which ends the game.

        Args:
            customer: who gets them.
            items: their names.
        """
        if self._shipped is not None:
            return "closed"
        self._shipped = (customer, list(items))
        return "shipped"

    def get_reward(self) -> float:
        """1 if the customer has got what was ordered and nothing else is missing in the storeroom, else 0."""
        task = self._task
        return float(self._shipped == (task.customer, list(task.wanted)) and self._collected == task.wanted)

    def _collect(self, item: str, count: int) -> None:
        if self._shipped is None:
            self._collected[item] = self._collected.get(item, 0) + count


def play_by_script(
    kind: str, seed: int, split: str = "train", game_number: int = 0, mistakes: bool = True
) -> tuple[list[dict], float]:
    """
    A game of the scripted expert: its messages, as of OpenAI's chat API, and its reward. With `mistakes`, games of a
    task differ by their number, and about half of the games of the training kinds fail.
    """
    rng = random.Random(f"script {kind} {seed} {game_number}")
    task, game = draw(kind, seed, split), Storeroom()
    game.reset(kind, seed, split)
    messages: list[dict] = [{"role": "user", "content": task.text}]

    def call(name: str, **arguments: Any) -> None:
        function = {"name": name, "arguments": json.dumps(arguments)}
        messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        )
        messages.append({"role": "tool", "name": name, "content": getattr(game, name)(**arguments)})

    def errs(rate: float) -> bool:
        return mistakes and rng.random() < rate

    for item, count in task.wanted.items():
        call("find", item=item)
        shelf = rng.randint(1, LARGEST) if errs(MISREADS_SHELF) else task.shelves[item]
        missing = max(count - task.stock[item], 0)
        if missing and errs(OVERLOOKS_SHORTAGE):
            missing = 0
        call("take", shelf=shelf, count=count - missing)
        if missing:
            call("order", item=item, count=missing)
    customer = rng.choice(CUSTOMERS) if errs(MISTAKES_CUSTOMER) else task.customer
    items = list(task.wanted)
    if len(items) > 1 and errs(FORGETS_ITEM):
        items = items[-1:]
    call("ship", customer=customer, items=items)
    messages.append({"role": "assistant", "content": "done"})
    return messages, game.get_reward()
