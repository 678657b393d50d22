"""
The tests on devices notice a tensor in the wrong place, a missing collective and a wrong dtype: one place of the
package at a time is broken, and a test that should fail is called. On a CPU most of them would pass.

    pytest -m slow tests/device/test_mutations.py

Not caught: what only a real device's asynchrony would show, such as `_on_gpu` of `StepClock` or a copy that blocks.
"""

import importlib
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import call

import opo_trl


pytestmark = pytest.mark.slow


@dataclass
class Mutation:
    """
    Args:
        file: in the package.
        old, new: text that occurs once in it, and what replaces it.
        says: what the error says, a regular expression.
        test: the module and function of the test, and of its parameter `options` the table and the key.
        processes, devices: where it runs.
    """

    file: str
    old: str
    new: str
    says: str
    test: tuple[str, ...]
    processes: int = 1
    devices: int = 1


ONE, TWO = "test_one_device", "test_two_devices"
HOST, HOST_OF_TWO = "test_scripted_run_is_that_of_the_host", "test_scripted_run_is_that_of_one_process_on_the_host"
RESUMED = "test_resumed_run_is_the_uninterrupted_one"
ON_TWO = {"processes": 2, "devices": 2}
DEVICES_DIFFER = "Expected all tensors to be on the same device"
NOT_OF_NCCL = "No backend type associated with device type cpu"

MUTATIONS = {
    "samples of the target stay on the host": Mutation(
        "rollout/rows.py",
        'to_device(table, rollout["advantages"].device)',
        "table",
        DEVICES_DIFFER,
        (ONE, HOST, "RUNS", "entropy"),
    ),
    "entries of a rollout stay on the host": Mutation(
        "trainer.py",
        "send_to_device(self._finish_rollout(rollout), device)",
        "self._finish_rollout(rollout)",
        DEVICES_DIFFER,
        (ONE, HOST, "RUNS", "sampler's ratios"),
    ),
    "rest of a rollout is resumed on the host": Mutation(
        "rollout/checkpoint.py",
        'send_to_device(state["buffer"], device)',
        'state["buffer"]',
        "Expected all tensors|rollout on {'cpu'}",
        (ONE, RESUMED, "RESUMED", "inside a rollout"),
    ),
    "the device's numbers become NumPy's": Mutation(
        "rollout/planner.py", ".cpu().numpy()", ".numpy()", "can't convert cuda", (ONE, HOST, "RUNS", "bfloat16")
    ),
    "an evaluation draws from the device's random numbers": Mutation(
        "evaluate.py",
        'devices = [device] if device.type not in ("cpu", "mps") else []',
        "devices = []",
        "assert same_bits",
        (ONE, "test_evaluations_do_not_touch_training"),
    ),
    "targets in half precision": Mutation(
        "rollout/rows.py",
        "column[own].float()",
        "column[own].half().float()",
        "gradient of step",
        (ONE, "test_generated_run_follows_the_definition"),
    ),
    "metrics are gathered on the host": Mutation(
        "metrics/step.py",
        "gather(table).cpu()",
        "gather(table.cpu())",
        NOT_OF_NCCL,
        (TWO, HOST_OF_TWO, "RUNS", "replay"),
        **ON_TWO,
    ),
    "tokens of one process count for all": Mutation(
        "trainer.py",
        "self.accelerator.gather(completion_tokens(rows).sum(dim=1)).double()",
        "completion_tokens(rows).sum(dim=1).double()",
        "gradient of step",
        (TWO, HOST_OF_TWO, "RUNS", "DAPO"),
        **ON_TWO,
    ),
    "the end of the epochs is agreed on the host": Mutation(
        "asynchronous/trainer.py",
        "torch.tensor(int(epochs_are_over), device=self.accelerator.device)",
        "torch.tensor(int(epochs_are_over))",
        NOT_OF_NCCL,
        (TWO, "test_asynchronous_gradient_is_the_definition"),
        **ON_TWO,
    ),
    "one process is given both devices": Mutation(
        "checks/devices.py",
        "if args.n_gpu > 1:",
        "if args.n_gpu > 2:",
        DEVICES_DIFFER,
        (TWO, "test_one_process_that_sees_two_devices_trains_on_the_first"),
        devices=2,
    ),
}


def with_package(folder: Path, test: tuple[str, ...], model: str, place: Path) -> None:
    """Call a test with a package that is imported from a folder."""
    name, function, *parameter = test
    ours = ("opo_trl", "asynchronous", "counting", "helpers", "compared", ONE, TWO)
    for loaded in [each for each in sys.modules if each.split(".")[0] in ours]:
        del sys.modules[loaded]
    sys.path.insert(0, str(folder))
    module = importlib.import_module(name)
    assert Path(importlib.import_module("opo_trl").__file__).is_relative_to(folder)
    tables, keys = parameter[:1], parameter[1:]
    options = [vars(module)[table][key] for table, key in zip(tables, keys, strict=True)]
    getattr(module, function)(model, place, *options)


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_mutation_is_caught_and_without_it_the_test_passes(tiny_model, tmp_path, library, mutation):
    package = tmp_path / "with" / "opo_trl"
    shutil.copytree(Path(opo_trl.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    where = {"processes": mutation.processes, "devices": mutation.devices, "library": library}
    arguments = (package.parent, mutation.test, tiny_model)
    call(with_package, *arguments, tmp_path / "1", folder=tmp_path / "1", **where)
    text = (package / mutation.file).read_text()
    assert text.count(mutation.old) == 1, f"{mutation.file} has changed: mutate another place"
    (package / mutation.file).write_text(text.replace(mutation.old, mutation.new))
    with pytest.raises(AssertionError, match=mutation.says):
        call(with_package, *arguments, tmp_path / "2", folder=tmp_path / "2", **where)
