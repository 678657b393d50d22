"""FSDP2 and DeepSpeed's ZeRO on two pretend devices, launched with the users' own configurations of accelerate."""

import functools
import json
import sys
from pathlib import Path

import pytest
import torch
from canonical_run import weights
from device_processes import HERE, with_devices
from equivalent_forms import REPLAYED, TOLERANCE, Trained, compare, train
from launched_processes import CONFIGS
from started_programs import environment, run_to_its_end


pytestmark = pytest.mark.slow

SHARDED = ("zero2", "zero3", "fsdp2")


@pytest.fixture(scope="module")
def trained(library, tiny_model, tmp_path_factory):
    """Folder of a configuration's runs, trained once, and what each process has found."""

    @functools.cache
    def of(config: str) -> tuple[Path, list[dict]]:
        folder = tmp_path_factory.mktemp(config)
        launch = ["-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{config}.yaml")]
        launch += ["--num_processes", "2", "--main_process_port", "0"]
        command = [sys.executable, *launch, HERE / "sharded_run.py", config, tiny_model, folder]
        env = environment(DS_ACCELERATOR="cuda", **with_devices(2, library))
        status, printed = run_to_its_end(command, env, limit=600)
        assert status == 0, printed[-6000:]
        return folder, [json.loads((folder / f"found_{rank}.json").read_text()) for rank in range(2)]

    return of


@pytest.fixture(scope="module")
def on_the_host(tiny_model, tmp_path_factory) -> Trained:
    return train(REPLAYED, tiny_model, tmp_path_factory.mktemp("host"))


@pytest.mark.parametrize("config", ["multi_gpu", *SHARDED])
def test_run_is_that_of_one_process_on_the_host(trained, on_the_host, config):
    folder, (first, _) = trained(config)
    steps = [entry for entry in first["scripted"]["log"] if "grad_norm" in entry]
    found = compare(Trained(steps, None, weights(folder / "scripted")), on_the_host)
    assert found.largest <= TOLERANCE, found


@pytest.mark.parametrize("config", ["multi_gpu", *SHARDED])
def test_each_process_holds_its_part_on_its_device(trained, config):
    for rank, found in enumerate(trained(config)[1]):
        for name, precision in {"scripted": "no", "whole": "bf16", "resumed": "bf16"}.items():
            run = found[name]
            assert (run["device"], run["processes"], run["precision"]) == (f"cuda:{rank}", 2, precision)
            assert run["sharded"] == (config in ("zero3", "fsdp2"))
            assert run["held"] == pytest.approx(0.5 if config in SHARDED else 1, rel=0.01)


@pytest.mark.parametrize("config", ["multi_gpu", *SHARDED])
def test_resumed_run_is_bitwise_the_uninterrupted_one(trained, config):
    folder, (first, _) = trained(config)
    assert first["resumed"]["log"] == first["whole"]["log"]
    resumed, whole = weights(folder / "resumed"), weights(folder / "whole")
    assert [name for name in whole if not torch.equal(resumed[name], whole[name])] == []


@pytest.mark.parametrize("config", ["multi_gpu", *SHARDED])
def test_reference_is_the_model_that_is_given(trained, config):
    assert max(found["kl"] for found in trained(config)[1]) < 1e-9
