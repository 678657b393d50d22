"""`opo-trl selftest`: what it finds right here, and what it finds wrong with changed libraries."""

import os
import sys

import pytest
import torch
from started_programs import environment, run_to_its_end
from transformers import GenerationMixin
from trl import GRPOTrainer

from opo_trl import selftest
from opo_trl.selftest.runs import RecordingGRPO, RecordingOPO, Report, save_model, train_and_compare


def test_installed_releases_are_right(tmp_path):
    """Started inside a launch of eight processes, of which it must not become one."""
    place = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}
    place |= {"SLURM_NTASKS": "8", "SLURM_PROCID": "3", "ACCELERATE_MIXED_PRECISION": "fp16"}
    command = [sys.executable, "-m", "opo_trl.command.cli", "selftest"]
    status, output = run_to_its_end(command, environment(**place), limit=600)
    assert status == 0, output
    assert "WRONG" not in output
    lines = output.splitlines()
    for objective in ("opo", "topr", "grpo", "dapo", "grpo of TRL", "dapo of TRL"):
        for step in (1, 2, 3):
            assert any(line.startswith(f"ok     {objective}: gradient of step {step}") for line in lines), output
    assert "ok     a run that is killed inside a rollout, and resumed: the same weights, to the bit" in lines
    assert lines[-1].startswith("Not seen: vLLM, GPUs, several processes, sharding")


def test_environment_knows_nothing_of_a_cluster(monkeypatch):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "SLURM_JOB_ID"]
    names += ["ACCELERATE_USE_FSDP", "FSDP_VERSION", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]
    for name in (*names, "OMP_NUM_THREADS", "FRANKFURT"):
        monkeypatch.setenv(name, "1")
    environment_of_test = selftest.environment()
    assert environment_of_test.keys().isdisjoint(names)
    assert os.environ.keys() - {*names} <= environment_of_test.keys()


def factor(name: str, by: float):
    """A patch that multiplies what a method of TRL's trainer returns."""
    method = getattr(GRPOTrainer, name)

    def multiplied(self, *args, **named):
        return by * method(self, *args, **named)

    return lambda patch: patch.setattr(GRPOTrainer, name, multiplied)


def hotter(patch):
    """Sampling at another temperature than the configuration's."""
    generate = GenerationMixin.generate

    def generated(self, *args, generation_config=None, **named):
        generation_config.temperature = 1.5
        return generate(self, *args, generation_config=generation_config, **named)

    patch.setattr(GenerationMixin, "generate", generated)


def without_steering(patch):
    patch.setattr(GRPOTrainer, "get_high_entropy_mask", lambda self, entropies, mask, threshold: mask.bool())


def without_dropping(patch):
    patch.setattr(GRPOTrainer, "get_off_policy_mask", lambda self, advantages, **named: torch.ones_like(advantages))


def of_entropies(patch):
    method = GRPOTrainer._get_per_token_logps_and_entropies

    def halved(self, *args, **named):
        logps, entropies, aux_loss = method(self, *args, **named)
        return logps, None if entropies is None else entropies / 2, aux_loss

    patch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", halved)


def fewer_items(patch):
    method = GRPOTrainer._generate_and_score_completions

    def changed(self, inputs):
        rollout = method(self, inputs)
        return rollout | {"num_items_in_batch": rollout["num_items_in_batch"] - 1}

    patch.setattr(GRPOTrainer, "_generate_and_score_completions", changed)


def decayed(patch):
    step = torch.optim.SGD.step

    def stepped(self, *args, **named):
        for group in self.param_groups:
            group["weight_decay"] = 0.1
        return step(self, *args, **named)

    patch.setattr(torch.optim.SGD, "step", stepped)


WRONG = {
    "TRL's loss": (factor("_compute_loss", 0.5), "grpo", RecordingGRPO, "grpo of TRL: gradient of step 1"),
    "TRL's number of tokens": (fewer_items, "dapo", RecordingGRPO, "dapo of TRL: number of tokens that count"),
    "sampling": (hotter, "opo", RecordingOPO, "opo: RuntimeError: With"),
    "TRL's sampling": (hotter, "dapo", RecordingGRPO, "dapo of TRL: sampling"),
    "tokens that steer": (without_steering, "dapo", RecordingOPO, "dapo: gradient of step 1"),
    "stale completions": (without_dropping, "topr", RecordingOPO, "topr: gradient of step 2"),
    "entropies": (of_entropies, "grpo", RecordingOPO, "grpo: gradient of step 1"),
    "the optimizer": (decayed, "opo", RecordingOPO, "opo: weights after step 1"),
    "what the first step shows": (factor("_calculate_rewards", 2.0), "opo", RecordingOPO, "opo: RuntimeError: With"),
}

QUICK = ("TRL's sampling", "tokens that steer", "what the first step shows")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """With the model of the self-test."""
    folder = tmp_path_factory.mktemp("selftest")
    save_model(str(folder / "model"))
    return str(folder)


@pytest.mark.parametrize(
    ("change", "name", "kind", "text"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (name not in QUICK)) for name, case in WRONG.items()],
    ids=WRONG,
)
def test_selftest_finds_what_another_release_changes(change, name, kind, text, monkeypatch, folder, capsys):
    change(monkeypatch)
    report = Report()
    report.attempt(name, train_and_compare, report, name, kind, folder)
    assert any(line.startswith(text) for line in report.wrong), report.wrong
    assert f"WRONG  {text}" in capsys.readouterr().out
