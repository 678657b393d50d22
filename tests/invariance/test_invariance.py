"""The equivalence classes as tests: a quick selection by default, all of them with `-m slow`."""

import functools
from pathlib import Path

import pytest
from canonical_run import Form
from equivalent_forms import CLASSES, ONE, EquivalenceClass, compare, train


def members():
    for equivalence in CLASSES:
        for index, member in enumerate(equivalence.members):
            marks = () if index in equivalence.quick else (pytest.mark.slow,)
            yield pytest.param(equivalence, member, id=f"{equivalence.name}-{member.name}", marks=marks)


@pytest.fixture(scope="module")
def trained(tiny_model: str, tmp_path_factory: pytest.TempPathFactory):
    """Forms by name, each trained once."""
    folder = tmp_path_factory.mktemp("invariance")

    @functools.cache
    def of(name: str):
        form = next(equivalence.reference for equivalence in CLASSES if equivalence.reference.name == name)
        return train(form, tiny_model, folder / name)

    return of


@pytest.mark.parametrize(("equivalence", "member"), list(members()))
def test_member_trains_as_its_reference_does(
    equivalence: EquivalenceClass, member: Form, trained, tiny_model: str, tmp_path: Path
):
    difference = compare(train(member, tiny_model, tmp_path), trained(equivalence.reference.name))
    assert difference.largest <= equivalence.tolerance, difference


def test_comparison_sees_a_difference(trained, tiny_model: str, tmp_path: Path):
    other = train(Form("another seed", options={"seed": 43}), tiny_model, tmp_path)
    assert compare(other, trained(ONE.name)).parameters > 0.01
