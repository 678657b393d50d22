"""Fixtures that several test files share."""

import os
from pathlib import Path


# Nothing here needs the Hub, and a test that asks it must fail rather than wait.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The models are so small that a second thread costs more than it brings, and on a busy machine many times more.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from tiny import save_tiny_model


# What takes long, the longest first: at the end one core would be idle.
FIRST = (
    "test_kill_and_resume",
    "test_notebooks",
    "test_launched",
    "test_several_nodes",
    "test_train",
    "test_invariance",
    "test_scoring",
    "test_compare",
    "test_killed_command",
    "test_wheel",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order of the files, which `start` keeps when it hands them out."""
    items.sort(key=lambda item: FIRST.index(item.path.stem) if item.path.stem in FIRST else len(FIRST))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a small random Qwen3 and its tokenizer."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder `data` in `shared` beside the checkout, or in the folder that OPO_TRL_SHARED names."""
    shared = Path(os.environ.get("OPO_TRL_SHARED") or Path(__file__).resolve().parents[2] / "shared")
    if not (shared / "data" / "math").is_dir():
        pytest.skip("needs ../shared: data/math and data/Qwen3-1.7B, or OPO_TRL_SHARED set to a folder that has them")
    return shared / "data"
