"""What a failing scorer costs if it is isolated."""

import gc
import importlib
import logging
import math
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import failing_rewards
import psutil
import pytest
import torch
from adversarial_answers import ADVERSARIAL, box
from datasets import Dataset
from launched_processes import launch, logs
from pebble import ProcessFuture
from recording_trainers import RecordingOPO, logged, make_trainer, trained
from scripted_rollouts import PROMPTS
from started_programs import wait_until
from trl.rewards import think_format_reward

from opo_trl import OPOConfig
from opo_trl.command.arguments import OPOScriptArguments
from opo_trl.command.named_rewards import load_rewards
from opo_trl.fields import LEAST_WORKER_MEMORY
from opo_trl.rewards import accuracy_reward, scoring
from opo_trl.rewards.errors import RewardError
from opo_trl.rewards.scoring import IsolatedReward


TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def by_fate() -> Iterator[IsolatedReward]:
    reward = IsolatedReward(failing_rewards.by_fate, workers=2, timeout=60.0)
    yield reward
    reward.close()


def score(reward: IsolatedReward, fates: list[str]) -> list[float | None]:
    return reward(["…"] * len(fates), fate=fates)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != "zombie"
    except psutil.NoSuchProcess:
        return False


def none_alive(pids: Iterable[int]) -> bool:
    return not any(map(is_alive, pids))


# What happens to a completion


@pytest.mark.parametrize(
    ("fate", "timeouts", "errors"),
    [
        ("hang in native code", 1, 0),
        ("allocate", 0, 1),
        ("raise", 0, 1),
        ("exit", 0, 1),
        ("be killed", 0, 1),
        ("unscorable", 0, 0),
    ],
)
def test_failure_costs_its_completion_and_no_other(by_fate, monkeypatch, fate, timeouts, errors):
    if fate.startswith("hang"):
        monkeypatch.setattr(by_fate, "timeout", 10.0)
    assert score(by_fate, ["1", fate, "0", "0.5"]) == [1.0, None, 0.0, 0.5]
    assert (by_fate.timeouts, by_fate.errors) == (timeouts, errors)
    assert score(by_fate, ["1", "0"]) == [1.0, 0.0]
    assert (by_fate.timeouts, by_fate.errors) == (0, 0)


def test_warning_says_how_many_failed_and_why_in_one_line_that_no_terminal_obeys(by_fate, caplog):
    score(by_fate, ["raise what a terminal obeys", "raise", "1"])
    assert "by_fate could not score 2 of 3 completions: 0 took longer than 60.0 seconds, 2 failed" in caplog.text
    assert r"ValueError: \x1b[2J\x00" in caplog.text
    assert len(caplog.messages[-1]) < 500
    assert caplog.messages[-1].isprintable()


def test_workers_that_keep_dying_are_all_replaced():
    reward = IsolatedReward(failing_rewards.by_fate, workers=2)
    assert score(reward, ["be killed", "1", "crash"] * 3) == [None, 1.0, None] * 3
    assert reward.errors + reward.timeouts == 6
    reward.close()


def test_what_a_reward_remembers_does_not_add_up_to_the_limit_on_memory(monkeypatch):
    monkeypatch.setattr(scoring, "COMPLETIONS_OF_A_WORKER", 1_000)
    reward = IsolatedReward(failing_rewards.remember, workers=1, memory=600)
    assert reward(["…"] * 3_000) == [1.0] * 3_000
    reward.close()


def test_worker_gets_one_completion_and_its_columns():
    reward = IsolatedReward(failing_rewards.seen, workers=1)
    what_trl_adds = {"trainer_state": object(), "environments": [object(), object()]}
    assert reward(["a", "bcd"], level=["Level 3", "Level 3"], **what_trl_adds) == [1.0, 3.0]
    reward.close()


def test_workers_import_neither_torch_nor_trl():
    reward = IsolatedReward(failing_rewards.loaded, workers=1)
    assert reward(["opo_trl.rewards.scoring", "torch", "trl", "datasets", "transformers"]) == [1.0, 0.0, 0.0, 0.0, 0.0]
    reward.close()


def fork_server() -> psutil.Process:
    for process in psutil.Process().children():
        if "opo_trl.rewards.scoring" in " ".join(process.cmdline()):
            return process
    raise AssertionError("no fork server runs")


def test_workers_that_a_scheduler_tells_to_end_cost_no_score(tmp_path):
    begun, may_end = [str(tmp_path / "0"), str(tmp_path / "1")], tmp_path / "may end"

    def end_all() -> None:
        wait_until(lambda: all(map(os.path.exists, begun)))
        server = fork_server()
        to_end = [server, *server.children()]  # in this order, or the server may start another worker before its end
        for process in to_end:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        wait_until(lambda: none_alive(process.pid for process in to_end))
        may_end.touch()

    reward = IsolatedReward(failing_rewards.begin_and_wait, workers=2, timeout=600.0)
    with ThreadPoolExecutor(1) as scheduler:
        ended = scheduler.submit(end_all)
        assert reward(["…"] * 2, file=begun, until=[str(may_end)] * 2) == [1.0] * 2
    assert ended.exception() is None
    assert (reward.timeouts, reward.errors) == (0, 0)
    reward.close()


def test_pool_that_breaks_while_it_takes_completions_costs_no_score(by_fate, monkeypatch):
    assert score(by_fate, ["1"]) == [1.0]
    pool = by_fate._pool
    schedule = pool.schedule

    def schedule_and_break(*arguments, **named):
        future = schedule(*arguments, **named)
        pool.stop()
        return future

    monkeypatch.setattr(pool, "schedule", schedule_and_break)
    assert score(by_fate, ["1", "0", "0.5"]) == [1.0, 0.0, 0.5]
    assert by_fate._pool is not pool
    assert (by_fate.timeouts, by_fate.errors) == (0, 0)


def test_completion_that_a_worker_has_taken_without_a_word_is_tried_again(monkeypatch):
    """The pool learns neither that a worker has it nor that this worker has ended."""
    reward = IsolatedReward(failing_rewards.by_fate, workers=1)
    assert score(reward, ["1"]) == [1.0]
    forgotten = ProcessFuture()
    waited_for_ever = threading.Timer(240.0, forgotten.set_result, [-1.0])
    waited_for_ever.start()
    first_try, close = pytest.MonkeyPatch(), reward.close

    def end_first_try() -> None:
        first_try.undo()
        close()

    first_try.setattr(reward._pool, "schedule", lambda *_, **__: forgotten)
    first_try.setattr(scoring, "START_LIMIT", 1)
    first_try.setattr(reward, "timeout", 1.0)
    first_try.setattr(reward, "close", end_first_try)
    try:
        assert score(reward, ["0.5"]) == [0.5]
    finally:
        first_try.undo()
        waited_for_ever.cancel()
    assert (reward.timeouts, reward.errors) == (0, 0)
    reward.close()


# What a reward starts

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say what a process has started")


def started(file: Path) -> list[int]:
    """Ids of processes that a file holds."""
    words = file.read_text().split() if file.exists() else []
    return [int(word) for word in words]


@LINUX
@pytest.mark.parametrize("fate", ["hang in native code", "be killed", "crash"])
def test_what_a_reward_has_started_ends_with_its_worker(tmp_path, fate):
    reward = IsolatedReward(
        failing_rewards.start_processes, workers=1, timeout=10.0 if fate.startswith("hang") else 30.0
    )
    assert reward(["…"], fate=[fate], file=[str(tmp_path / "pids")]) == [None]
    pids = started(tmp_path / "pids")
    n_calls = 1 if fate.startswith("hang") else 2  # what loses its worker is scored once more
    assert len(pids) == 3 * n_calls
    wait_until(lambda: none_alive(pids))
    reward.close()


@LINUX
@pytest.mark.parametrize("end", ["closed", "worn out", "told to end", "server told to end"])
def test_what_a_reward_has_started_lives_as_long_as_its_worker(tmp_path, monkeypatch, end):
    monkeypatch.setattr(scoring, "COMPLETIONS_OF_A_WORKER", 3)  # of which the first is that of the pool's start
    reward = IsolatedReward(failing_rewards.start_processes, workers=1)
    assert reward(["…"], fate=["1"], file=[str(tmp_path / "pids")]) == [1.0]
    time.sleep(0.5)
    pids = started(tmp_path / "pids")
    assert [none_alive([pid]) for pid in pids] == [False] * 3
    ancestors = psutil.Process(pids[0]).parents()
    match end:
        case "closed":
            reward.close()
        case "worn out":
            reward(["…"], fate=["1"], file=[str(tmp_path / "others")])
        case "told to end":
            [worker] = [process for process in fork_server().children() if process in ancestors]
            worker.terminate()
        case "server told to end":
            fork_server().terminate()
    wait_until(lambda: none_alive(pids))
    reward.close()


LATE = """
import time

from failing_rewards import start_processes
from opo_trl.rewards import scoring


def late():
    time.sleep(0.2)
    end_descendants()


def reward(**columns):
    return start_processes(**columns)


end_descendants, scoring._end_descendants = scoring._end_descendants, late
"""


@LINUX
def test_worker_that_is_told_to_end_while_it_ends_leaves_nothing_behind(tmp_path, monkeypatch):
    # The pool closes its channel, at which the worker begins to end, and sends SIGTERM at once.
    (tmp_path / "late_end.py").write_text(LATE)
    monkeypatch.setattr(scoring, "_end_descendants", scoring._end_descendants)  # which the import replaces here, too
    monkeypatch.syspath_prepend(tmp_path)
    reward = IsolatedReward(importlib.import_module("late_end").reward, workers=1)
    assert reward(["…"], fate=["1"], file=[str(tmp_path / "pids")]) == [1.0]
    reward.close()
    wait_until(lambda: none_alive(started(tmp_path / "pids")))


# What it takes


def test_too_little_memory_and_a_function_that_no_worker_can_import_are_rejected():
    with pytest.raises(ValueError, match="memory=64 is not allowed"):
        IsolatedReward(failing_rewards.by_fate, memory=64)
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        IsolatedReward(lambda completions, **kwargs: [0.0])


SCRIPT = """
import sys
import failing_rewards
from opo_trl.rewards.scoring import IsolatedReward

def own(completions, **kwargs): return [0.0 for _ in completions]

print("imported", flush=True)
what = sys.argv[1]
if what == "own":
    IsolatedReward(own, workers=1)(["…"])
reward = IsolatedReward(failing_rewards.process_id, workers=2)
print(*(int(pid) for pid in reward(["…"] * 50)), flush=True)
reward = IsolatedReward(failing_rewards.start_processes, workers=1, timeout=600.0)
if what == "raises":
    reward(["…"], fate=["1"], file=["pids"])
    raise SystemExit(7)
if what == "killed":
    reward(["…"] * 100, fate=["hang in native code"] * 100, file=["pids"] * 100)
"""


def start(tmp_path: Path, what: str) -> subprocess.Popen:
    """A script without a `__main__` guard, as people write them."""
    (tmp_path / "script.py").write_text(SCRIPT)
    paths = [str(TESTS.parent), str(TESTS), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(tmp_path / "script.py"), what]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **pipes)


def test_script_is_not_imported_by_workers_and_leaves_none_behind(tmp_path):
    script = start(tmp_path, "raises")
    out, err = script.communicate(timeout=240)
    assert script.returncode == 7, err
    assert out.count("imported") == 1
    _, *workers = out.split()  # after "imported"
    pids = started(tmp_path / "pids") + [int(pid) for pid in workers]
    assert len(pids) >= 4
    wait_until(lambda: none_alive(pids))


@LINUX
def test_killed_script_leaves_no_process_behind(tmp_path):
    """Neither workers that wait, nor one that hangs in native code, nor what that one has started."""
    script = start(tmp_path, "killed")
    wait_until(lambda: len(started(tmp_path / "pids")) == 3)
    pids = {child.pid for child in psutil.Process(script.pid).children(recursive=True)}
    assert pids.issuperset(started(tmp_path / "pids"))
    assert len(pids) > 3  # its workers, too
    script.kill()
    wait_until(lambda: none_alive(pids))


def test_function_of_the_script_itself_is_rejected_with_the_fix(tmp_path):
    script = start(tmp_path, "own")
    _, err = script.communicate(timeout=240)
    assert script.returncode == 1
    assert "reward=own is of the main script. Define it in a module of its own." in err


def test_workers_that_cannot_start_are_an_error(monkeypatch):
    module = ModuleType("nowhere")
    exec("def reward(completions, **kwargs): ...", vars(module))
    monkeypatch.setitem(sys.modules, "nowhere", module)  # in this process only
    monkeypatch.setattr(scoring, "ProcessPool", None)  # which would try again until its time limit
    with pytest.raises(RewardError, match="worker processes of reward do not start"):
        IsolatedReward(module.reward, workers=1)(["…"])


def test_reward_that_is_no_longer_used_ends_its_workers():
    reward = IsolatedReward(failing_rewards.process_id, workers=2)
    pids = [int(pid) for pid in reward(["…"] * 50)]
    del reward
    gc.collect()
    wait_until(lambda: none_alive(pids))


def test_scores_are_right_with_the_least_memory():
    cases = [
        (box("0.5"), r"\frac{1}{2}", 1.0),
        (box(r"\{2,1\}"), r"\{1,2\}", 1.0),
        (box("(x-1)(x+1)"), "x^2-1", 1.0),
        *ADVERSARIAL["boxes in boxes"],
    ]
    completions, golds, verdicts = zip(*cases, strict=True)
    # Workers may share a slow processor, so the wall-clock limit must not decide.
    reward = IsolatedReward(accuracy_reward, workers=2, timeout=300.0, memory=LEAST_WORKER_MEMORY)
    assert reward(completions, solution=golds) == list(verdicts)
    reward.close()


@pytest.mark.parametrize("memory", [LEAST_WORKER_MEMORY - 1, LEAST_WORKER_MEMORY + 0.5, math.inf])
def test_recipe_and_worker_have_the_same_bound_of_memory(memory):
    allowed = f"memory` to an integer of at least {LEAST_WORKER_MEMORY}, in MiB"
    with pytest.raises(ValueError, match=f"reward_{allowed}"):
        OPOScriptArguments(dataset_name="…", reward_memory=memory)
    with pytest.raises(ValueError, match=allowed):
        IsolatedReward(accuracy_reward, memory=memory)
    assert OPOScriptArguments(dataset_name="…", reward_memory=LEAST_WORKER_MEMORY).reward_memory == LEAST_WORKER_MEMORY


@pytest.mark.parametrize(("processes", "workers"), [("1", 4), ("8", 1)])
def test_recipe_isolates_accuracy_reward_and_shares_the_workers_of_a_node(monkeypatch, processes, workers):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    script = OPOScriptArguments(
        dataset_name="…", reward_funcs=["accuracy_reward", "think_format_reward"], reward_timeout=9, reward_memory=1024
    )
    isolated, plain = load_rewards(script, OPOConfig("…", use_cpu=True, bf16=False))
    assert isolated.reward is accuracy_reward
    assert (isolated.workers, isolated.timeout, isolated.memory) == (workers, 9, 1024)
    assert plain is think_format_reward
    script = OPOScriptArguments(dataset_name="…", reward_workers=0)
    assert load_rewards(script, OPOConfig("…", use_cpu=True, bf16=False)) == [accuracy_reward]


@pytest.mark.parametrize(("length", "warns"), [(512, True), (1024, True), (1025, False)])
def test_a_punishment_that_no_completion_is_long_enough_for_is_named(caplog, length, warns):
    script = OPOScriptArguments(dataset_name="…", reward_funcs=["get_soft_overlong_punishment"])
    args = OPOConfig("…", use_cpu=True, bf16=False, max_completion_length=length)
    with caplog.at_level(logging.WARNING):
        (punishment,) = load_rewards(script, args)
    assert punishment(completion_ids=[[0] * length]) == [0.0 if warns else -1 / 256]
    assert (f"max_completion_length={length} allows none" in caplog.text) == warns


# In a run


def test_run_continues_as_if_the_failed_completions_had_no_score(tiny_model, tmp_path):
    def run(reward: Callable, name: str):
        return trained(
            tiny_model,
            tmp_path / name,
            trainer_class=RecordingOPO,
            trainer_arguments={"reward_funcs": reward},
            max_steps=3,
        )

    plain = run(failing_rewards.none_for_every_fourth_length, "plain")
    isolated = run(IsolatedReward(failing_rewards.raise_for_every_fourth_length, workers=2), "isolated")
    for weight, other_weight in zip(plain.model.parameters(), isolated.model.parameters(), strict=True):
        assert torch.equal(weight, other_weight)
    errors = [entry["reward/errors"] for entry in logged(isolated)]
    assert sum(errors) > 3
    assert all(0 < count < 8 for count in errors)
    assert [entry["reward/timeouts"] for entry in logged(isolated)] == [0, 0, 0]
    assert not any("reward/errors" in entry for entry in logged(plain))


def train_with_failing_scores(model: str, folder: str) -> None:
    """In each of two processes, in one of which no completion can be scored; writes down how it ends."""
    reward = IsolatedReward(failing_rewards.by_fate, workers=1)
    data = Dataset.from_dict({"prompt": PROMPTS, "fate": ["1", "0", "1", "0", *["raise", "1"] * 2]})
    arguments = {"reward_funcs": reward, "train_dataset": data}
    options = {"gradient_accumulation_steps": 1, "shuffle_dataset": False, "max_steps": 20}
    trainer = make_trainer(model, Path(folder) / "run", trainer_arguments=arguments, **options)
    try:
        trainer.train()
    except RuntimeError as error:
        path = Path(folder) / f"{trainer.accelerator.process_index}.txt"
        path.write_text(str(error))
    finally:
        reward.close()  # a forked process does not do so at exit, and would wait for its workers


def test_processes_agree_on_the_end(tiny_model, tmp_path):
    where = {"config": "multi_gpu", "processes": 2, "folder": tmp_path}
    assert launch(train_with_failing_scores, tiny_model, str(tmp_path), **where) == [0, 0], logs(tmp_path)
    ends = [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)]
    assert ends[0] == ends[1]
    assert "4 of 8 completions could not be scored: 0 by running out of time, 4 by errors" in ends[0]
