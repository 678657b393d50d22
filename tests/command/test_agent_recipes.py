"""The recipes of docs/agent.md at a tiny size, in a folder to which they were copied: what the page's commands do."""

import json
from pathlib import Path

import pytest
import torch
from forked_modules import run_module
from trl.chat_template_utils import is_chat_template_prefix_preserving, parse_response

from opo_trl.checks.files import read_json, read_lines
from opo_trl.command.cli import main as opo_trl
from recipes.agent.play import TOOLS
from recipes.agent.prepare import build_model, build_tokenizer, encode
from recipes.agent.storeroom import HELD_OUT, KINDS, N_ITEMS_AND_SHORTAGES, Storeroom, draw, play_by_script


TINY = ("--per_device_train_batch_size", "8", "--num_generations", "4", "--max_steps", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the copied recipes, an untrained model and a short log of the expert."""
    folder = tmp_path_factory.mktemp("agent")
    opo_trl(["recipes", "agent", "--output", str(folder / "recipes")])
    run(folder, "recipes.agent.prepare", "--games", "16", "--steps", "1")
    return folder


def run(folder: Path, module: str, *words: str) -> str:
    """Run a module as the page's commands do, in the folder; returns what it prints."""
    return run_module(module, *words, folder=folder, place=folder / "logs")


def train(folder: Path, recipe: str, *words: str) -> list[dict]:
    """Train by a recipe; returns the log of its steps."""
    run(folder, "opo_trl.command.train", "--config", f"recipes/agent/{recipe}.yaml", *TINY, *words)
    log = read_lines(folder / "runs" / "agent" / recipe / "log.jsonl")
    return [line for line in log if "grad_norm" in line]


def test_online_run_plays_and_records_its_games(folder):
    report = ("--report_size", "4", "--report_levels", "one", HELD_OUT)
    assert len(train(folder, "online", *report)) == 2
    summary = read_json(folder / "runs/agent/online/summary.json")
    assert {*summary["before"]} == {*summary["after"]} == {"one", HELD_OUT}
    assert any((folder / "runs/agent/online/rollouts").iterdir())


@pytest.mark.slow
def test_log_of_played_games_is_trained_on(folder):
    log = "runs/agent/log.jsonl"
    play = ("recipes.agent.play", "runs/agent/base", "--games", "1")
    run(folder, *play, "--split", "train", "--repeats", "4", "--output", log)
    rows = read_lines(folder / log)
    assert [row["group"] for row in rows] == [f"{kind} 0" for kind in KINDS for _ in range(4)]
    # An untrained model wins no game. The expert's log has the same form.
    for reward, row in enumerate(rows):
        row["reward"] = float(reward % 2)
    (folder / log).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert len(train(folder, "rollouts", "--rollouts_model", "runs/agent/base")) == 2
    assert f"{HELD_OUT} " in run(folder, "recipes.agent.play", "runs/agent/rollouts", "--games", "1")


@pytest.mark.slow
def test_turns_of_the_log_are_trained_on(folder):
    words = ("runs/agent/expert.jsonl", "--model", "runs/agent/base", "--output", "runs/agent/pivots_data")
    run(folder, "opo_trl.command.cli", "pivots", *words)
    assert len(train(folder, "pivots")) == 2


def test_expert_loses_half_of_its_games_and_none_without_mistakes():
    rewards = [play_by_script(kind, seed)[1] for kind in KINDS for seed in range(500)]
    assert 0.45 < sum(rewards) / len(rewards) < 0.55
    for kind in (*KINDS, HELD_OUT):
        for split in ("train", "test"):
            messages, reward = play_by_script(kind, 7, split, mistakes=False)
            assert reward == 1
            n_items, n_shortages = N_ITEMS_AND_SHORTAGES[kind]
            assert sum("tool_calls" in message for message in messages) == 2 * n_items + n_shortages + 1


def test_games_are_the_same_for_a_seed_and_orders_of_the_splits_are_not():
    assert play_by_script("two_short", 3) == play_by_script("two_short", 3)
    texts = {split: {draw("one", seed, split).text for seed in range(300)} for split in ("train", "test")}
    assert texts["train"].isdisjoint(texts["test"])


@pytest.mark.parametrize(
    ("mistake", "reward"),
    [
        ({}, 1.0),
        ({"count": 1}, 0.0),
        ({"customer": "nobody"}, 0.0),
        ({"items": []}, 0.0),
    ],
)
def test_game_is_won_by_exactly_what_was_ordered(mistake, reward):
    task, game = draw("one", 0), Storeroom()
    game.reset("one", 0, "train")
    ((item, count),) = task.wanted.items()
    right = {"count": count, "customer": task.customer, "items": [item]}
    right.update(mistake)
    game.take(task.shelves[item], right["count"])
    game.ship(right["customer"], right["items"])
    assert game.get_reward() == reward


def test_tokenizer_reads_every_call_of_a_game_as_it_was_written():
    tokenizer = build_tokenizer()
    assert is_chat_template_prefix_preserving(tokenizer)
    assert build_model(tokenizer).num_parameters() < 250_000
    messages, _ = play_by_script(HELD_OUT, 1)
    ids, is_written = map(torch.tensor, encode(tokenizer, messages))
    assert tokenizer.unk_token_id not in ids
    (ends,) = torch.where((ids == tokenizer.eos_token_id) & (is_written == 1))
    (starts,) = torch.where(ids == tokenizer.convert_tokens_to_ids("<assistant>"))
    turns = [message for message in messages if message["role"] == "assistant"]
    for start, end, turn in zip(starts.tolist(), ends.tolist(), turns, strict=True):
        prefix, written = ids[: start + 1].tolist(), ids[start + 1 : end + 1].tolist()
        parsed = parse_response(tokenizer, written, prefix=prefix, tools=TOOLS)
        assert parsed["content"] == turn["content"]
        for call, logged in zip(parsed.get("tool_calls", []), turn.get("tool_calls", []), strict=True):
            assert call["function"]["name"] == logged["function"]["name"]
            assert call["function"]["arguments"] == json.loads(logged["function"]["arguments"])
