"""A launcher that starts fewer processes than it was asked for."""

import sys
from pathlib import Path

import pytest
from device_fields import RECIPES
from started_programs import environment, run_to_its_end


ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
CPU = str(RECIPES / "accelerate" / "cpu.yaml")


@pytest.mark.slow  # the command, which by default the script below stands for
def test_one_process_in_place_of_two_is_refused(tmp_path: Path):
    folder = tmp_path / "run"
    recipe = ["-m", "opo_trl.command.train", str(RECIPES / "arithmetic" / "opo.yaml"), "--output_dir", str(folder)]
    command = [*ACCELERATE, "--cpu", "--num_processes", "2", *recipe]
    status, output = run_to_its_end(command, environment(), limit=200)
    assert status == 1
    assert "opo-trl train: error: num_processes is above 1, but `accelerate launch` has started one process" in output
    assert "torchrun --nproc_per_node" in output
    assert not folder.exists()


@pytest.mark.parametrize(
    ("options", "address", "is_refused"),
    [
        (["--cpu", "--num_processes", "1"], {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}, False),
        (["--cpu", "--num_processes", "2"], {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}, True),
        # The first of these with less in its way, and the test above with a file.
        pytest.param(["--cpu", "--num_processes", "1"], {}, False, marks=pytest.mark.slow),
        pytest.param(["--config_file", CPU, "--num_processes", "2"], {}, True, marks=pytest.mark.slow),
    ],
)
def test_only_what_accelerate_was_asked_for_is_refused(tmp_path: Path, options, address, is_refused):
    """Where a job has an address for its processes, one is enough."""
    script = tmp_path / "script.py"
    script.write_text("from opo_trl.checks.processes import check_processes\ncheck_processes(1)\nprint('trains')\n")
    command = [*ACCELERATE, *options, str(script)]
    _, output = run_to_its_end(command, environment(**address), limit=200)
    assert ("trains" in output) == (not is_refused)
    assert ("has started one process" in output) == is_refused
