"""The report's numbers against numpy and scipy, whatever is in the folder and whatever things are called."""

import base64
import io
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from confitune.errors import ConfituneError
from confitune.experiments.reporting.report import write_pages, write_report
from confitune.experiments.runs.identity import finished_runs
from found import made_up, saved
from program import exit_code

NAN = math.nan
EVIL = "</script><img src=x onerror=alert(1)>"


CONFIT = [
    made_up(seed=s, matrix=((90.0 + s, 88.0, 85.25 - s), (NAN, 95.0, 94.0 + s), (NAN, NAN, 97.0))) for s in range(3)
]
FINETUNE = [
    made_up("finetune", s, ((92.0, 70.0, 60.0 + s), (NAN, 96.0, 71.5), (NAN, NAN, 98.0)), tasks=CONFIT[0].tasks)
    for s in range(2)
]
JOINT = made_up("joint", 0, ((NAN, NAN, 99.0), (NAN, NAN, 98.0), (NAN, NAN, 97.0)))


class Page(HTMLParser):
    """Tables as rows of texts, and elements by tag."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.tags, self.text = [], [], ""
        self._cell = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self._cell = self.tables[-1][-1]
            self._cell.append("")

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._cell = None

    def handle_data(self, data):
        self.text += data
        if self._cell is not None:
            self._cell[-1] += data


def reported(folder, **how):
    return Page(write_report(folder, **how).read_text())


def interval(values):
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return f"{np.mean(values):.1f} ± {half:.1f}"


@pytest.fixture
def folder(tmp_path):
    return saved(tmp_path / "out", *CONFIT, *FINETUNE, JOINT)


def test_the_table_says_what_was_measured(folder):
    page = reported(folder)
    confit = [interval([getattr(r, m) for r in CONFIT]) for m in ("acc", "fgt", "learning_acc", "bwt")]
    finetune = [", ".join(f"{getattr(r, m):.1f}" for r in FINETUNE) for m in ("acc", "fgt", "learning_acc", "bwt")]
    expected = [
        ["method", "ACC ↑", "FGT ↓", "when learned", "BWT ↑", "numbers a task", "seconds", "seeds"],
        ["joint", "98.0", "-", "-", "-", "1,034", "10", "1"],
        ["confit", *confit, "1,036", "11", "3"],
        ["finetune", *finetune, "1,036", "10", "2"],
    ]
    assert page.tables[0] == expected


def test_what_was_run_is_said_as_in_the_table(folder):
    write_pages(folder)
    page = reported(folder)
    heading = (folder / "table.md").read_text().splitlines()[0].removeprefix("**digits**, ")
    assert heading.startswith("test_byobnet, ")
    assert f"\n{heading}.\n" in page.text


def test_curves_are_average_accuracies_after_each_task(folder):
    page = reported(folder)
    first = [90.0, 91.0, 92.0]
    second = [(88.0 + 95.0) / 2] * 3
    third = [(85.25 - s + 94.0 + s + 97.0) / 3 for s in range(3)]
    expected = [interval(first), interval(second), interval(third)]
    assert page.tables[1][2] == ["confit", *expected]
    assert page.tables[1][1] == ["joint", "-", "-", "98.0"]


def test_matrices_over_seeds(folder):
    page = reported(folder)
    expected = [
        ["", "after 1", "after 2", "after 3"],
        ["task 1", interval([90, 91, 92]), "88.0 ± 0.0", interval([85.25, 84.25, 83.25])],
        ["task 2", "", "95.0 ± 0.0", interval([94, 95, 96])],
        ["task 3", "", "", "97.0 ± 0.0"],
    ]
    assert page.tables[3] == expected


def test_pictures_are_part_of_the_page(folder):
    page = reported(folder)
    pictures = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    assert len(pictures) == 1
    for source in pictures:
        kind, _, data = source.partition(",")
        assert kind == "data:image/png;base64"
        with Image.open(io.BytesIO(base64.b64decode(data))) as picture:
            assert picture.format == "PNG"


def test_every_run_says_how_it_was_made(folder):
    options = {"ewc": {"strength": 3.0}}
    saved(folder, made_up("ewc", 2, CONFIT[2].matrix, device="the device", execution="bf16, graph", options=options))
    page = reported(folder)
    assert page.text.count("confitune run --seeds 3") >= 7
    facts = page.text.partition("ewc, seed 2\n")[2]
    said = "accuracy: 92.1|seconds: 12.0|device: the device|execution: bf16, graph|command: confitune run --seeds 3|"
    said += "options: ewc.strength=3.0|configuration: model=test_byobnet, dataset=digits, method=ewc, seed=2, "
    assert facts.startswith(said.replace("|", ""))
    assert "pipeline=clean, means=window, statistics=running, epochs=10" in facts
    assert "versions: torch 2.9weights: start.pthweights hash: abcfinal hash: def2\n" in facts


def test_the_page_is_one_file_that_loads_nothing(folder):
    page = reported(folder)
    assert not {tag for tag, _ in page.tags} & {"script", "iframe", "object", "embed", "audio", "video", "form"}
    loaded = [v for _, attributes in page.tags for name, v in attributes.items() if name in ("src", "href", "srcset")]
    assert all(source.startswith("data:") for source in loaded)
    assert not re.search(r"@import|url\(", (folder / "report.html").read_text())
    assert {path.name for path in folder.iterdir()} == {"runs.jsonl", "report.html"}


def test_the_same_results_give_the_same_bytes(folder, tmp_path):
    write_report(folder)
    write_report(folder, tmp_path / "again" / "x.html")
    assert (folder / "report.html").read_bytes() == (tmp_path / "again" / "x.html").read_bytes()


# ---- names -----------------------------------------------------------------------------------------------------------


def test_names_are_text_wherever_they_stand(tmp_path):
    name = "<!--<script><img src=x onerror=alert(1)>"  # a folder may be called so
    counts = dict.fromkeys(("train_images", "test_images", "norm_numbers", "head_numbers"), 1)
    task = {"name": EVIL, "classes": [EVIL], **counts}
    evil = dict.fromkeys(("device", "execution", "weights", "weights_sha256", "final_sha256", "command"), EVIL)
    run = made_up(
        name, **evil, tasks=[task, task], config={"model": EVIL, EVIL: EVIL, "method": name}, versions={EVIL: EVIL}
    )
    page = reported(saved(tmp_path, run), title=EVIL)
    assert not any("onerror" in attributes for _, attributes in page.tags)
    assert "script" not in {tag for tag, _ in page.tags}
    assert page.tables[0][1][0] == name
    assert page.tables[3][1][:2] == [EVIL, EVIL]
    assert page.text.count(EVIL) >= 9


def test_a_name_that_is_no_text_is_shown_as_well_as_it_can_be(tmp_path):
    folder = tmp_path / b"caf\xe9".decode(errors="surrogateescape")
    page = reported(saved(folder, made_up()))
    assert "caf?" in page.text


# ---- what may be in a folder -----------------------------------------------------------------------------------------


def test_what_is_not_finished_is_named_and_not_counted(folder):
    done = next(iter(finished_runs(folder)))[:8]
    for run in (f"confit/seed-0-{done}", "finetune/seed-2-00000000", "ewc/seed-0-11111111"):
        (folder / "runs/digits" / run).mkdir(parents=True)
    page = reported(folder)
    said = "Not finished, and not counted: digits/ewc/seed-0-11111111, digits/finetune/seed-2-00000000."
    assert said in page.text
    assert [row[-1] for row in page.tables[0]] == ["seeds", "1", "3", "2"]


def test_what_is_not_a_result_is_left_alone(folder):
    before = reported(folder).text
    (folder / "search.json").write_text("{}")
    saved(folder / "search" / "ewc", made_up("ewc"))
    assert reported(folder).text == before


def test_several_datasets(tmp_path):
    saved(tmp_path, made_up(), made_up("finetune", matrix=((90, 60), (NAN, 90)), dataset="photos"))
    page = reported(tmp_path, title="Both")
    assert "\ndigits\n" in page.text
    assert "\nphotos\n" in page.text


def test_one_seed_has_no_interval(tmp_path):
    page = reported(saved(tmp_path, made_up()))
    assert page.tables[0][1][1:] == ["87.5", "10.0", "92.5", "-10.0", "1,035", "10", "1"]
    assert page.text.count("±") == 1  # in what is explained


def test_joint_alone_has_an_accuracy_and_no_picture(tmp_path):
    page = reported(saved(tmp_path, JOINT))
    assert page.tables[0][1] == ["joint", "98.0", "-", "-", "-", "1,034", "10", "1"]
    assert "img" not in {tag for tag, _ in page.tags}
    assert "nan" not in page.text


def test_runs_of_fewer_tasks_have_a_section_of_their_own(tmp_path):
    page = reported(saved(tmp_path, *CONFIT, made_up("finetune"), made_up(seed=1)))
    assert [page.tables[1][0][-1], page.tables[1][1][0]] == ["after 3", "confit"]
    assert "test_byobnet, 3 tasks" in page.text
    assert "test_byobnet, 2 tasks" in page.text


# ---- what cannot be reported, and the command ------------------------------------------------------------------------


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(ConfituneError, match=rf"no results in {tmp_path}: `confitune run --out .*` writes some"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_results_that_lie_elsewhere_are_pointed_at(tmp_path):
    deep = saved(tmp_path / "search" / "ewc", made_up("ewc"))
    with pytest.raises(ConfituneError, match=re.escape(f"but there is {deep}/runs.jsonl")):
        write_report(tmp_path)


def test_a_broken_result_is_named(folder):
    path = folder / "runs.jsonl"
    path.write_bytes(path.read_bytes() + b"[]\n")
    with pytest.raises(ConfituneError, match=re.escape(f"{path}, line 7 is not a result")):
        write_report(folder)
    assert not (folder / "report.html").exists()


def test_the_page_is_html(folder, tmp_path):
    with pytest.raises(ConfituneError, match=r"report\.md must be an HTML file: choose a name that ends in \.html"):
        write_report(folder, tmp_path / "report.md")


def called(monkeypatch, capsys, *arguments):
    return exit_code(monkeypatch, arguments), capsys.readouterr()


def test_the_command_writes_it_and_says_where(folder, monkeypatch, capsys):
    code, said = called(monkeypatch, capsys, "report", folder)
    assert code == 0
    assert said.out.strip() == f"The report is {folder}/report.html"
    code, _ = called(monkeypatch, capsys, "report", folder, "--out", folder / "x.html", "--title", "My [runs]")
    assert code == 0
    assert "<h1>My [runs]</h1>" in (folder / "x.html").read_text()


def test_the_command_refuses_in_one_message(tmp_path, monkeypatch, capsys):
    code, said = called(monkeypatch, capsys, "report", tmp_path)
    assert code == 2
    assert said.err.startswith("error: no results in")


def test_the_template_is_installed_with_the_package():
    declared = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert '"experiments/reporting/report.html"' in declared
