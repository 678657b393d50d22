"""A killed and resumed run is bitwise identical to an uninterrupted one: some moments here, more in the script."""

from dataclasses import replace
from pathlib import Path

import pytest
from added_objective import Cautious

from opo_trl.rollout.checkpoint import fault, last_complete

from .kill_and_resume import (
    DYNAMIC,
    LORA,
    ONE,
    PLACES,
    REPLAY,
    SAVING,
    ZERO3,
    Kill,
    Mortal,
    differences,
    start,
    train,
    train_without_state,
)


@pytest.fixture(scope="module")
def uninterrupted(tiny_model: str, tmp_path_factory: pytest.TempPathFactory):
    """Folder of a form's uninterrupted run, trained once."""
    folders = {}

    def of(form) -> Path:
        if form.name not in folders:
            folders[form.name] = tmp_path_factory.mktemp("uninterrupted")
            start(form, tiny_model, folders[form.name])
        return folders[form.name]

    return of


# A rollout serves six optimizer steps of two micro-steps; checkpoints come after every second step.
@pytest.mark.parametrize(
    "kill",
    [
        pytest.param(Kill(micro_step=3), id="before the first save"),
        pytest.param(Kill(micro_step=5), id="in a rollout's first iteration"),
        pytest.param(Kill(micro_step=11), id="in its second iteration"),
        pytest.param(Kill(micro_step=12), id="at the beginning of the second rollout"),
        pytest.param(Kill(micro_step=27), id="in the second epoch"),
        pytest.param(Kill(save=1, seconds=0.003), id="early in a save", marks=pytest.mark.slow),
        pytest.param(Kill(save=4, seconds=0.015), id="in a save", marks=pytest.mark.slow),
        pytest.param(Kill(save=8, seconds=0.03), id="late in the last save", marks=pytest.mark.slow),
    ],
)
def test_resumed_run_is_the_uninterrupted_one(uninterrupted, tiny_model: str, tmp_path: Path, kill: Kill):
    assert start(ONE, tiny_model, tmp_path, kill) == [-9]
    start(ONE, tiny_model, tmp_path)
    assert differences(tmp_path, uninterrupted(ONE)) == []


QUICK = {
    "after the model",
    "after the manifest",
    "before an old one is deleted",
    "after a file of an old one is deleted",
}


@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=[] if place in QUICK else pytest.mark.slow) for place in PLACES]
)
def test_every_moment_of_a_save_leaves_a_complete_checkpoint(uninterrupted, tiny_model: str, tmp_path: Path, place):
    assert start(ONE, tiny_model, tmp_path, Kill(save=4, place=place)) == [-9]
    new_is_complete = list(PLACES).index(place) > list(PLACES).index("after the manifest")
    assert last_complete(str(tmp_path)) == str(tmp_path / ("checkpoint-10" if new_is_complete else "checkpoint-8"))
    old = tmp_path / "checkpoint-6"
    assert fault(old) is None or "old one is deleted" in place
    if "file of an old one" in place:
        assert old.exists()
        assert fault(old) is not None
    start(ONE, tiny_model, tmp_path)
    assert differences(tmp_path, uninterrupted(ONE)) == []


@pytest.mark.parametrize(
    "form",
    [
        LORA,
        DYNAMIC,
        replace(
            ONE,
            name="moving reference",
            options={**SAVING, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5},
        ),
        replace(
            ONE,
            name="adaptive entropy",
            options={**SAVING, "use_adaptive_entropy": True, "entropy_target": 4.0, "entropy_coef_max": 0.1},
        ),
    ],
    ids=lambda form: form.name,
)
def test_other_forms(uninterrupted, tiny_model: str, tmp_path: Path, form):
    assert start(form, tiny_model, tmp_path, Kill(micro_step=11)) == [-9]
    start(form, tiny_model, tmp_path)
    assert differences(tmp_path, uninterrupted(form)) == []


def train_cautious(*arguments) -> None:
    Mortal.objective_class = Cautious
    train(*arguments)


def test_objective_of_somebody_else(uninterrupted, tiny_model: str, tmp_path: Path):
    """Inside a pass that replays: see below."""
    start(REPLAY, tiny_model, tmp_path / "uninterrupted", target=train_cautious)
    assert start(REPLAY, tiny_model, tmp_path / "killed", Kill(micro_step=21), target=train_cautious) == [-9]
    start(REPLAY, tiny_model, tmp_path / "killed", target=train_cautious)
    assert differences(tmp_path / "killed", tmp_path / "uninterrupted") == []
    assert differences(tmp_path / "killed", uninterrupted(REPLAY)) != []


# Nine optimizer steps of two micro-steps per rollout, three in each pass. Checkpoint 8 is inside the first rollout's
# last pass, 10 inside the second rollout's first, 12 between that and the pass that replays, 14 inside the latter.
@pytest.mark.parametrize("micro_step", [17, 21, 25, 29])
def test_inside_a_pass_and_a_replay_buffer(uninterrupted, tiny_model: str, tmp_path: Path, micro_step: int):
    assert start(REPLAY, tiny_model, tmp_path, Kill(micro_step=micro_step)) == [-9]
    start(REPLAY, tiny_model, tmp_path)
    assert differences(tmp_path, uninterrupted(REPLAY)) == []


@pytest.mark.slow
@pytest.mark.parametrize("config", ["zero3", "fsdp2"])
def test_replay_of_four_processes(uninterrupted, tiny_model: str, tmp_path: Path, config: str):
    form = replace(ZERO3, name=f"replay, {config}", config=config, options=REPLAY.options)
    assert -9 in start(form, tiny_model, tmp_path, Kill(micro_step=14, process=2))
    start(form, tiny_model, tmp_path)
    assert differences(tmp_path, uninterrupted(form)) == []


def test_four_processes_under_zero3(uninterrupted, tiny_model: str, tmp_path: Path):
    form = replace(ZERO3, options={**SAVING, "max_steps": 8})  # two into the second rollout
    assert -9 in start(form, tiny_model, tmp_path, Kill(micro_step=5, process=2))
    start(form, tiny_model, tmp_path)
    assert differences(tmp_path, uninterrupted(form)) == []


# A rollout of all processes serves six optimizer steps; the reference moves before the checkpoint of the second.
MOVING = {**SAVING, "max_steps": 4, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ("multi_gpu", ["reference.pt"]),
        ("zero3", ["reference_0.pt", "reference_1.pt"]),
        pytest.param("fsdp2", ["reference_0.pt", "reference_1.pt"], marks=pytest.mark.slow),
    ],
)
def test_moving_reference_is_saved_once(uninterrupted, tiny_model: str, tmp_path: Path, config: str, files: list):
    form = replace(ZERO3, name=f"moving reference, {config}", rows=4, processes=2, config=config, options=MOVING)
    assert -9 in start(form, tiny_model, tmp_path, Kill(micro_step=3, process=1))
    saved = Path(last_complete(str(tmp_path)))
    assert sorted(path.name for path in saved.glob("reference*")) == files
    start(form, tiny_model, tmp_path)
    assert differences(tmp_path, uninterrupted(form)) == []


def test_without_the_rollout_state_the_run_is_another(uninterrupted, tiny_model: str, tmp_path: Path):
    assert start(ONE, tiny_model, tmp_path, Kill(micro_step=11)) == [-9]
    start(ONE, tiny_model, tmp_path, target=train_without_state)
    assert differences(tmp_path, uninterrupted(ONE)) != []
