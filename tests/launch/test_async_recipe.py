"""`trainer: async_opo` in `opo-trl train`: a run in process, and what is rejected."""

from pathlib import Path

import pytest
from datasets import Dataset
from helpers import USE_CPU
from test_train import arguments
from transformers import AutoTokenizer

from opo_trl import OPOConfig, OPOTrainer
from opo_trl.checks.files import read_json, read_lines
from opo_trl.data import to_prompts
from opo_trl.data.arithmetic import arithmetic_reward, base_model_path, make_problems
from opo_trl.evaluate import evaluate
from opo_trl.train import main, prepare


ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "arithmetic" / "async" / "opo.yaml"
SHORT = {
    "max_steps": 4,
    "save_steps": 2,
    "validation_steps": 2,
    "validation_size": 20,
    "report_size": 24,
    "in_process_staleness": 1,
    "per_device_train_batch_size": 24,
    "warmup_steps": 0,
    "learning_rate": 1e-3,
}


def train(folder: Path, **changes) -> int:
    return main(arguments(RECIPE, **{**SHORT, "output_dir": folder, **changes}))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    assert train(folder) == 0
    return folder


def test_run_has_what_other_trainers_write(run):
    assert {path.name for path in run.iterdir()} >= {
        *("recipe.yaml", "settings.json", "environment.json", "plan.txt", "log.jsonl"),
        *("completions.jsonl", "summary.json", "report.html", "checkpoint-4", "model.safetensors"),
    }
    log = read_lines(run / "log.jsonl")
    steps = [line for line in log if "grad_norm" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert [line["opo/off_policy_steps"] for line in steps] == [0, 1, 2, 2]  # one version and the batch fetched ahead
    assert all({"opo/chi2", "reward", "rewards/arithmetic_reward/mean"} <= line.keys() for line in steps)
    assert [line["step"] for line in log if "validation/accuracy" in line] == [0, 2, 4]
    assert (run / "plan.txt").read_text().startswith("AsyncOPO training plan\n  rollout    6 completions per prompt")
    assert ">objective opo, model_name_or_path arithmetic" in (run / "report.html").read_text().replace("\n", "")


def test_plain_text_prompts_leave_the_tokenizer_as_it_was(run):
    kept, base = (AutoTokenizer.from_pretrained(folder) for folder in (run, base_model_path()))
    assert kept.chat_template == base.chat_template
    assert kept.get_vocab() == base.get_vocab()
    assert all(line["prompt"][0]["content"].endswith("=") for line in read_lines(run / "completions.jsonl"))


def test_accuracies_are_those_of_other_trainers(run, tmp_path):
    """Greedy ones do not depend on random numbers. The model attends along packed trees only in training."""
    trainer = OPOTrainer(
        base_model_path(),
        arithmetic_reward,
        OPOConfig(str(tmp_path), use_cpu=USE_CPU, bf16=False, report_to="none", max_completion_length=32),
        to_prompts(Dataset.from_list([*make_problems("train", ["Level 3"])]), style="plain"),
    )
    summary = read_json(run / "summary.json")
    for level in ("Level 3", "Level 4"):
        problems = Dataset.from_list([*make_problems("test", [level])]).shuffle(seed=42).select(range(24))
        expected = evaluate(trainer, to_prompts(problems, style="plain"), decoding="greedy").summary()
        assert summary["before"][level]["greedy"] == expected
        assert summary["after"][level]["greedy"] != expected


def test_nothing_of_the_models_generation_config_changes_an_accuracy(tmp_path):
    ready = prepare(arguments(RECIPE, **SHORT, output_dir=tmp_path))
    problems, own = ready.data.validation.select(range(8)), ready.trainer.model.generation_config
    expected = evaluate(ready.trainer, problems).samples
    own.min_p, own.bad_words_ids = 0.9, [[token] for token in range(3, 9)]
    assert evaluate(ready.trainer, problems).samples == expected


def test_run_resumes_from_its_last_checkpoint(run):
    assert train(run, max_steps=5, resume_from_checkpoint="last") == 0
    steps = [line["step"] for line in read_lines(run / "log.jsonl") if "grad_norm" in line]
    assert steps == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps_per_generation": 2}, "It belongs to `trainer: opo`"),
        ({"eval_strategy": "epoch"}, "eval_strategy is not possible with trainer: async_opo"),
        ({"reward_model_name_or_path": "./model"}, "reward_model_name_or_path='./model' is not allowed"),
        ({"trainer": "opo"}, "this recipe is for `trainer: opo`"),
    ],
)
def test_what_the_trainer_does_not_have_is_named(tmp_path, capsys, changes, message):
    folder = tmp_path / "run"
    assert train(folder, **changes) == 2
    assert message in capsys.readouterr().err
    assert not folder.exists()


def test_prompts_are_shuffled_by_the_seed(tmp_path):
    """TRL's worker goes through its dataset in order."""
    orders = []
    for seed in (1, 1, 2):
        worker = prepare(arguments(RECIPE, **SHORT, output_dir=tmp_path, seed=seed)).trainer.rollout_worker
        orders.append([row[0]["content"] for row in worker._loop_kwargs["dataset"]["prompt"]])
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) != orders[0]
