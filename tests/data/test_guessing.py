"""The guessing game and its stored player: splits, rules, tokenizer, and the accuracy in `ACCURACY.json`."""

import json
import random
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import get_json_schema
from trl.chat_template_utils import parse_response

from benchmarks.guessing_base import build_tokenizer, found, play
from opo_trl.data.guessing import Guessing, make_games
from opo_trl.data.guessing.game import LEVELS, SPLIT_SIZES, guesses, ranges
from opo_trl.data.models import EMBEDDED_MODELS


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(EMBEDDED_MODELS["guessing"])


def begin(low: int, high: int, number: int, level: str) -> Guessing:
    game = Guessing()
    game.reset([{"role": "user", "content": f"From {low} to {high}, in 9 guesses."}], str(number), level)
    return game


# Games


def test_splits_are_distinct_and_no_range_is_in_both():
    for level in LEVELS:
        by_split = {split: make_games(split, [level]) for split in SPLIT_SIZES}
        texts = {split: {row["problem"] for row in rows} for split, rows in by_split.items()}
        assert not texts["train"] & texts["test"]
        for split, rows in by_split.items():
            assert len({(row["problem"], row["solution"]) for row in rows}) == len(rows) == SPLIT_SIZES[split]
            for row in rows:
                low, high, n = map(int, re.findall(r"\d+", row["problem"]))
                assert low <= int(re.findall(r"\d+", row["solution"])[0]) <= high
                assert n == guesses(level)
                assert 2 ** (n - 1) <= high - low + 1 < 2**n
    assert make_games("test")[: SPLIT_SIZES["test"]] == make_games("test", ["Level 4"])
    with pytest.raises(ValueError, match="Level 3"):
        make_games("test", ["Level 3"])


def test_halving_finds_every_number_and_nothing_else_does():
    for level in LEVELS:
        for low, high in ranges("test", level):
            for number in range(low, high + 1):
                game = begin(low, high, number, level)
                said = ""
                for _ in range(guesses(level)):
                    said = game.guess((game.low + game.high) // 2)
                    if said == "right":
                        break
                assert (said, game.get_reward()) == ("right", 1.0)
    assert max(len(range(low, high + 1)) for low, high in ranges("train", "Level 4")) == 15


def test_answers_say_what_is_left():
    game = begin(20, 30, 27, "Level 4")
    assert game.guess(24) == "higher: 25 to 30"
    assert game.guess("28") == "lower: 25 to 27"  # a model may write quotation marks
    assert game.guess(5) == "higher: 25 to 27"  # outside: a guess is gone, and nothing learned
    with pytest.raises(ValueError, match="invalid literal"):
        game.guess("many")
    assert game.get_reward() == 0.0
    assert game.guess(25) == "over"
    assert game.guess(27) == "over"  # too late
    assert game.get_reward() == 0.0
    game.reset([{"role": "user", "content": "20 to 30"}], "27", "Level 4")
    assert (game.guess(27), game.guess(27), game.get_reward()) == ("right", "over", 1.0)


def test_tool_can_be_described():
    (described,) = [get_json_schema(Guessing().guess)["function"]]
    assert described["parameters"]["required"] == ["number"]
    assert "what is left" in described["return"]["description"]


# The stored player


def test_tokens_of_a_conversation_are_those_that_were_written(tokenizer):
    """TRL appends what the tool said to the tokens of the model; rendered as a whole, the conversation is the same."""
    assert build_tokenizer().get_vocab() == tokenizer.get_vocab()
    (asked, _), *parts = play("Level 5", random.Random(3), ranges("train", "Level 5"))
    messages, ids = [{"role": "user", "content": asked}], tokenizer(asked)["input_ids"]
    assert tokenizer.apply_chat_template(messages, return_dict=False) == ids
    for text, own in parts:
        tokens = tokenizer(text)["input_ids"]
        if own:
            messages.append(parse_response(tokenizer, tokens, prefix=ids, tools=[Guessing().guess]))
        else:
            said = text.removeprefix("<tool_response>").removesuffix("</tool_response>")
            messages.append({"role": "tool", "name": "guess", "content": said})
        ids += tokens
        assert tokenizer.apply_chat_template(messages, return_dict=False) == ids
    assert tokenizer.unk_token_id not in ids
    assert len(messages) >= 4
    assert messages[-1] == {"role": "assistant", "content": ""}


def test_stored_player_is_small_and_as_good_as_it_claims(tokenizer):
    folder = Path(EMBEDDED_MODELS["guessing"])
    assert (folder / "model.safetensors").stat().st_size <= 1.25e6
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(1)
    for level, claimed in json.loads((folder / "ACCURACY.json").read_text()).items():
        tolerance = 4 * (claimed["sampled"]["games"] / 2) ** 0.5  # four standard deviations of a difference
        assert found(model, tokenizer, level, do_sample=False) == pytest.approx(claimed["greedy"]["found"], abs=4)
        assert abs(found(model, tokenizer, level, do_sample=True) - claimed["sampled"]["found"]) < tolerance
