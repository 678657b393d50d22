"""What docs/upstream/ would send to TRL: the patches, each proven by its own test, and the code of the page."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import trl
from datasets import Dataset
from helpers import USE_CPU


FOLDER = Path(__file__).resolve().parents[1] / "docs" / "upstream"
PATCHES = ("aligned_vllm_pass", "async_resume", "epoch_order")

TESTING_UTILS = """
import pytest
from trl.trainer.base_config import _BaseConfig

class TrlTestCase:
    @pytest.fixture(autouse=True)
    def set_tmp_dir_and_device(self, tmp_path, monkeypatch):
        self.tmp_dir = str(tmp_path)
        prepare = _BaseConfig.__post_init__
        monkeypatch.setattr(_BaseConfig, "__post_init__", lambda self: setattr(self, "use_cpu", True) or prepare(self))
"""


def apply(patch: str, to: Path, files: str) -> None:
    # The git of a repository around the folder would skip files outside of it.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(to.parent)}
    command = ["git", "apply", f"--include={files}", str(FOLDER / f"{patch}.patch")]
    subprocess.run(command, cwd=to, env=environment, check=True)


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of the installed TRL, with what the patches' tests need of its repository."""
    folder = tmp_path / "checkout"
    shutil.copytree(Path(trl.__file__).parent, folder / "trl", ignore=shutil.ignore_patterns("__pycache__"))
    for package in ("tests", "tests/experimental"):
        (folder / package).mkdir()
        (folder / package / "__init__.py").touch()
    (folder / "tests" / "testing_utils.py").write_text(TESTING_UTILS)
    return folder


@pytest.mark.parametrize("patch", PATCHES)
def test_patches_apply_to_the_installed_release(patch, checkout):
    before = {path: path.read_text() for path in (checkout / "trl").rglob("*.py")}
    apply(patch, checkout, "*")
    assert any(path.read_text() != text for path, text in before.items())


@pytest.mark.slow
@pytest.mark.parametrize("patch", PATCHES)
def test_the_test_of_a_patch_fails_without_it(patch, checkout):
    # The names that TRL's tests take from the Hub are folders here.
    hub = checkout / "trl-internal-testing"
    tiny.save_tiny_model(hub / "tiny-Qwen2ForCausalLM-2.5")
    Dataset.from_dict({"prompt": ["Simple is better", "Flat is", "Sparse is"]}).to_json(hub / "zen" / "train.jsonl")
    config = "- config_name: standard_prompt_only\n  data_files: [{split: train, path: train.jsonl}]\n"
    (hub / "zen" / "README.md").write_text(f"---\nconfigs:\n{config}---\n")

    def passes() -> bool:
        tests = [str(path) for path in (checkout / "tests").rglob("test_*.py")]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(checkout), *tests]
        environment = {**os.environ, "PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
        ended = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0 or ": AssertionError" in ended.stdout, ended.stdout  # not for another reason
        return ended.returncode == 0

    apply(patch, checkout, "tests/*")
    assert not passes()
    apply(patch, checkout, "trl/*")
    assert passes()


@pytest.mark.filterwarnings("ignore")
def test_code_of_the_page_trains(tiny_model, tmp_path):
    page = (FOLDER / "opo_trl_integration.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    small = "max_steps=4, logging_steps=1, max_completion_length=6, report_to='none', save_strategy='no', bf16=False"
    for old, new in (
        ('load_dataset("trl-lib/DeepMath-103K", split="train")', "rows"),
        ('"Qwen/Qwen3-0.6B"', repr(tiny_model)),
        ('"Qwen3-0.6B-OPO",', f"{str(tmp_path)!r}, use_cpu={USE_CPU}, {small},"),
        ("reward_funcs=accuracy_reward", "reward_funcs=length"),  # a random model solves nothing
    ):
        assert code.count(old) == 1
        code = code.replace(old, new)

    def length(completions, **columns):
        return [float(len(completion[0]["content"])) for completion in completions]

    names = {"rows": Dataset.from_dict({"prompt": [[{"role": "user", "content": "1+1="}]] * 16}), "length": length}
    exec(code, names)
    log = [entry for entry in names["trainer"].state.log_history if "loss" in entry]
    assert [entry["opo/pass"] for entry in log] == [1, 1, 2, 2]
    assert [entry["opo/chi2"] > 0 for entry in log] == [False, True, True, True]
