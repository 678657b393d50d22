"""The committed evidence: the page of the paper's claims comes out of the committed runs byte for byte."""

from benchmarks import claims


def test_claims_of_the_committed_runs_are_the_committed_ones():
    assert claims.page() == (claims.HERE / "results" / "claims.md").read_text()


def test_committed_runs_name_no_path_of_the_machine_that_made_them():
    for path in (claims.HERE / "evidence").rglob("*.json"):
        assert '"/' not in path.read_text(), path
