"""The entries of a rollout and of a micro-batch, and what is done with all of them."""

import re
from pathlib import Path

import numpy as np
import torch

from opo_trl.batch import Batch, concatenate, resize, take
from opo_trl.contract import KNOWN_KEYS


DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_the_table_of_the_page_has_every_entry_of_a_batch():
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    _, section = page.split("## Entries of a batch")
    table, _, _ = section.partition("\n## ")
    names = []
    for first_cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
        names += re.findall(r"`(\w+)`", first_cell)
    assert sorted(names) == sorted(Batch.__annotations__)


def test_a_batch_has_every_entry_of_the_tested_releases_of_trl():
    assert Batch.__annotations__.keys() >= set(KNOWN_KEYS)


def entries_of(first: int, *, width: int) -> dict:
    """Two completions, with a tensor, a table and a list of a user's own that tell them apart."""
    numbers = torch.tensor([first, first + 1])
    column = numbers.unsqueeze(1)
    table = column.repeat(1, width)
    return {
        "prompt_ids": column,
        "prompt_mask": column,
        "completion_ids": table,
        "completion_mask": torch.ones_like(table),
        "rewards_per_func": column.float(),
        "tensor": numbers,
        "table": table.unsqueeze(2),
        "list": [str(first), str(first + 1)],
    }


def test_entries_of_a_users_own_travel_with_their_completions():
    batches = [entries_of(1, width=2), entries_of(3, width=3)]
    all_completions = concatenate(batches)
    batch = take(all_completions, np.array([3, 0]))
    assert batch["tensor"].tolist() == [4, 1]
    assert batch["list"] == ["4", "1"]
    assert batch["completion_ids"].tolist() == [[4, 4, 4], [1, 1, 0]]
    table = batch["table"].squeeze(2)
    assert torch.equal(table, batch["completion_ids"])


def test_tables_of_a_users_own_are_as_wide_as_the_completions():
    batch = resize(entries_of(1, width=2), prompt=2, completion=1)
    assert batch["prompt_ids"].tolist() == [[0, 1], [0, 2]]
    assert batch["table"].shape == (2, 1, 1)
    assert batch["rewards_per_func"].shape == (2, 1)
