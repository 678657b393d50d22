"""
The GPU benchmarks, on a CPU: the word problems, the recipes, and tiny runs of everything.
"""

import itertools
import json
import random
import re
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import environment, run_to_its_end

from benchmarks.gpu import base, word_arithmetic
from benchmarks.gpu.words import (
    LEVELS,
    MAX_LENGTH,
    Problem,
    build_tokenizer,
    draw_problem,
    make_problems,
    slip,
    word_reward,
)
from benchmarks.record import Limit, measure_missing


ROOT = Path(__file__).resolve().parents[2]

# What `benchmarks/gpu/run.sh` writes, and the number of cases at tiny size.
PARTS = {"memory.json": 6, "update_phase.json": 4, "word_arithmetic/results.json": 5}

# What each verb does to the number, stated independently.
VERBS = {
    "+": ("buys", "finds", "wins", "is given", "gets"),
    "-": ("gives", "sells", "loses", "hands", "throws"),
    "*2": ("doubles",),
    "*3": ("triples",),
}
SIGNS = {verb: sign for sign, verbs in VERBS.items() for verb in verbs}


def read_story(problem: str) -> int:
    """The answer from the text alone: the opening, then every change of the person in the question."""
    *sentences, question = problem.strip().split(". ")
    name = re.search(r"(?:has|does) (\w+)", question)[1]
    opening, *story = sentences
    assert opening.startswith(f"{name} ")
    value = int(re.search(r"\d+", opening)[0])
    for sentence in story:
        subject = sentence.split()[0]
        if subject not in (name, "She", "He"):
            continue
        for change in sentence.split(" and "):
            verb = next(verb for verb in SIGNS if re.search(rf"\b{verb}\b", change))
            sign, number = SIGNS[verb], re.search(r"\d+", change)
            value = eval(f"{value}{sign}{number[0] if number else ''}")
    return value


@pytest.fixture(scope="module")
def problems() -> dict[str, list[dict[str, str]]]:
    return {split: make_problems(split) for split in ("train", "test")}


# The task


def test_every_solution_follows_its_story_and_every_equation_is_right(problems):
    for row in problems["train"] + problems["test"]:
        *equations, answer = row["solution"].split(". ")
        sides = [equation.split("=") for equation in equations]
        assert all(eval(left) == int(right) for left, right in sides), row
        assert all(later[0].startswith(f"{earlier[1]}") for earlier, later in pairwise(sides)), row
        assert len(equations) == int(row["level"][-1])
        assert answer == f"Answer: {sides[-1][1]}" == f"Answer: {read_story(row['problem'])}", row
        assert all(10 <= int(right) <= 999 for _, right in sides)


def test_distractors_are_in_the_higher_levels_and_no_solution_uses_them(problems):
    kinds = {level: {row["type"] for row in problems["test"] if row["level"] == level} for level in LEVELS}
    assert [kinds[level] for level in LEVELS] == [{"Plain"}] * 2 + [{"Plain", "Distractor"}] * 4
    for row in problems["test"]:
        numbers_told = len(re.findall(r"\d+", row["problem"]))
        numbers_used = 1 + len(re.findall(r"[+-]\d", row["solution"]))
        assert (numbers_told > numbers_used) == (row["type"] == "Distractor"), row


@pytest.mark.parametrize(("split", "size"), [("train", 2048), ("test", 500)])
def test_every_level_has_its_number_of_distinct_problems(problems, split, size):
    for level in LEVELS:
        rows = [row for row in problems[split] if row["level"] == level]
        assert len({row["problem"] for row in rows}) == len(rows) == size


def test_splits_share_no_problem(problems):
    train, test = ({row["problem"] for row in rows} for rows in problems.values())
    assert not train & test


def test_same_problems_on_every_call_whatever_the_state_of_the_random_generator(problems):
    random.seed(1)
    assert make_problems("test", ["Level 5", "Level 2"]) == [
        row for level in ("Level 5", "Level 2") for row in problems["test"] if row["level"] == level
    ]


def test_unknown_split_and_level_are_named():
    with pytest.raises(ValueError, match=r"split='dev' does not exist.*train.*test"):
        make_problems("dev")
    with pytest.raises(ValueError, match=r"levels=\['Level 7'\] do not exist.*Level 6"):
        make_problems("test", ["Level 7"])


SOLUTION = "14+9=23. 23-6=17. Answer: 17"


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (SOLUTION, 1.0),
        ("14+9=24. Answer: 17", 1.0),
        ([{"role": "assistant", "content": "Answer: 17"}], 1.0),
        ("14+9=23. 23-6=17. Answer: 16", 0.0),
        ("14+9=23. 23-6=17.", 0.0),
        ("17", 0.0),
        ("Answer: 17.", 0.0),
        ("Answer: 17 ", 0.0),
        ("Answer: 17\n", 0.0),
        ("Answer: 017", 0.0),
        ("Answer: +17", 0.0),
        ("Answer: 1７", 0.0),
        ("Answer:17", 0.0),
        ("Answer: 16. Answer: 17", 0.0),
        ("Answer: 17. Answer: 17", 0.0),
        ("Answer:Answer: 17", 0.0),
        ("", 0.0),
    ],
)
def test_reward_takes_one_answer_at_the_end_and_nothing_else(completion, reward):
    assert word_reward([completion], [SOLUTION]) == [reward]


def test_reward_pairs_each_completion_with_its_solution():
    assert word_reward(["Answer: 5", "Answer: 17"], [SOLUTION, SOLUTION], problem=["", ""]) == [0.0, 1.0]
    with pytest.raises(ValueError, match="zip"):
        word_reward(["Answer: 17"], [SOLUTION, SOLUTION])


def test_a_pronoun_stands_only_where_it_can_mean_one_person(problems):
    for row in problems["test"]:
        sentences = row["problem"].strip().split(". ")[:-1]
        name = sentences[0].split()[0]
        for before, after in pairwise(sentences):
            if after.startswith(("He ", "She ")):
                assert before.startswith((f"{name} ", "He ", "She ")), row


# The base model


def test_tokenizer_gives_every_text_back(problems):
    tokenizer = build_tokenizer()
    texts = [row["problem"] + row["solution"] for row in problems["train"]]
    encoded = tokenizer(texts)["input_ids"]
    assert tokenizer.batch_decode(encoded) == texts
    assert tokenizer.unk_token_id not in {token for ids in encoded for token in ids}
    assert max(map(len, encoded)) < MAX_LENGTH
    assert max(len(ids) for ids in tokenizer([row["solution"] for row in problems["train"]])["input_ids"]) <= 85


@pytest.mark.parametrize(
    ("left", "operator", "right", "slipped"),
    [
        (147, "+", 38, 175),
        (141, "+", 38, 179),
        (85, "-", 16, 71),
        (88, "-", 16, 72),
        (27, "*", 3, 61),
        (23, "*", 3, 69),
    ],
)
def test_a_slip_drops_the_carry_and_nothing_else(left, operator, right, slipped):
    assert slip(left, operator, right) == slipped


def test_base_model_sees_slips_at_their_rate_and_continues_from_them():
    rng = random.Random(0)
    slipped = carrying = 0
    for _ in range(400):
        problem = draw_problem("Level 3", rng)
        *equations, answer = base.draw_slipping_solution(problem, rng).split(". ")
        value = problem.start
        for (sign, operand), equation in zip(problem.steps, equations, strict=True):
            left, result = equation.split("=")
            assert left == f"{value}{sign}{operand}"
            value = int(result)
            wrong = slip(*_operation(left))
            carrying += wrong != eval(left)
            slipped += value != eval(left)
            assert value in (wrong, eval(left))
        assert answer == f"Answer: {value}"
    # Slightly below the rate, because solutions whose slips leave the range are drawn again.
    assert 0.6 < slipped / carrying < 0.72


def _operation(text: str) -> tuple[int, str, int]:
    left, sign, right = re.fullmatch(r"(\d+)(\D)(\d+)", text).groups()
    return int(left), sign, int(right)


def test_batches_teach_the_solution_alone_and_leave_test_problems_out(monkeypatch):
    tokenizer = build_tokenizer()
    held_out = Problem("Mara has 14 pears. She buys 9 more. How many pears has Mara now?\n", 14, (("+", 9),), 0)
    other = Problem("Mara has 14 pears. She buys 8 more. How many pears has Mara now?\n", 14, (("+", 8),), 0)
    drawn = iter([held_out, other, held_out, other])
    batches = base.SlippingSolutions(tokenizer, rows=2, seed=0)
    batches.held_out = {held_out.text}
    monkeypatch.setattr(base, "draw_problem", lambda level, rng: next(drawn))
    ids, labels = next(iter(batches))
    for row, target in zip(ids, labels, strict=True):
        text = tokenizer.decode(row[: (row != tokenizer.pad_token_id).sum()])
        assert text.startswith(other.text)
        learned = tokenizer.decode(target[target != -100])
        assert text == other.text + learned
        assert re.fullmatch(r"14\+8=[12]2\. Answer: [12]2<eos>", learned)


def test_base_model_learns_in_the_time_it_is_given(monkeypatch):
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    model = base.build_model(tokenizer, base.TINY_SHAPE)
    ticks = itertools.count()  # one second per step, however busy the machine is
    monkeypatch.setattr(base, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    trained = base.train(model, tokenizer, seconds=40, rows=8, seed=0)
    assert (trained["steps"], trained["seconds"]) == (40, 40.0)
    assert trained["last_loss"] < 4.3  # log of 101 tokens: 4.6


def test_base_model_has_its_documented_size():
    with torch.device("meta"):
        model = base.build_model(build_tokenizer(), base.SHAPE)
    assert 50e6 < sum(p.numel() for p in model.parameters()) < 60e6


# Everything at tiny size


def test_what_is_measured_stays_and_what_is_missing_is_measured(tmp_path, capsys):
    measured, broken = [], ["b"]

    def case(name):
        if name == "large":
            raise torch.OutOfMemoryError
        if name in broken:
            raise ValueError(f"no {name}")
        measured.append(name)

    file, cases = (
        tmp_path / "new" / "results.json",
        {name: lambda name=name: case(name) for name in ("large", "a", "b", "c")},
    )
    first = {name: cases[name] for name in ("large", "a")}
    measure_missing(file, {"rows": 8}, first, Limit(60))
    measure_missing(file, {"rows": 8}, cases, Limit(0))
    assert measured == ["a"]
    assert "the same command resumes" in capsys.readouterr().out
    assert measure_missing(file, {"rows": 8}, cases, Limit(60))["failed"] == {"b": "ValueError: no b"}
    assert measured == ["a", "c"]  # what fails does not stop the others
    broken.clear()
    assert measure_missing(file, {"rows": 8}, cases, Limit(60))["failed"] == {}
    assert measured == ["a", "c", "b"]
    results = json.loads(file.read_text())
    assert results["cases"] == {"large": "out of memory", "a": None, "b": None, "c": None}
    assert {"command", "date", "device", "versions"} <= results.keys()
    with pytest.raises(ValueError, match=r"settings=\{'rows': 8\}.*Choose another output"):
        measure_missing(file, {"rows": 4}, cases, Limit(60))


def test_case_in_which_the_process_ends_is_tried_again_after_the_others(tmp_path):
    measured, file = [], tmp_path / "results.json"
    cases = {name: lambda name=name: measured.append(name) for name in ("a", "b")}

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_missing(file, {}, {"a": interrupted}, Limit(60))
    assert json.loads(file.read_text())["failed"] == {"a": "did not end"}
    assert measure_missing(file, {}, cases, Limit(60))["failed"] == {}
    assert measured == ["b", "a"]


def test_first_case_starts_only_if_its_estimate_fits(tmp_path):
    file = tmp_path / "results.json"
    assert measure_missing(file, {}, {"a": lambda: 1}, Limit(60), first=61)["cases"] == {}
    assert not file.exists()
    assert measure_missing(file, {}, {"a": lambda: 1}, Limit(60), first=59)["cases"] == {"a": 1}


@pytest.mark.slow
def test_word_arithmetic_runs_to_its_end_and_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    argv = ["--output", str(tmp_path), "--tiny", "--base_seconds", "2"]
    assert word_arithmetic.main([*argv, "--limit_seconds", "1"]) == 0
    assert not (tmp_path / "results.json").exists()
    assert word_arithmetic.main([*argv, "--limit_seconds", "4"]) == 0
    stopped = json.loads((tmp_path / "results.json").read_text())
    assert list(stopped["cases"]) == ["base"]
    assert "the same command resumes" in capsys.readouterr().out
    assert word_arithmetic.main(argv) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["cases"]["base"] == stopped["cases"]["base"]
    assert_complete(results)
    with pytest.raises(ValueError, match=r"settings=.*Choose another output"):
        word_arithmetic.main([*argv, "--learning_rate", "1e-4"])


def assert_complete(results: dict) -> None:
    """All tiny runs of `word_arithmetic` are there."""
    assert results["failed"] == {}
    assert {"command", "date", "device", "versions"} <= results.keys()
    base, *runs = results["cases"].values()
    assert list(results["cases"]) == ["base", *(f"{method}, seed 42" for method in word_arithmetic.METHODS)]
    for case in (base, *runs):
        assert list(case["accuracy"]) == list(LEVELS)
        for by_decoding in case["accuracy"].values():
            assert all(result["problems"] == 4 for result in by_decoding.values())
            assert all(result["low"] <= result["accuracy"] <= result["high"] for result in by_decoding.values())
    # A rollout is logged at the first of its two optimizer steps.
    assert all([step for step, _ in run["reward"]] == [1, 3] for run in runs)


@pytest.mark.slow
def test_everything_runs_to_its_end_on_a_device_within_limits_and_resumes(library, shared, tmp_path):
    def run(limit: int) -> str:
        env = environment(PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="0", TINY="1", LIMIT_SECONDS=str(limit))
        command = [shared / "tools" / "fakecuda" / "run.sh", ROOT / "benchmarks" / "gpu" / "run.sh", tmp_path]
        status, printed = run_to_its_end(command, env, limit=900)
        assert status == 0, printed[-6000:]
        return printed

    assert run(0).count("no time left, the same command resumes") == len(PARTS) + 1  # and the checks
    assert "10 passed" in run(3000)
    results = {part: json.loads((tmp_path / part).read_text()) for part in PARTS}
    for part, cases in PARTS.items():
        found = results[part]
        assert found["failed"] == {}
        assert len(found["cases"]) == cases
        assert found["device"].startswith("pretend GPU")
        assert "out of memory" not in found["cases"].values()
    for case in results["memory.json"]["cases"].values():
        assert 0 < case["optimizer step"][1] < case["update"][1]
    for case in results["update_phase.json"]["cases"].values():
        assert 0 < case["OPO"]["peak_memory"] < 1e9
        assert case["OPO"]["share_of_peak"] is None  # of a device that is not known
    assert_complete(results["word_arithmetic/results.json"])
    assert "passed" not in run(3000)
    assert results == {part: json.loads((tmp_path / part).read_text()) for part in PARTS}


def test_run_with_an_unknown_field_is_rejected(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("{}\n")
    with pytest.raises(RuntimeError, match="exit status 2"):
        word_arithmetic.run_method("opo", 1, tmp_path, word_arithmetic.TINY, ["--no_such_field", "1"])
    assert "--no_such_field" in capsys.readouterr().err
