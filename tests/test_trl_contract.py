"""The check of what OPOTrainer relies on inside TRL: it passes here, and names everything where it does not."""

import importlib
import sys

import pytest
import trl

from opo_trl import trl_contract


class WithoutMethod(trl.GRPOTrainer):
    get_off_policy_mask = None


class WithoutParameter(trl.GRPOTrainer):
    def get_high_entropy_mask(self, entropies, mask):
        return mask


class WithoutBoth(WithoutMethod, WithoutParameter):
    pass


def test_installed_trl_passes():
    trl_contract.check()


@pytest.mark.parametrize("version", ["1.16.0", "1.16.1", "1.16.2.dev0"])
def test_tested_versions_pass(version):
    trl_contract.check(version=version)


@pytest.mark.parametrize("version", ["1.15.2", "1.16.0.dev0", "1.17.0", "2.0.0"])
def test_version_outside_the_tested_range_is_refused(version):
    with pytest.raises(ImportError) as error:
        trl_contract.check(version=version)
    assert version in str(error.value)
    assert str(trl_contract.TESTED_VERSIONS) in str(error.value)


@pytest.mark.parametrize(
    ("trainer_class", "named"),
    [
        (WithoutMethod, ["WithoutMethod.get_off_policy_mask is missing"]),
        (WithoutParameter, ["WithoutParameter.get_high_entropy_mask has no parameter threshold"]),
        (WithoutBoth, ["get_off_policy_mask is missing", "get_high_entropy_mask has no parameter threshold"]),
    ],
)
def test_changed_seam_is_named(trainer_class, named):
    with pytest.raises(ImportError) as error:
        trl_contract.check(trainer_class)
    assert all(text in str(error.value) for text in named)
    assert str(trl_contract.TESTED_VERSIONS) in str(error.value)


def test_every_problem_is_in_one_message():
    with pytest.raises(ImportError) as error:
        trl_contract.check(WithoutBoth, version="9.9")
    for text in ("9.9", "get_off_policy_mask", "threshold", str(trl_contract.TESTED_VERSIONS), "pip install"):
        assert text in str(error.value)


def test_check_runs_when_the_trainer_is_imported(monkeypatch):
    monkeypatch.delattr(trl.GRPOTrainer, "get_high_entropy_mask")
    for module in ("opo_trl.rollout.trainer", "opo_trl.trainer"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ImportError, match=r"GRPOTrainer\.get_high_entropy_mask is missing"):
        importlib.import_module("opo_trl.trainer")


def test_complete_rollout_passes():
    trl_contract.check_rollout(dict.fromkeys(trl_contract.ROLLOUT_KEYS))


def test_incomplete_rollout_is_refused_with_every_missing_name():
    rollout = dict.fromkeys(trl_contract.ROLLOUT_KEYS)
    del rollout["advantages"], rollout["completion_mask"]
    with pytest.raises(RuntimeError) as error:
        trl_contract.check_rollout(rollout)
    for text in ("completion_mask", "advantages", trl.__version__, str(trl_contract.TESTED_VERSIONS)):
        assert text in str(error.value)
    assert "prompt_ids" not in str(error.value)
