"""Cells beside the paper's numbers, what is said of claims, and the page."""

import pytest

from confitune.experiments.paper.numbers import reported
from confitune.experiments.paper.outcome import Claim, Outcome, cells_of, verdict
from found import of_two_tasks


@pytest.mark.parametrize(
    ("measured", "paper", "interval", "said"),
    [
        (86.9, 86.99, 0.25, "inside"),
        (87.24, 86.99, 0.25, "inside"),
        (87.25, 86.99, 0.25, "higher"),
        (86.73, 86.99, 0.25, "lower"),
        (64.5, 64.13, None, "inside"),  # a single run of the paper's: half a point
        (64.7, 64.13, None, "higher"),
        (50.0, None, None, "not reported"),
    ],
)
def test_the_verdict_is_where_the_mean_lies(measured, paper, interval, said):
    assert verdict(measured, paper, interval) == said


def test_cells_stand_beside_the_papers():
    confit = [of_two_tasks("confit", 0, ((84.0, 82.0), 90.0)), of_two_tasks("confit", 1, ((87.0, 86.0), 90.0))]
    acc, fgt = cells_of("flowers102", "confit", confit, reported("table1")["confit"]["flowers102"])
    (joint,) = cells_of("flowers102", "joint", [of_two_tasks("joint", 0, ((None, 88.0), 92.0))], {})
    assert (acc.method, acc.metric, acc.measured, acc.seeds, acc.paper, acc.paper_interval) == (
        *("confit", "ACC", 87.0, 2, 86.99, 0.25),
    )
    assert acc.interval is None  # Student's t of two values would be 12.7
    assert (fgt.metric, fgt.measured, fgt.paper) == ("FGT", 1.5, 1.79)
    assert (joint.method, joint.metric, joint.interval, joint.verdict) == ("joint", "ACC", None, "not reported")
    lines = Outcome(what="x", title="X", cells=[acc, joint]).markdown().splitlines()
    assert lines[4] == "| flowers102 | confit | ACC | 87.00 | 2 | 86.99 ± 0.25 | +0.01 | inside |"
    assert lines[5] == "| flowers102 | joint | ACC | 90.00 | 1 | - | - | not reported |"


def test_a_task_just_learned_is_measured_as_the_published_code_does_with_ours_beside_it():
    runs = [of_two_tasks("confit", 0, ((84.0, 82.0), 90.0), as_learned=[85.0, 88.0])]
    acc, fgt = cells_of("flowers102", "confit", runs, reported("table1")["confit"]["flowers102"])
    assert (acc.measured, acc.recovered) == (85.0, 86.0)  # 82 and 88, 82 and 90
    assert (fgt.measured, fgt.recovered) == (3.0, 2.0)
    page = Outcome(what="x", title="X", cells=[acc, fgt]).markdown()
    assert "| confit | FGT | 3.00 | 1 | 1.79 ± 0.49 | +1.21 | higher | 2.00 |" in page


def test_claims_are_told_apart():
    claims = [Claim(text=t, measured="1", holds=h) for t, h in (("a", True), ("b", False), ("c", None))]
    page = Outcome(what="x", title="X", claims=claims).markdown()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")]
    assert [row[2].strip() for row in rows] == ["verdict", "holds", "does not hold", "not judged"]


def test_a_page_shows_everything():
    outcome = Outcome(
        what="x",
        title="X",
        cells=cells_of("d", "m", [of_two_tasks("m", 0, ((84.0, 82.0), 90.0))], {}),
        claims=[Claim(text="c", measured="2", holds=True)],
        tables={"T": "| a |"},
        pictures=["p.png"],
        notes=["n"],
    )
    page = outcome.markdown()
    texts = ("## X", "| d | m |", "### T\n\n| a |", "![X](p.png)", "| c | 2 | holds |", "Note: n")
    places = [page.index(text) for text in texts]
    assert places == sorted(places)
