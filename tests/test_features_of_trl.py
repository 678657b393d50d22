"""TRL's surroundings work with OPO: loggers, reward models, images, evaluations by Transformers."""

import json
import sqlite3
import statistics
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from device_fields import BACKEND, PRETEND, SMALL
from launched_processes import launch, logs
from named_tensors import snapshot
from PIL import Image
from recording_trainers import logged
from scripted_rollouts import PROMPTS
from tiny_image_model import vision_model
from torch.nn.utils import parameters_to_vector
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, EarlyStoppingCallback

from opo_trl import OPOConfig, OPOTrainer
from opo_trl.evaluate import evaluate
from opo_trl.resume import checkpoint


PLAIN = Dataset.from_dict({"prompt": PROMPTS})
CHAT = Dataset.from_dict({"prompt": [[{"role": "user", "content": prompt}] for prompt in PROMPTS]})


def length_reward(completions, **kwargs) -> list[float]:
    rewards = []
    for completion in completions:
        text = completion if isinstance(completion, str) else completion[-1].get("content", "")
        rewards.append(len(text) / 8)
    return rewards


def make(model, folder: Path, *, dataset=PLAIN, reward_funcs=length_reward, arguments=None, **options) -> OPOTrainer:
    """A trainer of two optimizer steps, the second off-policy, on completions that the model generates."""
    settings = {
        **SMALL,
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "steps_per_generation": 2,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 2,
        "learning_rate": 0.01,
        **options,
    }
    config = OPOConfig(**settings)
    return OPOTrainer(model, reward_funcs, config, train_dataset=dataset, **(arguments or {}))


def train(*arguments, **options) -> OPOTrainer:
    """[`make`], trained."""
    trainer = make(*arguments, **options)
    trainer.train()
    first, second, *_ = logged(trainer)
    assert first["opo/off_policy_steps"] == 0
    assert second["opo/off_policy_steps"] == 1
    return trainer


# Loggers


def test_metrics_reach_trackio_and_completions_the_terminal(tiny_model, tmp_path, monkeypatch, capsys):
    pytest.importorskip("trackio")
    monkeypatch.setenv("COLUMNS", "160")
    for name, module in list(sys.modules.items()):  # TRL's import has read TRACKIO_DIR
        if name.startswith("trackio") and hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    trainer = make(tiny_model, tmp_path, report_to="trackio", project="opo", log_completions=True)
    two_prompts = CHAT.select(range(2))
    evaluate(trainer, two_prompts)  # the run has not begun
    trainer.evaluate(two_prompts)
    trainer.train()
    evaluate(trainer, two_prompts)  # the run is over
    (file,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        rows = [json.loads(text) for (text,) in database.execute("SELECT metrics FROM metrics ORDER BY id")]
    chi2_in_trackio = [row["train/opo/chi2"] for row in rows if "train/opo/chi2" in row]
    chi2 = [entry["opo/chi2"] for entry in logged(trainer)]
    assert chi2_in_trackio == pytest.approx(chi2)
    printed = capsys.readouterr().out
    assert "Step 2" in printed
    for column in ("Prompt", "Completion", "length_reward", "Advantage"):
        assert column in printed


# Rewards and prompts


@pytest.mark.skipif(PRETEND, reason="the pretend device has no views in inference mode")
def test_reward_model_and_function_with_weights(tiny_model, tmp_path):
    judge = tmp_path / "judge"
    config = AutoConfig.from_pretrained(tiny_model, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(judge)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(judge)
    lengths = []

    def length(completions, **kwargs) -> list[float]:
        lengths.extend(length_reward(completions))
        return lengths[-len(completions) :]

    trainer = train(
        tiny_model,
        tmp_path,
        dataset=CHAT,
        reward_funcs=[str(judge), length],
        reward_weights=[0.5, 2.0],
    )
    first = logged(trainer)[0]
    mean_of_judge = first["rewards/judge/mean"]
    mean_length = statistics.fmean(lengths)
    assert mean_of_judge != 0
    assert first["rewards/length/mean"] == pytest.approx(mean_length)
    assert first["reward"] == pytest.approx(0.5 * mean_of_judge + 2 * mean_length)
    assert first["grad_norm"] > 0


# Images


def test_images_of_several_sizes(tmp_path):
    """However samples are split, each keeps its patches: the gradients are the same, and the vision tower learns."""
    sizes = [(28, 28), (56, 28), (56, 56), (28, 56)]
    colours = ["red", "green", "blue", "white"]
    images = [Image.new("RGB", size, colour) for size, colour in zip(sizes, colours, strict=True)]
    ask = [{"role": "user", "content": "Which colour?"}]
    dataset = Dataset.from_list([{"prompt": ask, "image": image} for image in images])
    norms = {}
    for planned in (True, False):
        model, processor = vision_model()
        initial = snapshot(model)
        trainer = train(
            model,
            tmp_path,
            dataset=dataset,
            arguments={"processing_class": processor},
            plan_micro_batches=planned,
            gradient_accumulation_steps=2,
            steps_per_generation=4,
            log_completions=True,
        )
        norms[planned] = [entry["grad_norm"] for entry in logged(trainer)]
        # A checkpoint holds text and numbers only; a tracker could not read an image's name.
        assert trainer._logs["images"]
        checkpoint.save_state(tmp_path, 0, trainer._state())
        completions = checkpoint.load_state(tmp_path, 0)["log"]["completions"]
        assert completions["completion"]
        assert "images" not in completions
        changed = {name for name, value in snapshot(model).items() if not torch.equal(value, initial[name])}
        assert any("visual" in name for name in changed)
        result = evaluate(trainer, dataset)
        assert result.scored == len(images)
        in_run_folder = json.dumps(result.samples)
        first, *_ = json.loads(in_run_folder)
        (turn,) = first["prompt"]
        assert turn["content"] == [{"type": "image"}, {"type": "text", "text": "Which colour?"}]
    assert norms[True] == pytest.approx(norms[False], rel=1e-4)
    assert min(norms[True]) > 0


def train_mixed_images(folder: str) -> None:
    """In each process: only the prompts of the first one have images."""
    # Two prompts of each rollout per process: within one process TRL allows either images or none.
    with_image = [True, True, False, False, False, False, True, True]
    image = Image.new("RGB", (28, 56), "red")
    ask = [{"role": "user", "content": "Which colour?"}]
    dataset = Dataset.from_list([{"prompt": ask, "images": [image] if has else []} for has in with_image])
    model, processor = vision_model()
    trainer = make(
        model,
        Path(folder),
        dataset=dataset,
        arguments={"processing_class": processor},
        shuffle_dataset=False,
        ddp_backend=BACKEND,
        ddp_timeout=240,
        gradient_accumulation_steps=1,
        max_steps=4,
        anchor_correction="length_normalized",
        top_entropy_quantile=0.5,
    )
    original = trainer._micro_batches
    have_images = []

    def micro_batches(steps, until_update):
        have_images.extend("pixel_values" in rows for rows in steps)
        return original(steps, until_update)

    trainer._micro_batches = micro_batches
    trainer.train()
    rank = trainer.accelerator.process_index
    parameters = parameters_to_vector(trainer.model.parameters())
    content = {"images": have_images, "parameters": parameters.detach().cpu()}
    torch.save(content, Path(folder) / f"{rank}.pt")


def test_images_on_one_process_and_none_on_the_other(tmp_path):
    """TRL omits the entries of images where there are none, so all processes must agree on what to gather."""
    where = {"config": "multi_gpu", "processes": 2, "folder": tmp_path, "limit": 600.0}
    assert launch(train_mixed_images, str(tmp_path), **where) == [0, 0], logs(tmp_path)
    one = torch.load(tmp_path / "0.pt", weights_only=True)
    other = torch.load(tmp_path / "1.pt", weights_only=True)
    assert len(one["images"]) == len(other["images"])
    assert one["images"] != other["images"], "no rollout was mixed"
    assert torch.allclose(one["parameters"], other["parameters"])


# Evaluations by Transformers


SIZES = {"a": 3, "b": 5}


def row_rewards(model: str, folder: str) -> None:
    """Mean rewards of evaluations whose last batch is not full, on two datasets."""
    held_out = {}
    for name, size in SIZES.items():
        rows = PLAIN.select(range(size))
        worths = list(map(float, range(size)))
        held_out[name] = rows.add_column("worth", worths)
    sizes = {"per_device_eval_batch_size": 2, "num_generations_eval": 2}
    trainer = make(model, folder, reward_funcs=reward_of_row, arguments={"eval_dataset": held_out}, **sizes)
    metrics = trainer.evaluate()
    if trainer.accelerator.is_main_process:
        text = json.dumps(metrics)
        Path(folder, "metrics.json").write_text(text)


def reward_of_row(worth, **kwargs) -> list[float]:
    return worth


def test_evaluations_log_the_mean_reward_of_their_own_rows_under_their_own_names(tiny_model, tmp_path):
    where = {"config": "multi_gpu", "processes": 2, "folder": tmp_path}
    assert launch(row_rewards, tiny_model, str(tmp_path), **where) == [0, 0], logs(tmp_path)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    for name, rows in SIZES.items():
        mean_worth = (rows - 1) / 2
        assert metrics[f"eval_{name}_reward"] == mean_worth
        assert metrics[f"eval_{name}_rewards/reward_of_row/mean"] == mean_worth
        assert f"eval_{name}_opo/chi2" in metrics
    beginnings = ("eval_a_", "eval_b_", "epoch", "eval_model_prep")
    assert not [name for name in metrics if not name.startswith(beginnings)]


def falling(completions, trainer_state, **kwargs) -> list[float]:
    """Best at step 2, in training and in evaluations."""
    distance = abs(trainer_state.global_step - 2)
    return [1.0 - distance / 10] * len(completions)


def test_best_model_and_early_stopping_follow_the_reward_by_default(tiny_model, tmp_path):
    callbacks = [EarlyStoppingCallback(early_stopping_patience=2)]
    arguments = {"eval_dataset": PLAIN.select(range(2)), "callbacks": callbacks}
    trainer = make(
        tiny_model,
        tmp_path,
        reward_funcs=falling,
        arguments=arguments,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        max_steps=6,
        load_best_model_at_end=True,
        num_generations_eval=2,
    )
    trainer.train()
    assert trainer.state.best_global_step == 2
    assert trainer.state.best_metric == 1.0
    assert trainer.state.global_step == 4
    trainer._last_loaded_step = 4  # of vLLM's weights
    trainer._load_best_model()
    assert trainer._last_loaded_step != 4
