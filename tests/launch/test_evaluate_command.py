"""`opo-trl evaluate`: lm-eval's scores next to ours, their agreement problem by problem, and what is rejected."""

import json
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from helpers import USE_CPU
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from benchmarks.lm_eval_agreement import REASONS, explain
from opo_trl import RolloutConfig, RolloutTrainer, train
from opo_trl.checks import environment
from opo_trl.data import to_prompts
from opo_trl.data.arithmetic import arithmetic_reward, base_model_path, make_problems
from opo_trl.evaluate import evaluate
from opo_trl.launch import cli, evaluation, harness
from opo_trl.launch.evaluation import find_model
from opo_trl.launch.scores import Asking, measure, problem_of, prompt_of, reward_of
from opo_trl.report.evaluation import EVALUATION, EVALUATION_TABLE, write_evaluation
from opo_trl.report.run_report import write_report


try:
    from lm_eval.api.model import LM
except ImportError:
    LM = None

needs_lm_eval = pytest.mark.skipif(LM is None, reason="needs lm_eval: pip install 'opo_trl[evaluate]'")

LIMIT = 60


def main(arguments: list[str]) -> int:
    return cli.main(["evaluate", *arguments])


def read(folder: Path) -> dict:
    return json.loads((folder / EVALUATION).read_text())


# The embedded model and task, end to end


@pytest.fixture(scope="module")
def embedded(tmp_path_factory) -> Path:
    """Folder of an evaluation of the embedded model on its task."""
    folder = tmp_path_factory.mktemp("evaluation")
    limit = ("--limit", str(LIMIT), "--samples", "2")
    assert main(["arithmetic", "--tasks", "arithmetic", *limit, "--output", str(folder)]) == 0
    return folder


@needs_lm_eval
def test_both_give_every_problem_of_the_embedded_task_the_same_verdict(embedded):
    task = read(embedded)["tasks"]["arithmetic"]
    assert task["agreement"]["problems"] == task["agreement"]["same"] == LIMIT
    for row in task["samples"]:
        assert row["lm_eval"]["right"] is row["opo_trl"]["right"]
        assert row["lm_eval"]["completion"] == row["opo_trl"]["completion"]
    right = sum(row["opo_trl"]["right"] for row in task["samples"])
    assert 0.1 * LIMIT < right < 0.9 * LIMIT
    (theirs,), ours = task["lm_eval"], task["opo_trl"]
    assert theirs["score"] == ours["greedy"]["accuracy"] == right / LIMIT
    assert (theirs["low"], theirs["high"]) == (ours["greedy"]["low"], ours["greedy"]["high"])
    sampled = [row["opo_trl"]["sampled_right"] for row in task["samples"]]
    assert ours["pass_at"]["1"]["score"] == pytest.approx(sum(sampled) / (2 * LIMIT))
    assert ours["pass_at"]["2"]["score"] == pytest.approx(sum(map(bool, sampled)) / LIMIT)
    for passed in ours["pass_at"].values():
        assert 0 < passed["low"] < passed["score"] < passed["high"] < 1


@needs_lm_eval
def test_our_side_is_what_the_trainer_measures(embedded, tmp_path):
    """The same greedy completions as `opo_trl.evaluate`, which generates and scores as in training."""
    problems = Dataset.from_list(make_problems("test")).shuffle(seed=42).select(range(LIMIT))
    prompts = to_prompts(problems, style="plain")
    options = {"use_cpu": USE_CPU, "bf16": False, "report_to": "none", "gradient_checkpointing": False}
    sizes = {"max_completion_length": 32, "per_device_eval_batch_size": 100, "num_generations": 2}
    args = RolloutConfig(output_dir=str(tmp_path), model_init_kwargs={"dtype": "bfloat16"}, **options, **sizes)
    trainer = RolloutTrainer(base_model_path(), arithmetic_reward, args, prompts)
    measured = evaluate(trainer, prompts, decoding="greedy")
    rows = read(embedded)["tasks"]["arithmetic"]["samples"]
    assert [row["opo_trl"]["completion"] for row in rows] == [each["completion"] for each in measured.samples]
    assert [row["opo_trl"]["right"] for row in rows] == [each["reward"] == 1.0 for each in measured.samples]


@needs_lm_eval
def test_table_has_a_row_per_score(embedded):
    text = (embedded / EVALUATION_TABLE).read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert [row[1] for row in rows[2:]] == [
        "lm-eval: exact_match, answer",
        "opo_trl: arithmetic_reward",
        "opo_trl: pass@1",
        "opo_trl: pass@2",
    ]
    assert rows[2][5] == rows[3][5]
    assert f"lm-eval {version('lm_eval')}, task `arithmetic_embedded`" in text
    assert f"give {LIMIT} of {LIMIT} problems the same verdict" in text


@needs_lm_eval
def test_adapter_of_a_run_is_evaluated_as_the_run_asked_and_shown_in_its_report(tmp_path, capsys):
    folder = tmp_path / "run"
    model = AutoModelForCausalLM.from_pretrained(base_model_path())
    config = LoraConfig(r=4, target_modules="all-linear")
    adapter = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    adapter.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base_model_path()).save_pretrained(folder)
    settings = {"prompt_style": "plain", "max_completion_length": 7, "temperature": 0.5}
    settings |= {"dataset_name": "arithmetic", "levels": ["Level 1"]}
    (folder / "settings.json").write_text(json.dumps(settings))
    (folder / "recipe.yaml").write_text("{}")
    assert "Evaluation" not in write_report(folder).read_text()
    options = ("--tasks", "arithmetic", "--limit", "8", "--samples", "3", "--k", "3")
    assert main([str(folder), *options]) == 0
    task = read(folder)["tasks"]["arithmetic"]
    assert task["settings"]["max_completion_length"] == 7
    assert task["settings"]["sampling"]["temperature"] == 0.5
    assert task["opo_trl"]["pass_at"].keys() == {"3"}
    level_1 = {row["problem"] for row in make_problems("test", ["Level 1"])}
    assert {row["text"] for row in task["samples"]} <= level_1
    assert all(1 <= len(row["opo_trl"]["completion"]) <= 7 for row in task["samples"])
    # The base model solves half of these problems, an adapter of noise none.
    assert task["opo_trl"]["greedy"]["correct"] == task["lm_eval"][0]["score"] == 0
    report = (folder / "report.html").read_text()
    assert "Measured" not in report
    assert "<h2>Evaluation</h2>" in report
    assert "opo_trl: pass@3" in report
    assert str(folder / "report.html") in capsys.readouterr().out
    (folder / "summary.json").write_text('{"optimizer_steps": 9}')  # the run has been resumed
    assert "Measured before the run ended" in write_report(folder).read_text()

    described = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**described, "base_model_name_or_path": "/gone"}))
    with pytest.raises(ValueError, match=r"is an adapter for the model '/gone'.*Set `--base_model`"):
        find_model(str(folder))
    assert find_model(str(folder), base_model_path()).model == base_model_path()


# lm-eval's own tasks: scripted completions, judged by both


class Scripted(LM or object):
    """Writes the first completion of a case for lm-eval's prompt, and the second for ours."""

    def __init__(self, cases):
        super().__init__()
        self.cases = cases

    def generate_until(self, requests, disable_tqdm=False):
        answers = []
        for request in requests:
            prompt = request.args[0]
            (index,) = (i for i in range(len(self.cases)) if f"problem {i}?" in prompt.rsplit("Question:")[-1])
            answers.append(self.cases[index][1 if "Question:" in prompt else 2])
        return answers

    def loglikelihood(self, requests, disable_tqdm=False):
        raise NotImplementedError

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        raise NotImplementedError


# Gold answer, completion for lm-eval's prompt, for ours, reason of different verdicts.
CASES = [
    ("72", "So 72.\n#### 72", r"So \boxed{72}.", None),
    ("1,000", "#### 1,000", r"\boxed{1000}", None),
    ("5", "#### 6", r"\boxed{7}", None),
    ("72", "#### 71", r"So \boxed{72}.", "prompt"),
    ("72", "#### 72", r"So \boxed{71}.", "prompt"),
    ("72", "The answer is 72", "The answer is 72", "no box"),
    ("x", "none", r"\boxed{x}", "no match"),
    ("72", r"\boxed{72.0}", r"\boxed{72.0}", "notation"),
    ("@@", "3", "3", "unscored"),
]
ASKING = Asking("plain", "", {}, 16, {"temperature": 1.0})
HOW = {"samples": 2, "ks": [1, 2], "limit": None, "num_fewshot": 2, "batch_size": 4}


@pytest.fixture(scope="module")
def gsm8k_data(tmp_path_factory) -> Path:
    """The cases in GSM8K's columns."""
    folder = tmp_path_factory.mktemp("gsm8k")
    for split, rows in (("train", [("1", "", "", None)] * 4), ("test", CASES)):
        lines = [{"question": f"{split} problem {i}?", "answer": f"So.\n#### {row[0]}"} for i, row in enumerate(rows)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@needs_lm_eval
def test_different_verdicts_are_counted_and_explained(gsm8k_data, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)  # no git repository, of which git would complain
    tasks = harness.load_task("gsm8k", data=gsm8k_data, levels=None, seed=0, num_fewshot=2)
    reward = reward_of("gsm8k")
    entry = measure(Scripted(CASES), tasks["gsm8k"], ASKING, reward, **HOW)
    assert "fatal: not a git repository" not in capfd.readouterr().err
    agreement = entry["agreement"]
    assert (agreement["metric"], agreement["filter"]) == ("exact_match", "flexible-extract")
    assert agreement["same"] == sum(case[3] is None for case in CASES)
    explained = explain(entry, tasks["gsm8k"], reward)
    reward.close()
    assert [row["reason"] for row in explained] == [case[3] for case in CASES]
    assert REASONS.keys() - {"rule"} == {case[3] for case in CASES} - {None}
    scores = {score["filter"]: score["score"] * len(CASES) for score in entry["lm_eval"]}
    assert scores == {"strict-match": pytest.approx(3), "flexible-extract": pytest.approx(4)}
    assert entry["settings"]["num_fewshot"] == 2
    assert entry["opo_trl"]["greedy"]["unscorable"] == 1


@needs_lm_eval
def test_prompt_is_that_of_training(tiny_model):
    lm = harness.load_model(
        harness.Subject(tiny_model, tiny_model, None, tiny_model, {}),
        **{"backend": "hf", "batch_size": 2, "template": {}, "ends_thinking": False},
    )
    row = {"problem": "What is 1+1?", "level": None, "type": None, "solution": r"\boxed{2}"}
    (prompt,) = to_prompts(Dataset.from_list([row]), instruction="Think.")["prompt"]
    asked = prompt_of(lm, row["problem"], Asking("chat", "Think.", {}, 4, {}))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    trained = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert lm.tok_encode(asked) == trained
    room = lm.max_length - len(trained)
    assert [harness.count_cut(lm, [asked, asked], length) for length in (room, room + 1)] == [0, 2]


SYSTEM = {"role": "system", "content": "Answer in a \\boxed{}."}
TURNS = [{"role": "user", "content": "What is 1+1?"}]


@needs_lm_eval
@pytest.mark.parametrize(
    ("row", "fields"),
    [
        ({"problem": "What is 1+1?"}, {}),
        ({"problem": "What is 1+1?"}, {"instruction": ""}),
        ({"problem": "What is 1+1?"}, {"instruction": "Think."}),
        ({"problem": "What is 1+1?"}, {"instruction": "Think.", "prompt_style": "chat"}),
        ({"problem": "What is 1+1?"}, {"prompt_style": "plain"}),
        ({"prompt": "What is 1+1?"}, {}),
        ({"prompt": [SYSTEM, *TURNS]}, {}),
        ({"prompt": [SYSTEM, *TURNS]}, {"instruction": ""}),
        ({"prompt": "What is 1+1?"}, {"columns": {"problem": "prompt"}, "instruction": "Think."}),
    ],
)
def test_a_run_is_asked_as_it_was_trained(folder, tmp_path, row, fields):
    with (folder / "chat_template.jinja").open("a") as file:
        file.write("{% if brief %}Brief: {% endif %}")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f"{json.dumps({**row, 'solution': '2'})}\n" for _ in range(2)))
    recipe = {"model_name_or_path": str(folder), "dataset_name": str(data), "output_dir": str(tmp_path / "run")}
    recipe |= {"max_steps": 1, "use_cpu": USE_CPU, "bf16": False, "max_completion_length": 4, **fields}
    is_text = fields.get("prompt_style") == "plain" or (isinstance(row.get("prompt"), str) and "columns" not in fields)
    recipe |= {} if is_text else {"chat_template_kwargs": {"brief": True}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    ready = train.prepare(["--config", str(tmp_path / "recipe.yaml")])
    trained = ready.trainer._tokenize_prompts(ready.trainer.train_dataset["prompt"][:1])[0]

    settings = find_model(str(shutil.copytree(folder, tmp_path / "run", dirs_exist_ok=True))).settings
    arguments = SimpleNamespace(prompt_style=None, max_completion_length=None, model="run")
    asking = evaluation._asking(arguments, settings, AutoTokenizer.from_pretrained(folder))
    lm = harness.load_model(
        harness.Subject("run", str(folder), None, str(folder), settings),
        **{"backend": "hf", "batch_size": 2, "template": asking.template, "ends_thinking": False},
    )
    assert [lm.tok_encode(prompt_of(lm, "What is 1+1?", asking))] == trained


@needs_lm_eval
@pytest.mark.parametrize(("name", "problems"), [("gsm8k", 1319), ("hendrycks_math500", 5000)])
def test_tasks_read_local_files(name, problems, shared_data):
    data = shared_data / ("gsm8k" if name == "gsm8k" else "math")
    if not data.is_dir():
        pytest.skip(f"needs ../shared: data/{data.name}")
    tasks = harness.load_task(name, data=data, levels=None, seed=0, num_fewshot=None)
    docs = tasks[name].eval_docs
    assert len(docs) == problems
    assert all(problem_of(doc) for doc in docs)


@needs_lm_eval
def test_one_file_is_enough_without_examples(gsm8k_data, tmp_path):
    Dataset.from_json(str(gsm8k_data / "test.jsonl"), cache_dir=str(tmp_path)).to_parquet(
        tmp_path / "problems.parquet"
    )
    for data in (gsm8k_data / "test.jsonl", tmp_path / "problems.parquet"):
        (task,) = harness.load_task("gsm8k", data=data, levels=None, seed=0, num_fewshot=0).values()
        assert [doc["question"] for doc in task.eval_docs] == [f"test problem {i}?" for i in range(len(CASES))]
        assert task.get_config("num_fewshot") == 0


def test_columns_of_math_and_gsm8k_are_known():
    assert problem_of({"problem": "p", "solution": r"\boxed{1}", "answer": "1"}) == ("p", r"\boxed{1}")
    assert problem_of({"question": "q", "answer": "7*2\n#### 1,400"}) == ("q", "1400")
    assert problem_of({"problem": "p", "answer": 204}) == ("p", "204")
    assert problem_of({"question": "q", "choices": ["a"], "answer": 0}) is None


@needs_lm_eval
def test_a_task_that_compares_likelihoods_has_only_the_score_of_lm_eval(tmp_path):
    rows = [{"q": f"{i}?", "choices": ["0", "1"], "gold": 0} for i in range(4)]
    spec = {
        "task": "likelihoods",
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "custom_dataset": lambda **_: {"test": Dataset.from_list(rows)},
    }

    class Sure(Scripted):
        def loglikelihood(self, requests, disable_tqdm=False):
            return [(-1.0 - float(request.args[1].strip()), False) for request in requests]

    task = harness._manager(False).load([spec])["tasks"]["likelihoods"]
    entry = measure(Sure([]), task, ASKING, reward_of("arithmetic"), **HOW)
    assert entry["lm_eval"][0]["score"] == 1.0
    assert "opo_trl" not in entry
    assert "likelihoods" in entry["settings"]["not_ours"]


# What is rejected


@pytest.fixture
def folder(tiny_model, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


REJECTED = {
    "empty task": (["--tasks", "gsm8k,,math"], "'gsm8k,,math' has an empty name"),
    "no task": (["--tasks", ""], "'' has an empty name"),
    "twice": (["--tasks", "gsm8k,gsm8k"], "names 'gsm8k' twice"),
    "samples": (["--samples", "0"], "--samples 0 is not allowed"),
    "limit": (["--limit", "0"], "--limit 0 is not allowed"),
    "limit below": (["--limit", "-3"], "--limit -3 is not allowed"),
    "few-shot": (["--num_fewshot", "-1"], "--num_fewshot -1 is not allowed"),
    "k": (["--samples", "4", "--k", "8"], "--k 8 is not possible with --samples 4"),
    "k = 0": (["--k", "0"], "--k 0 is not possible"),
    "output": (["--output", "model/config.json/x"], "output='model/config.json/x' cannot be written"),
    "base model": (["--base_model", "x"], "--base_model x has no effect"),
}
REJECTED_WITH_LM_EVAL = {
    "unknown task": (["--tasks", "gsm8kk"], "has no task 'gsm8kk'. Did you mean 'gsm8k'?"),
    "other antlr4": (["--tasks", "minerva_math500"], "needs antlr4-python3-runtime 4.11, with which our reward"),
    "data without path": (["--data", "gsm8k"], "names no path. Write it as `--data gsm8k=FOLDER`"),
    "data of another task": (["--data", "math=x"], "task 'math' is not in `--tasks`"),
    "data twice": (["--data", "gsm8k=data", "--data", "gsm8k=data"], "task 'gsm8k' has two `--data`"),
    "data of the embedded task": (["--tasks", "arithmetic", "--data", "arithmetic=x"], "has its data embedded"),
    "data missing": (["--data", "gsm8k=nowhere"], "'nowhere' does not exist"),
    "data without splits": (["--data", "gsm8k=model"], "has none of test.jsonl"),
    "data in another format": (["--data", "gsm8k=model/tokenizer.txt"], "tokenizer.txt' is not in a readable format"),
    "data with other columns": (["--data", "gsm8k=columns"], "'question' is undefined. Pass files with the splits"),
    "problems as examples": (["--data", "gsm8k=data/test.jsonl"], "5 examples from the training split"),
    "data of a group": (["--tasks", "mmlu", "--data", "mmlu=data"], "'mmlu' is a group of tasks"),
    "no connection": ([], "--tasks gsm8k cannot be loaded"),
    "context": (["--max_completion_length", "512"], "leaves no room for a prompt: the model's context has 512"),
}


def rejected(options, folder, gsm8k_data, capsys, monkeypatch) -> str:
    """The message that the command ends with, and nothing written."""
    monkeypatch.chdir(folder.parent)
    (folder / "tokenizer.txt").touch()
    shutil.copytree(gsm8k_data, "data")
    Path("columns").mkdir()
    for split in ("train", "test"):
        Path("columns", f"{split}.jsonl").write_text('{"text": "1+1", "answer": "#### 2"}\n')
    defaults = {"--tasks": "gsm8k", "--max_completion_length": "16"}
    given = [*options, *(part for pair in defaults.items() if pair[0] not in options for part in pair)]
    assert main(["model", *given]) == 2
    assert not (folder / EVALUATION).exists()
    return capsys.readouterr().err


@pytest.mark.parametrize(("options", "message"), REJECTED.values(), ids=REJECTED)
def test_bad_input_is_rejected(options, message, folder, gsm8k_data, capsys, monkeypatch):
    assert message in rejected(options, folder, gsm8k_data, capsys, monkeypatch)


def test_evaluation_of_another_model_is_not_replaced(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder.parent)
    there = Path("there")
    there.mkdir()
    write_evaluation(there, {"model": "other", "tasks": {}})
    (folder / "evaluation.md").write_text("my own notes")
    for output, named in ((there, "is the evaluation of 'other'"), (folder, "is not of an earlier evaluation")):
        before = {path: path.read_bytes() for path in output.iterdir()}
        assert main(["model", "--tasks", "gsm8k", "--output", str(output)]) == 2
        assert named in capsys.readouterr().err
        assert {path: path.read_bytes() for path in output.iterdir()} == before


@needs_lm_eval
@pytest.mark.parametrize(("options", "message"), REJECTED_WITH_LM_EVAL.values(), ids=REJECTED_WITH_LM_EVAL)
def test_what_does_not_fit_a_task_is_rejected(options, message, folder, gsm8k_data, capsys, monkeypatch):
    assert message in rejected(options, folder, gsm8k_data, capsys, monkeypatch)


@needs_lm_eval
@pytest.mark.parametrize(
    ("attribute", "what"), [("UNSAFE_CODE", "runs the code that the model writes"), ("MULTIMODAL", "has images")]
)
def test_task_that_needs_more_than_text_is_rejected(attribute, what):
    with pytest.raises(ValueError, match=f"lm-eval's task 'one' {what}"):
        harness.check_kind("some", {"none": SimpleNamespace(), "one": SimpleNamespace(**{attribute: True})})


@needs_lm_eval
def test_model_without_a_template_cannot_chat(folder, gsm8k_data, capsys, monkeypatch):
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}')
    options = ["--prompt_style", "chat"]
    assert "has no chat template" in rejected(options, folder, gsm8k_data, capsys, monkeypatch)


def test_missing_model_and_missing_packages_are_named(folder, capsys, monkeypatch):
    output = ("--tasks", "gsm8k", "--output", str(folder / "out"))
    assert main([str(folder / "none"), "--tasks", "gsm8k"]) == 2
    assert "is not a folder, so there is no place for the results. Set `--output`" in capsys.readouterr().err
    (folder / "config.json").unlink()
    (folder / "checkpoint-5").mkdir()
    assert main([str(folder), *output]) == 2
    assert "Its run has not finished: pass its last checkpoint" in capsys.readouterr().err
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    assert main(["arithmetic", *output]) == 2
    assert "`opo-trl evaluate` needs lm_eval, which is not installed. `pip install 'opo_trl[evaluate]'`." in (
        capsys.readouterr().err
    )
    monkeypatch.setattr(environment, "find_spec", lambda name: None if name == "vllm" else SimpleNamespace())
    assert main(["arithmetic", *output, "--backend", "vllm"]) == 2
    assert "--backend vllm needs vllm, which is not installed" in capsys.readouterr().err
    assert main(["arithmetic", *output, "--backend", "vllm", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


@needs_lm_eval
@pytest.mark.parametrize("value", [None, float("nan")], ids=["missing", "NaN"])
def test_weights_that_are_missing_or_not_finite_are_rejected(value, folder, gsm8k_data, capsys, monkeypatch):
    tensors = load_file(folder / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    if value is not None:
        tensors["model.norm.weight"] = torch.full_like(norm, value)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = rejected(["--data", "gsm8k=data"], folder, gsm8k_data, capsys, monkeypatch)
    message = "MODEL='model': its files lack model.norm.weight" if value is None else "model.norm.weight has NaN"
    assert message in said


def test_broken_file_of_an_earlier_evaluation_is_named(folder, capsys):
    (folder / EVALUATION).write_text('{"tasks": {"gsm8k": 1}}')
    assert main([str(folder), "--tasks", "gsm8k"]) == 2
    assert f"{EVALUATION}' cannot be read" in capsys.readouterr().err


@needs_lm_eval
def test_further_tasks_join_the_file_of_the_same_model(embedded, gsm8k_data, tmp_path):
    folder = Path(shutil.copytree(embedded, tmp_path / "out"))
    written = read(folder)
    (folder / EVALUATION).write_text(json.dumps({**written, "tasks": {"earlier": written["tasks"]["arithmetic"]}}))
    options = ("--tasks", "arithmetic", "--limit", "2", "--samples", "1", "--output", str(folder))
    assert main(["arithmetic", *options]) == 0
    assert read(folder)["tasks"].keys() == {"earlier", "arithmetic"}
    assert read(folder)["tasks"]["arithmetic"]["settings"]["problems"] == 2


def add(output: Path, model: str, tasks: dict) -> None:
    steps = evaluation.stored.steps_trained(Path(model))
    evaluation._add(output, {"model": model, "optimizer_steps": steps, "environment": {}}, tasks)


@needs_lm_eval
def test_evaluations_that_end_together_keep_all_tasks(embedded, tmp_path):
    measured = read(embedded)["tasks"]["arithmetic"]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: add(tmp_path, "model", {f"task {number}": measured}), range(24)))
    assert len(read(tmp_path)["tasks"]) == 24


@needs_lm_eval
def test_an_evaluation_is_kept_when_the_model_has_been_trained_further(embedded, tmp_path, monkeypatch, caplog):
    measured = read(embedded)["tasks"]["arithmetic"]
    for steps in (9, 12, None, 12):
        (tmp_path / "summary.json").write_text(json.dumps({"optimizer_steps": steps} if steps else {}))
        add(tmp_path, str(tmp_path), {f"at {steps}": measured})
    names = sorted(path.name for path in tmp_path.glob("evaluation*.json"))
    assert names == ["evaluation-12.json", "evaluation-9.json", "evaluation-unfinished.json", EVALUATION]
    assert json.loads((tmp_path / "evaluation-9.json").read_text())["tasks"] == {"at 9": measured}
    assert "after 9 optimizer steps is kept in" in caplog.text


@needs_lm_eval
def test_an_evaluation_can_always_be_read_again(embedded, tmp_path, monkeypatch):
    measured = read(embedded)["tasks"]["arithmetic"]
    whole = len(json.dumps(measured, indent=2))
    monkeypatch.setattr(evaluation.stored, "LONGEST", whole)
    for task in ("first", "second"):
        add(tmp_path, "model", {task: measured})
    tasks = read(tmp_path)["tasks"]
    assert [task["agreement"] for task in tasks.values()] == [measured["agreement"]] * 2
    assert not any("samples" in task for task in tasks.values())
    for task in ("first", "second"):
        lines = (tmp_path / f"evaluation-samples-{task}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == measured["samples"]


@needs_lm_eval
def test_a_model_is_the_same_by_another_path(embedded, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("model", "out"):
        Path(name).mkdir()
    Path("blob").write_text('{"optimizer_steps": 9}')
    Path("model/summary.json").symlink_to("../blob")  # as in the cache of the Hub
    measured = read(embedded)["tasks"]["arithmetic"]
    for name, task in (("model", "first"), ("./model/", "second")):
        add(Path("out"), name, {task: measured})
    assert read(Path("out"))["tasks"].keys() == {"first", "second"}
    assert read(Path("out"))["optimizer_steps"] == 9


def test_tasks_in_the_folder_of_a_model_stay_however_it_is_called(embedded, tmp_path, monkeypatch):
    measured = read(embedded)["tasks"]["arithmetic"]
    (tmp_path / "runs" / "q").mkdir(parents=True)
    for place, name, task in ((tmp_path, "runs/q", "first"), (tmp_path / "runs", "q", "second")):
        monkeypatch.chdir(place)
        add(Path(name), name, {task: measured})
    assert read(Path("q"))["tasks"].keys() == {"first", "second"}


def test_without_a_run_sampling_is_that_of_the_configuration(tiny_model):
    arguments = SimpleNamespace(prompt_style=None, max_completion_length=None, model=tiny_model)
    asking = evaluation._asking(arguments, {}, AutoTokenizer.from_pretrained(tiny_model))
    defaults = GRPOConfig.__dataclass_fields__
    assert asking.sampling["temperature"] == defaults["temperature"].default
    assert (asking.style, asking.length) == ("chat", evaluation._LENGTH)
    settings = {"prompt_style": "chat", "chat_template_kwargs": {"enable_thinking": False}, "instruction": "Go."}
    asking = evaluation._asking(arguments, settings, AutoTokenizer.from_pretrained(tiny_model))
    assert (asking.template, asking.instruction) == ({"enable_thinking": False}, "Go.")


@pytest.fixture(autouse=True)
def quiet():
    """lm-eval and Transformers configure logging when they are imported."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)
