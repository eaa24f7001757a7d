"""What README claims is what results/ holds and what the program does."""

import json
import re
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from confitune.experiments.paper.reproduce import write_outcomes
from confitune.experiments.paper.tables import order_of
from confitune.experiments.reporting.figures import overview_figure, save_figure
from confitune.experiments.reporting.table import Row, numbers_per_task, sections_of
from confitune.experiments.runs.identity import finished_runs
from confitune.metrics import mean_and_interval

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / name for name in ("README.md", "docs/reproduction.md", "docs/best.md", "docs/measurements.md")]
# A page of results/, one thing that was reproduced, its sections with some words in their heading, what it says of the
# paper's words, or the order of methods.
BLOCK = re.compile(
    r"(<!-- (results/(?!benchmarks/)\S+)(?:(?<=reproduction\.md) ([\w-]+))?( claims| order|: [^>]+)? -->\n)"
    r"(.*?)(<!-- end -->)",
    re.DOTALL,
)
BLOCKS = [match.groups()[1:5] for page in PAGES for match in BLOCK.finditer(page.read_text())]
PROSE = re.sub(BLOCK, "", (ROOT / "docs/reproduction.md").read_text())
PICTURE = ROOT / "docs/overview.png"


@pytest.mark.parametrize(("source", "what", "part", "block"), BLOCKS, ids=range(len(BLOCKS)))
def test_tables_are_the_measured_ones(source: str, what: str | None, part: str | None, block: str) -> None:
    assert block == measured(source, what, part), "python tests/test_readme.py --update writes what was measured"


@pytest.mark.parametrize("folder", [path.parent.name for path in RESULTS.glob("*/outcomes.json")])
def test_pages_of_reproductions_are_made_from_their_numbers(folder: str, tmp_path: Path) -> None:
    made, there = shutil.copytree(RESULTS / folder, tmp_path / folder), RESULTS / folder
    write_outcomes(made)
    for name in ("outcomes.json", "reproduction.md", "README.md"):
        assert (made / name).read_bytes() == (there / name).read_bytes()


def measured(source: str, what: str | None, part: str | None) -> str:
    text = (ROOT / source).read_text()
    if what:
        found = outcome(Path(source).parent.name, what)
        if part == " order":
            return _order(found) + "\n"
        _, _, text = text.partition(f"\n## {found['title']}\n")
        text = text.partition("\n## ")[0]
    if part and part.startswith(":"):
        sections = [section for section in text.split("\n**") if part[2:] in section.splitlines()[0]]
        text = "\n".join(f"**{section.removeprefix('**')}" for section in sections)
    if part == " claims":
        text = text.partition("### What the paper says of it\n")[2]
    lines = [line for line in text.splitlines() if not line.startswith("#")]  # a page has headings of its own
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def test_the_picture_shows_what_was_measured() -> None:
    told = "python tests/test_readme.py --update draws what was measured"
    assert Image.open(PICTURE).info["Description"] == _described(pictured()), told
    assert all("overview.png" in (ROOT / page).read_text() for page in ("README.md", "docs/index.md"))


def pictured() -> dict[str, np.ndarray]:
    """The accuracy matrices of the first page's picture, by method."""
    found = rows("photos", "window means, running statistics")
    return {name: np.stack([run.matrix for run in found[name].runs]) for name in ("finetune", "confit", "best")}


def _described(matrices: dict[str, np.ndarray]) -> str:
    return json.dumps({name: np.round(found, 3).tolist() for name, found in matrices.items()})


def draw() -> None:
    """The first page's picture, with its numbers in it."""
    save_figure(overview_figure(pictured(), title="photos, tf_efficientnet_lite0"), PICTURE)
    text = PngImagePlugin.PngInfo()
    text.add_text("Description", _described(pictured()))
    Image.open(PICTURE).save(PICTURE, pnginfo=text, optimize=True)


def outcome(folder: str, what: str) -> dict:
    """The numbers that `confitune reproduce` wrote."""
    return json.loads((RESULTS / folder / "outcomes.json").read_text())[what]


def rows(folder: str, words: str) -> dict[str, Row]:
    """Of the section with these words in its heading, by method."""
    (found,) = (s for s in sections_of(finished_runs(RESULTS / folder).values()) if words in s.about)
    return dict(zip(found.names, found.rows, strict=True))


def _order(table: dict) -> str:
    """How the methods of each dataset stand by ACC, compared with the paper."""
    told = []
    for dataset in dict.fromkeys(cell["dataset"] for cell in table["cells"]):
        cells = [
            c for c in table["cells"] if (c["dataset"], c["metric"]) == (dataset, "ACC") and c["paper"] is not None
        ]
        order, _ = order_of({c["method"]: c["measured"] for c in cells}, {c["method"]: c["paper"] for c in cells})
        told.append(f"Order of the methods by ACC on {dataset}, compared with the paper: {order}.")
    return "\n\n".join(told)


def ablation(folder: str) -> dict[str, tuple[float, float]]:
    """Mean ACC and half of its interval, by method."""
    cells = outcome(folder, "table2")["cells"]
    return {c["method"]: (c["measured"], c["interval"]) for c in cells if c["metric"] == "ACC"}


def test_what_is_said_of_the_clean_pipeline() -> None:
    assert "all four methods of the ablation are more than ten points better" in PROSE
    clean, published = ablation("flowers102-paper-clean"), ablation("flowers102-paper")
    assert len(clean) == 4
    assert all(clean[method][0] - published[method][0] > 10 for method in clean)
    assert "Only the intervals of hierarchical fine-tuning and ConFiT do not overlap" in PROSE
    ordered = sorted(clean.values())
    apart = [low[0] + low[1] < high[0] - high[1] for low, high in pairwise(ordered)]
    assert apart == [False, False, True]
    assert [method for method, numbers in clean.items() if numbers in ordered[2:]] == ["hierarchical", "confit"]


def test_what_is_said_of_window_means() -> None:
    assert "the differences are within the spread over seeds. Window means take more than twice the numbers" in PROSE
    forms = [
        rows("flowers102-published", f"{form} statistics, precision fp32")["confit"].runs
        for form in ("phase means, running", "window means, running", "window means, pass")
    ]
    accs = [mean_and_interval([run.acc for run in runs]) for runs in forms]
    assert max(acc.mean - acc.half_width for acc in accs) < min(acc.mean + acc.half_width for acc in accs)
    assert numbers_per_task(forms[1]) > 2 * numbers_per_task(forms[0])


def test_what_is_said_of_linear_probes_and_of_digits() -> None:
    assert "`linear-probe` beats every method that trains the backbone" in README
    photos, digits = (rows(name, "window means, running statistics") for name in ("photos", "digits"))
    trained = set(photos) - {"linear-probe", "best"}
    assert len(trained) >= 6
    mean = {method: np.mean([run.acc for run in row.runs]) for method, row in photos.items()}
    assert all(mean[method] < mean["linear-probe"] for method in trained)
    assert "ConFiT as published forgets more than plain fine-tuning" in README
    forgotten = {method: np.mean([run.fgt for run in digits[method].runs]) for method in ("confit", "finetune")}
    assert forgotten["confit"] > forgotten["finetune"]


def test_what_is_said_of_controls() -> None:
    assert "without it, task-specific batch norm forgets more than shared batch norm" in PROSE
    controls = outcome("flowers102-paper-clean", "controls")["data"]["flowers102"]
    cells = outcome("flowers102-paper-clean", "table2")["cells"]
    cases = {case["case"]: case for case in controls}
    (shared,) = (cell["measured"] for cell in cells if (cell["method"], cell["metric"]) == ("finetune", "FGT"))
    assert float(cases["task-bn"]["fgt_shown"].split()[0]) > shared
    assert "Of the methods that learn task after task it comes closest to ConFiT" in PROSE
    found = {cell["method"]: cell["measured"] for cell in cells if cell["metric"] == "ACC"}
    confit = found.pop("confit")
    found |= {name: cases[name]["acc"] for name in ("bn-only", "task-bn")}
    assert min(found, key=lambda method: abs(found[method] - confit)) == "bn-only"


def test_every_row_of_table_1_is_close_to_the_paper() -> None:
    assert "Every row of table 1 is then within two points of the paper" in PROSE
    cells = outcome("flowers102-paper", "table1")["cells"]
    assert len(cells) == 20
    assert all(abs(cell["measured"] - cell["paper"]) < 2 for cell in cells)


def test_every_number_in_words_is_one_that_is_measured_or_set() -> None:
    """Decimals in the page's own words stand in results/, or are settings of the methods."""
    known = " ".join(path.read_text() for path in RESULTS.rglob("*.md"))
    settings = {"0.1", "0.01"}  # versions and dampings
    theirs = {"0.51", "0.17"}  # what other papers state
    said = set(re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", re.sub(r"```.*?```|`[^`]*`", "", PROSE, flags=re.DOTALL)))
    assert {number for number in said - settings - theirs if number not in known} == set()


def test_there_are_tables_and_every_link_leads_somewhere() -> None:
    assert len(BLOCKS) == 23
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_python_example_runs_and_forgets_little(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    names: dict[str, object] = {}
    exec(compile(code.replace("epochs=5", "epochs=2"), "README.md", "exec"), names)
    first, second, numbers = map(eval, capsys.readouterr().out.strip().splitlines())
    assert first["task1"] > 60  # chance is 25
    assert first["task1"] - second["task1"] < 15
    assert numbers == {name: {"norms": 255_835, "head": 5_124} for name in ("task1", "task2")}


def updated(text: str) -> str:
    """A page with what was measured in its blocks."""
    return BLOCK.sub(lambda match: match[1] + measured(*match.group(2, 3, 4)) + match[6], text)


if __name__ == "__main__" and "--update" in sys.argv:
    for page in PAGES:
        page.write_text(updated(page.read_text()))
    draw()
