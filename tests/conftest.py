"""Fixtures that several test files share, and `--on-device`."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


# Nothing here needs the Hub, and a test that tries to use it must fail rather than wait.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# With such small models a second thread costs more than it gains, and far more on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Torch and what imports it follow where they are used: pytest's first process, which runs no test, needs none of them.
import hypothesis
import metadata_read_once  # noqa: F401
import pytest


# A time limit of an example would fail on a busy machine.
hypothesis.settings.register_profile("without limit", deadline=None)
hypothesis.settings.load_profile("without limit")

# Slow files, the slowest first, so that no core is idle at the end.
FIRST = (
    "test_two_devices",
    "test_invariance",
    "test_one_device",
    "test_launched",
    "test_kill_and_resume",
    "test_two_steps",
    "test_compatibility",
    "test_selftest",
    "test_notebooks",
    "test_killed_command",
    "test_several_nodes",
    "test_parity",
    "test_wheel",
    "test_accuracy",
    "test_scoring",
    "test_environments",
    "test_recorded",
    "test_features_of_trl",
    "test_train",
    "test_update_phase",
    "test_public_scripts",
    "test_replay",
    "test_checkpoint",
    "test_cutting",
    "test_trainer_options",
    "test_trainer",
)

SHARED = Path(os.environ.get("OPO_TRL_SHARED") or Path(__file__).resolve().parents[2] / "shared")


def pretend_device() -> Path:
    """
    The folder that makes torch see pretend devices, if it is on PYTHONPATH; it is built if need be.

    Raises:
        `LookupError`: says what is missing here.
        `RuntimeError`: the compiler failed.
    """
    build = SHARED / "tools" / "fakecuda" / "build.sh"
    if not build.exists():
        raise LookupError("no tools/fakecuda in ../shared or OPO_TRL_SHARED")
    made = subprocess.run([build], env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True)
    if "the compiler failed" in made.stderr:
        raise RuntimeError(made.stderr)
    if made.returncode != 0:
        raise LookupError(made.stderr.strip())
    return Path(made.stdout.strip())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--on-device",
        action="store_true",
        help="train on the GPUs that are here, or else on pretend ones from ../shared",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """With `--on-device`, start anew: pretend devices must be there before torch is imported."""
    if not config.getoption("on_device") or "OPO_TRL_ON_DEVICE" in os.environ:
        return
    import torch

    place = {}
    if torch.cuda.device_count():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    else:
        try:
            built = pretend_device()
        except LookupError as lacks:
            raise pytest.UsageError(f"--on-device needs a GPU, or a pretend one: {lacks}") from None
        paths = [str(Path(__file__).with_name("pretend_devices")), str(built), os.environ.get("PYTHONPATH")]
        visible, place = "0,1,2,3", {"FAKE_CUDA_DEVICES": "4", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # Transformers would divide every batch between all devices that a process sees.
    place |= {"OPO_TRL_ON_DEVICE": visible, "CUDA_VISIBLE_DEVICES": visible.split(",")[0]}
    command = [sys.executable, "-m", "pytest", *config.invocation_params.args]
    os.execve(sys.executable, command, os.environ | place)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files; `start` hands them out in this order."""
    items.sort(key=lambda item: FIRST.index(item.path.stem) if item.path.stem in FIRST else len(FIRST))
    for item in items:
        if "OPO_TRL_ON_DEVICE" in os.environ and item.path.parent.name == "device":
            item.add_marker(pytest.mark.skip(reason="starts processes with pretend devices by itself"))


def pytest_collection_finish() -> None:
    """Every `train()` runs the garbage collector, which takes half a second for a million objects of all modules."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """The same for what the tests of a file have imported, and what is kept for those of others."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


class Bomb:
    """Loading its pickle creates a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.fixture
def bomb(tmp_path: Path) -> Bomb:
    """What creates the folder `harm` once its pickle is loaded."""
    return Bomb(tmp_path / "harm")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a small random Qwen3 and its tokenizer."""
    from tiny import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def player(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a small model that plays the game of `guessing_game`."""
    from guessing_game import save_player

    return save_player(tmp_path_factory.mktemp("player"))


@pytest.fixture(scope="session")
def library() -> Path:
    """The folder that makes torch see pretend devices, if it is on PYTHONPATH."""
    try:
        return pretend_device()
    except LookupError as lacks:
        pytest.skip(str(lacks))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder `shared` next to the checkout, or the folder OPO_TRL_SHARED."""
    return SHARED


@pytest.fixture(scope="session")
def shared_data(shared: Path) -> Path:
    """The folder `data` in `shared`."""
    if not (shared / "data" / "math").is_dir():
        pytest.skip("needs ../shared: data/math and data/Qwen3-1.7B, or OPO_TRL_SHARED set to a folder that has them")
    return shared / "data"
