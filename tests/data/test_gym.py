"""Tasks of reasoning-gym: problems, curricula, rewards, and what answers may not do."""

import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from datasets import Dataset

from opo_trl.checks.files import read_json, read_lines
from opo_trl.command import train
from opo_trl.command.arguments import OPOScriptArguments
from opo_trl.data import gym, load_problems, to_prompts
from opo_trl.data.gym import INSTRUCTION, gym_reward, make_problems
from opo_trl.data.prompts import without_overlap
from opo_trl.rewards.scoring import IsolatedReward


ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "reasoning_gym" / "opo.yaml"
needs_gym = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs reasoning-gym: pip install '.[gym]'")


def draw(task: str, split: str = "train", levels=None, **settings) -> list[dict]:
    return make_problems(f"reasoning_gym/{task}", split, levels, settings)


def score(rows: list[dict], completions: list) -> list[float]:
    tasks = [row["task"] for row in rows]
    entries = [row["entry"] for row in rows]
    return gym_reward(completions, task=tasks, entry=entries)


def test_recipe_of_a_task_gets_its_reward_and_instruction():
    script = OPOScriptArguments(dataset_name="reasoning_gym/countdown", dataset_settings='{"size": 7}')
    assert (script.reward_funcs, script.instruction) == (["gym_reward"], INSTRUCTION)
    assert script.dataset_settings == {"size": 7}
    boxed = OPOScriptArguments(dataset_name="reasoning_gym/countdown", reward_funcs=["accuracy_reward"])
    assert "boxed" in boxed.instruction  # this reward does not read tags
    other = OPOScriptArguments(dataset_name="some/name")
    assert other.reward_funcs == ["accuracy_reward"]
    assert "boxed" in other.instruction


@needs_gym
class TestProblems:
    def test_splits_have_different_seeds(self):
        train = draw("chain_sum", "train", size=20)
        test = draw("chain_sum", "test", size=20)
        assert len(train) == len(test) == 20
        training_problems = {row["problem"] for row in train}
        assert training_problems.isdisjoint(row["problem"] for row in test)
        assert draw("chain_sum", size=20) == train
        assert draw("chain_sum", size=20, seed=500) != train

    def test_tasks_that_depend_on_the_order_of_sets_are_the_same_in_every_process(self):
        program = "from opo_trl.data.gym import make_problems as m\nimport sys\n"
        program += "print([row['entry'] for row in m('reasoning_gym/word_ladder', 'train', None, {'size': 4})])"
        printed = set()
        for seed in (1, 2):
            process = subprocess.run(
                [sys.executable, "-c", program],
                env={**os.environ, "PYTHONHASHSEED": str(seed)},
                capture_output=True,
                text=True,
                check=True,
            )
            printed.add(process.stdout)
        assert len(printed) == 1

    def test_levels_are_those_of_the_curriculum(self):
        rows = draw("chain_sum", levels=["0", "2", "0"], size=10)
        assert [row["level"] for row in rows] == ["0"] * 10 + ["2"] * 10
        n_operators = [len(re.findall(r"\+| - ", row["problem"])) for row in rows]
        assert max(n_operators[:10]) < max(n_operators[10:])

    @pytest.mark.parametrize(
        ("levels", "settings", "problem"),
        [
            (["9"], {}, "countdown has the levels 0 to 4"),
            (None, {"numbers": 3}, "unexpected keyword argument 'numbers'"),
            (["0"], {"min_numbers": 5}, "the levels of countdown determine min_numbers"),
        ],
    )
    def test_wrong_levels_and_settings_are_named(self, levels, settings, problem):
        with pytest.raises(ValueError, match=rf"dataset_name='reasoning_gym/countdown' .*{problem}"):
            draw("countdown", levels=levels, **settings)

    def test_prompts_keep_what_the_scorer_reads(self):
        problems = load_problems("reasoning_gym/chain_sum", settings={"size": 4})
        chat = to_prompts(problems, instruction=INSTRUCTION)
        assert set(chat.column_names) == {"solution", "level", "task", "entry", "prompt"}
        (message,) = chat[0]["prompt"]
        assert message["content"] == f"{problems[0]['problem']}\n\n{INSTRUCTION}"
        assert list(chat["solution"]) == list(problems["solution"])
        plain = to_prompts(problems, style="plain")
        assert list(plain["prompt"]) == list(problems["problem"])
        new_problems = draw("chain_sum", "test", size=2)
        held_out = Dataset.from_list(problems.to_list() + new_problems)
        assert len(without_overlap(held_out, problems)) == 2


@needs_gym
class TestReward:
    def test_answer_is_what_the_tags_hold(self):
        (row,) = draw("chain_sum", size=1)
        right = row["solution"]
        for text, expected in (
            (f"I think.</think> So <answer> {right} </answer>.", 1.0),
            (f"<answer>no</answer> <answer>{right}</answer>", 1.0),
            (f"<answer>no<answer>{right}</answer> no</answer>", 1.0),
            (f"<answer>{right}</answer> <answer>no", 1.0),
            (f"<answer>{right}</answer> <answer>no</answer>", 0.0),
            (f"<answer>{right}</answer></think> done", 0.0),
            (f"<think>perhaps <answer>{right}</answer>", 0.0),
            (f"<think>hm</think> <answer>{right}</answer>", 1.0),
            (right, 0.0),
        ):
            completion = [{"role": "assistant", "content": text}]
            assert score([row], [completion]) == [expected], text
        assert score([row], [f"<think>\n{right}"]) == [0.0]
        assert score([row], [f" {right}\n"]) == [1.0]  # a plain completion is the answer
        assert score([row], [f"so <answer>{right}</answer>"]) == [1.0]

    def test_right_answers_score_1_and_what_breaks_the_scorer_0(self):
        rows = draw("rearc", size=3)
        answers = [f"<answer>{row['solution']}</answer>" for row in rows]
        assert score(rows, answers) == [1.0] * 3
        factorization = draw("prime_factorization", size=1)
        assert score(factorization, ["x"]) == [0.0]
        matrix = draw("binary_matrix", size=1)
        assert score(matrix, ["exit()"]) == [0.0]

    def test_answers_that_are_programs_change_nothing(self, tmp_path):
        """Also not in a thread that waits until their scoring is over."""
        (tmp_path / "kept").write_text("here")
        (row,) = draw("countdown", size=1)
        later = f"(__import__('time').sleep(1), open('{tmp_path}/new', 'w'))"
        programs = [
            f"__import__('threading').Thread(target=lambda: {later}).start()",
            f"open('{tmp_path}/new', 'w')",
            f"__import__('os').system('touch {tmp_path}/new')",
            f"__import__('os').remove('{tmp_path}/kept')",
            f"__import__('subprocess').run(['touch', '{tmp_path}/new'])",
            f"__import__('shutil').rmtree('{tmp_path}')",
            "__import__('socket').create_connection(('localhost', 9))",
            f"__import__('sqlite3').connect('{tmp_path}/new')",
        ]
        reward = IsolatedReward(gym_reward, workers=1)
        answers = [*programs, f"<answer>{row['solution']}</answer>"]
        n_answers = len(answers)
        *scores_of_programs, score_of_answer = reward(
            answers, task=[row["task"]] * n_answers, entry=[row["entry"]] * n_answers
        )
        time.sleep(2)
        assert score_of_answer == 1.0
        assert max(scores_of_programs) < 0.1
        assert [path.name for path in tmp_path.iterdir()] == ["kept"]
        reward.close()


@needs_gym
def test_recipe_learns_to_spell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = {"max_steps": 40, "report_size": 200, "validation_steps": 40, "save_strategy": "no", "output_dir": "run"}
    arguments = ["--config", str(RECIPE)]
    for name, value in short.items():
        arguments += [f"--{name}", str(value)]
    assert train.main(arguments) == 0
    folder = tmp_path / "run"
    summary = read_json(folder / "summary.json")
    for level in "23":
        before = summary["before"][level]
        after = summary["after"][level]
        assert before["greedy"]["high"] < 0.1
        assert after["greedy"]["low"] > 0.4
        assert after["sampled"]["low"] > before["sampled"]["high"] + 0.1
    plan = (folder / "plan.txt").read_text()
    assert "prompts of reasoning_gym/spell_backward (train, levels 2)" in plan
    _, second_step, *_ = read_lines(folder / "log.jsonl")
    assert second_step["rewards/gym_reward/mean"] > 0.4
    settings = read_json(folder / "settings.json")
    assert gym.PREFIX in settings["dataset_name"]
