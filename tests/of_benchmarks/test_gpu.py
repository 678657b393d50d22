"""`./start gpu` at tiny size: three trainers on the same prompts, their budgets, and what a part cut off leaves."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from started_programs import environment, run_to_its_end, wait_until
from tiny import save_short_problems
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.gpu import part
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.page import read_parts, write_report
from benchmarks.gpu.settings import FULL, MAX_PROMPT_LENGTH, PARTS, TINY, TINY_DATA, TINY_MODEL, Settings
from benchmarks.updates.shapes import QWEN3_0_6B
from opo_trl.forecast import memory


ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--output"]
T4 = 15.8e9  # bytes that PyTorch sees on a GPU of 16 GB


@pytest.fixture
def tiny(monkeypatch) -> Settings:
    monkeypatch.chdir(ROOT)
    return Settings(TINY_MODEL, TINY_DATA, tiny=True)


def read_report(output: Path) -> dict:
    return json.loads((output / "report.json").read_text())["parts"]


def steps_of(output: Path, name: str) -> list[dict]:
    """The optimizer steps of a part that the report has so far."""
    if not (output / "report.json").is_file():
        return []
    return read_report(output).get(name, {}).get("steps", [])


def test_all_trainers_see_the_same_prompts_and_the_page_has_what_they_measured(tiny, tmp_path, monkeypatch):
    prompts: dict[str, list[str]] = {}
    scored = part.arithmetic_reward

    def reward(prompts_of_batch, **columns):
        prompts[name] += prompts_of_batch
        return scored(prompts=prompts_of_batch, **columns)

    monkeypatch.setattr(part, "arithmetic_reward", lambda prompts, **columns: reward(prompts, **columns))
    for name in PARTS:
        prompts[name] = []
        part.run(name, tiny, tmp_path, seconds=600)
    assert prompts["grpo"] == prompts["opo"] == prompts["grpotrainer"]
    assert len(set(prompts["opo"])) == TINY.problems + TINY.completions // TINY.group
    write_report(tmp_path, {})
    found = read_report(tmp_path)
    for name, own in found.items():
        assert own["end"] == "all completions"
        assert own["completions"] == TINY.completions
        steps = 2 * TINY.steps_per_rollout * PARTS[name].passes
        assert [line["step"] for line in own["steps"]] == list(range(1, steps + 1))
        assert [line["step"] for line in own["accuracies"]] == [0, steps // 2, steps]
        assert own["accuracies"][0]["accuracy"] == found["opo"]["accuracies"][0]["accuracy"]
        assert min(own["seconds"].values()) > 0
        generated = [line["seconds"]["generate"] > 0 for line in own["steps"]]
        assert generated == [line["reward"] is not None for line in own["steps"]]
        assert generated.count(True) == 2
    page = (tmp_path / "report.md").read_text()
    assert page.count("| OPO with replay |") == 1 + 3
    assert "OPO with replay less GRPOTrainer at the end" in page
    ratio = found["grpo"]["update_of_a_step"]["median"] / found["grpotrainer"]["update_of_a_step"]["median"]
    assert f"takes {ratio:.2f} of GRPOTrainer's time" in page


def test_part_ends_after_the_rollout_behind_which_there_is_no_time(tiny, tmp_path):
    part.run("grpo", tiny, tmp_path, seconds=0.1)
    write_report(tmp_path, {})
    found = read_report(tmp_path)["grpo"]
    assert found["end"] == "time"
    assert found["completions"] == TINY.rollout
    assert [line["step"] for line in found["accuracies"]] == [0, TINY.steps_per_rollout]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_what_was_measured_is_in_the_report_when_the_command_is_stopped(tmp_path, number):
    process = subprocess.Popen(
        [*COMMAND, tmp_path], env=environment(), cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True
    )

    def has_trained(name: str) -> bool:
        """Whether a part has written a step; if the command cannot write a last report, whether that has it."""
        if number == signal.SIGKILL:
            return bool(steps_of(tmp_path, name))
        return bool(read_parts(tmp_path).get(name, {}).get("steps"))

    held: list[psutil.Process] = []

    def hold() -> bool:
        """Stop a part that has written a step, so that it does not end by itself; whether there is one."""
        with suppress(psutil.NoSuchProcess, ValueError):  # no part runs, or one is just beginning or ending
            [child] = psutil.Process(process.pid).children()
            [name] = PARTS.keys() & set(child.cmdline())
            if has_trained(name):
                child.suspend()
                if read_parts(tmp_path)[name]["end"] == "cut off":
                    held.append(child)
                else:
                    child.resume()
        return bool(held)

    try:
        wait_until(hold, limit=900)
        process.send_signal(number)
        assert process.wait(240) == (128 + number if number == signal.SIGTERM else -number)
        if number == signal.SIGTERM:
            assert not held[0].is_running()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    [(name, found)] = [(name, own) for name, own in read_report(tmp_path).items() if own["end"] == "cut off"]
    assert found["steps"]
    assert found["accuracies"]
    assert f"{PARTS[name].title}: cut off" in (tmp_path / "report.md").read_text()


def test_full_size_fits_on_16_gb():
    """Where a GPU has no bfloat16, weights are float32."""
    config = Qwen3Config(**{name: value for name, value in QWEN3_0_6B.items() if name != "model_type"})
    with torch.device("meta"):
        model = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(**part.ADAPTER))
    trained, parameters = model.get_nb_trainable_parameters()
    run = memory.Run(
        memory.decoder(config),
        parameters,
        trained,
        4 * parameters,
        weights=4,
        compute=2,
        trained_width=4,
        rows=FULL.rows,
        prompt=MAX_PROMPT_LENGTH,
        completion=FULL.max_completion_length,
        generated_rows=FULL.rollout,
    )
    peak = max(sum(components.values()) for components in memory.memory_plan(run).values())
    assert 0.5 * T4 < peak < (1 - memory.HEADROOM) * T4


@pytest.mark.slow
def test_everything_runs_on_a_device_and_a_part_that_is_killed_is_made_again(
    library, shared, shared_data, tiny_model, tmp_path
):
    """With a folder of a model, and one of GSM8K's problems."""
    output = tmp_path / "out"
    data = save_short_problems(shared_data / "gsm8k", tmp_path / "gsm8k")
    command = [shared / "tools" / "fakecuda" / "run.sh", *COMMAND, output, "--model", tiny_model, "--data", data]
    command += ["--minutes", "60"]
    env = environment(PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="0")
    process = subprocess.Popen(command, env=env, cwd=ROOT, stderr=subprocess.DEVNULL)
    wait_until(lambda: steps_of(output, "grpotrainer"), limit=900)
    started = psutil.Process(process.pid).children(recursive=True)
    [part_of_trl] = [one for one in started if "benchmarks.gpu.part" in one.cmdline()]
    part_of_trl.kill()
    assert process.wait(1800) == 1
    found = read_report(output)
    assert found["grpotrainer"]["end"] == "failed with exit status -9: see grpotrainer.log"
    assert found["grpotrainer"]["steps"]
    others = [found["grpo"], found["opo"]]
    assert [own["end"] for own in others] == ["all completions"] * 2
    status, printed = run_to_its_end(command, env, limit=1800)
    assert status == 0, printed[-6000:]
    found = read_report(output)
    assert found["grpotrainer"]["end"] == "all completions"
    assert [found["grpo"], found["opo"]] == others
    for own in found.values():
        assert own["origin"]["device"].startswith("pretend GPU")
        assert 0 < own["peak_memory"] < 1e9


def test_full_size_needs_a_gpu(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--output", str(tmp_path)])
    assert "PyTorch sees no GPU" in capsys.readouterr().err


def test_other_settings_need_another_folder(tiny, tmp_path, capsys):
    (tmp_path / "opo.jsonl").write_text(json.dumps({"settings": {**tiny.as_dict(), "seed": 1}}) + "\n")
    with pytest.raises(SystemExit):
        main(["--tiny", "--output", str(tmp_path)])
    assert "Choose another --output" in capsys.readouterr().err
