"""The report's numbers against numpy and scipy, whatever is in the folder and whatever things are called."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from confitune import cli
from confitune.engine import RunResult
from confitune.engine.result import summary_of
from confitune.errors import ConfituneError
from confitune.experiments import write_report, write_summary
from confitune.experiments.report.data import DatasetRuns, MethodRuns, Report
from confitune.experiments.report.page import charts_json

NAN = math.nan
EVIL = "</script><img src=x onerror=alert(1)>"


def result(method="confit", seed=0, matrix=((90.0, 80.0), (NAN, 95.0)), **changed):
    matrix = np.array(matrix, dtype=float)
    images = {"classes": ["cat", "dog"], "train_images": 7, "test_images": 2}
    tasks = [
        {"name": f"t{i}", **images, "norm_numbers": 1000 + i, "head_numbers": 34}
        for i in range(1 if method == "joint" else len(matrix))
    ]
    values = {
        "dataset": "digits",
        "method": method,
        "seed": seed,
        **summary_of(matrix),
        "tasks": tasks,
        "config": {"model": "test_byobnet", "seed": seed, "lr": 0.01, "options": {"ewc": {"strength": 3.0}}},
        "versions": {"torch": "2.9"},
        "device": "the device",
        "execution": "bf16, graph",
        "weights": "start.pth",
        "weights_sha256": "abc",
        "final_sha256": f"def{seed}",
        "seconds": 10.0 + seed,
        "images_per_second": 100.0,
        "command": "confitune run --seeds 3",
    }
    return RunResult(**{**values, **changed})


def saved(out, *results):
    for r in results:
        folder = out / r.dataset / r.method / f"seed-{r.seed}"
        folder.mkdir(parents=True, exist_ok=True)
        r.save(folder / "result.json")
    return out


CONFIT = [
    result(seed=s, matrix=((90.0 + s, 88.0, 85.25 - s), (NAN, 95.0, 94.0 + s), (NAN, NAN, 97.0))) for s in range(3)
]
FINETUNE = [
    result("finetune", s, ((92.0, 70.0, 60.0 + s), (NAN, 96.0, 71.5), (NAN, NAN, 98.0)), tasks=CONFIT[0].tasks)
    for s in range(2)
]
JOINT = result("joint", 0, ((NAN, NAN, 99.0), (NAN, NAN, 98.0), (NAN, NAN, 97.0)))


class Page(HTMLParser):
    """Tables as rows of texts, elements by tag, and the data of the pictures."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.tags, self.data, self.text = [], [], "", ""
        self._cell = self._script = None
        self.feed(text)
        self.charts = json.loads(self.data)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._script = dict(attrs).get("id", "other") if tag in ("script", "style") else None
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self._cell = self.tables[-1][-1]
            self._cell.append("")

    def handle_endtag(self, tag):
        self._script = None
        if tag in ("td", "th"):
            self._cell = None

    def handle_data(self, data):
        if self._script == "data":
            self.data += data
        elif self._script is None:
            self.text += data
            if self._cell is not None:
                self._cell[-1] += data


def reported(folder, **how):
    page, twin = write_report(folder, **how)
    return Page(page.read_text()), twin.read_text()


def markdown_table(text, heading=None):
    """The first table, or the first after a heading."""
    lines = text.partition(f"# {heading}\n")[2].splitlines() if heading else text.splitlines()
    found = []
    for line in lines:
        if line.startswith("|"):
            found.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif found:
            break
    return [row for index, row in enumerate(found) if index != 1]


def interval(values):
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return f"{np.mean(values):.1f} ± {half:.1f}"


@pytest.fixture
def folder(tmp_path):
    return saved(tmp_path / "out", *CONFIT, *FINETUNE, JOINT)


def test_the_table_says_what_was_measured_in_the_page_and_in_markdown(folder):
    page, markdown = reported(folder)
    confit = [interval([getattr(r, m) for r in CONFIT]) for m in ("acc", "fgt", "learning_acc", "bwt")]
    finetune = [interval([getattr(r, m) for r in FINETUNE]) for m in ("acc", "fgt", "learning_acc", "bwt")]
    head = ["method", "ACC ↑", "FGT ↓", "when learned ↑", "BWT ↑", "numbers a task", "seconds", "seeds"]
    rows = [
        ["98.0", "-", "-", "-", "1,034", "10.0", "1"],
        [*confit, "1,036", interval([10, 11, 12]), "3"],
        [*finetune, "1,036", interval([10, 11]), "2"],
    ]
    assert page.tables[0] == [
        head,
        ["joint ★ best ACC", *rows[0]],
        ["confit", *rows[1]],
        ["finetune", *rows[2]],
    ]
    assert markdown_table(markdown) == [
        head,
        ["**joint** (best ACC)", *rows[0]],
        ["confit", *rows[1]],
        ["finetune", *rows[2]],
    ]


def test_the_table_is_the_summarys(folder):
    summary = write_summary(folder)["digits"]
    page, markdown = reported(folder)
    values = [attributes["data-value"] for tag, attributes in page.tags if tag == "td" and "data-value" in attributes]
    rows = np.array(values).reshape(3, 7)
    for row, method in zip(rows, ("joint", "confit", "finetune"), strict=True):
        for text, metric in zip(row, ("acc", "fgt", "learning_acc", "bwt"), strict=False):
            assert text == ("" if summary[method][metric] is None else repr(summary[method][metric]["mean"]))
    heading = (folder / "summary.md").read_text().splitlines()[0].removeprefix("**digits**, ")
    assert heading.startswith("test_byobnet, ")
    assert f"\n{heading}\n" in page.text
    assert f"\n{heading}.\n" in markdown


def test_equal_accuracies_are_both_the_best(tmp_path):
    page, markdown = reported(saved(tmp_path, result("a"), result("b"), result("c", matrix=((90, 70), (NAN, 90)))))
    assert [row[0] for row in page.tables[0]] == ["method", "a ★ best ACC", "b ★ best ACC", "c"]
    assert markdown.count("(best ACC)") == 2


def test_curves_are_average_accuracies_after_each_task(folder):
    page, markdown = reported(folder)
    first = [90.0, 91.0, 92.0]
    second = [(88.0 + 95.0) / 2] * 3
    third = [(85.25 - s + 94.0 + s + 97.0) / 3 for s in range(3)]
    expected = [interval(first), interval(second), interval(third)]
    assert page.tables[2][2] == ["confit", *expected]
    assert page.tables[2][1] == ["joint", "-", "-", "98.0"]
    assert markdown_table(markdown, "Average accuracy on the tasks learned so far (%)")[2] == ["confit", *expected]
    curve = page.charts["datasets"][0]["methods"][1]["curve"]
    assert curve["mean"] == pytest.approx([91.0, 91.5, 92.0833], abs=1e-4)
    half = stats.t.ppf(0.975, 2) * stats.sem(first)
    assert curve["half"] == pytest.approx([half, 0, 0], abs=1e-4)
    assert curve["texts"] == expected
    assert page.charts["datasets"][0]["methods"][0]["curve"]["mean"] == [None, None, 98.0]


def test_what_each_task_lost_is_what_lies_between_learning_it_and_the_end(folder):
    page, markdown = reported(folder)
    lost = [interval([4.75, 6.75, 8.75]), interval([1.0, 0.0, -1.0]), "0.0 ± 0.0"]
    assert page.tables[3][2] == ["confit", *lost]
    caption = "What each task lost between the moment it was learned and the end (percentage points)"
    assert markdown_table(markdown, caption)[2] == ["confit", *lost]
    tasks = page.charts["datasets"][0]["methods"][1]["tasks"]
    assert (tasks["learned"], tasks["kept"]) == ([91.0, 95.0, 97.0], [84.25, 95.0, 97.0])
    assert tasks["texts"][0] == {
        "learned": interval([90, 91, 92]),
        "kept": interval([85.25, 84.25, 83.25]),
        "lost": lost[0],
    }


def test_matrices_of_every_seed_and_of_their_mean(folder):
    page, markdown = reported(folder)
    views = page.charts["datasets"][0]["methods"][1]["views"]
    assert set(views) == {"mean", "0", "1", "2"}
    # 84.25 is rounded as everywhere else here, to even.
    assert views["mean"]["cells"] == [[91.0, 88.0, 84.2], [None, 95.0, 95.0], [None, None, 97.0]]
    assert views["2"]["cells"] == [[92.0, 88.0, 83.2], [None, 95.0, 96.0], [None, None, 97.0]]
    assert views["2"]["averages"] == ["92.0", "91.5", "92.1"]
    assert markdown_table(markdown, "confit") == [
        ["", "after 1", "after 2", "after 3"],
        ["task 1", "91.0", "88.0", "84.2"],
        ["task 2", "", "95.0", "95.0"],
        ["task 3", "", "", "97.0"],
    ]


def test_storage_is_what_all_tasks_added(folder):
    page, markdown = reported(folder)
    stored = {method["name"]: method["stored"] for method in page.charts["datasets"][0]["methods"]}
    assert stored == {"joint": 1034, "confit": 3 * 1034 + 3, "finetune": 3 * 1034 + 3}
    assert page.tables[4][2] == ["confit", "3,105", "1,036"]
    assert markdown_table(markdown, "Numbers stored beside the shared network")[2] == ["confit", "3,105", "1,036"]


def test_every_run_says_how_it_was_made(folder):
    page, markdown = reported(folder)
    for text in (page.text, markdown):
        for seed in range(3):
            assert f"def{seed}" in text
        assert text.count("confitune run --seeds 3") >= 6
    facts = markdown.partition("#### confit, seed 2\n\n")[2].partition("\n\n")[0].splitlines()
    said, _, left_out = facts[6].partition(", dataset=photos, ")
    assert "pipeline=clean, means=window, statistics=running, epochs=10, batch_size=32" in left_out
    assert [*facts[:6], said, *facts[7:]] == [
        "- accuracy: 92.1",
        "- seconds: 12.0",
        "- device: the device",
        "- execution: bf16, graph",
        "- command: confitune run --seeds 3",
        "- options: ewc.strength=3.0",
        "- configuration: model=test_byobnet, seed=2, lr=0.01",
        "- versions: torch 2.9",
        "- weights: start.pth",
        "- weights hash: abc",
        "- final hash: def2",
    ]
    terms = [line.removeprefix("- ").replace(": ", "", 1) for line in facts]
    assert "".join(terms).replace("\\", "") in page.text  # which needs none of Markdown's backslashes


def test_the_page_is_one_file_that_loads_nothing(folder):
    page, _ = reported(folder)
    assert not {tag for tag, _ in page.tags} & {"img", "iframe", "object", "embed", "audio", "video", "form"}
    loaded = [v for _, attributes in page.tags for name, v in attributes.items() if name in ("src", "href", "srcset")]
    assert loaded == ["data:,"]
    text = (folder / "report.html").read_text()
    assert "url(#" in text  # a clip path of the page's own
    assert not re.search(r"@import|url\((?!#)|fetch\(|XMLHttpRequest|innerHTML", text)
    assert [path.name for path in folder.iterdir() if path.is_file()] == ["report.html", "report.md"]


def test_the_same_results_give_the_same_bytes(folder, tmp_path):
    write_report(folder)
    write_report(folder, tmp_path / "again" / "x.html")
    assert (folder / "report.html").read_bytes() == (tmp_path / "again" / "x.html").read_bytes()
    assert (folder / "report.md").read_bytes() == (tmp_path / "again" / "x.md").read_bytes()


# ---- names -----------------------------------------------------------------------------------------------------------


def test_names_are_text_wherever_they_stand(tmp_path):
    name = "<!--<script><img src=x onerror=alert(1)>"  # a folder may be called so
    counts = dict.fromkeys(("train_images", "test_images", "norm_numbers", "head_numbers"), 1)
    task = {"name": EVIL, "classes": [EVIL], **counts}
    evil = dict.fromkeys(("device", "execution", "weights", "weights_sha256", "final_sha256", "command"), EVIL)
    run = result(name, **evil, tasks=[task, task], config={"model": EVIL, EVIL: EVIL}, versions={EVIL: EVIL})
    page, markdown = reported(saved(tmp_path, run), title=EVIL)
    assert "img" not in {tag for tag, _ in page.tags}
    assert len([tag for tag, _ in page.tags if tag == "script"]) == 2
    assert page.charts["datasets"][0]["methods"][0]["name"] == name
    assert page.tables[0][1][0] == f"{name} ★ best ACC"
    assert page.tables[1][1][:2] == [EVIL, EVIL]
    assert page.text.count(EVIL) >= 10
    assert "<img" not in markdown
    assert "<script" not in markdown


def test_the_data_cannot_end_its_element():
    data = DatasetRuns(EVIL, [MethodRuns(f"{EVIL}\u2028&", CONFIT)], [])
    text = charts_json(Report("title", [data]))
    assert not set("<>&\u2028") & set(text)
    read = json.loads(text)["datasets"][0]
    assert (read["name"], read["methods"][0]["name"]) == (EVIL, f"{EVIL}\u2028&")


def test_markdown_tables_keep_their_columns(tmp_path):
    _, markdown = reported(saved(tmp_path, result("a|b"), result("*c* `d` [e](f)")))
    rows = markdown_table(markdown)
    assert {len(row) for row in rows} == {8}
    assert [row[0] for row in rows[1:]] == [r"**\*c\* \`d\` \[e\](f)** (best ACC)", r"**a\|b** (best ACC)"]


def test_a_name_that_is_no_text_is_shown_as_well_as_it_can_be(tmp_path):
    folder = tmp_path / b"caf\xe9".decode(errors="surrogateescape")
    page, _ = reported(saved(folder, result()))
    assert "caf?" in page.text


# ---- what may be in a folder -----------------------------------------------------------------------------------------


def test_what_is_not_finished_is_named_and_not_counted(folder):
    (folder / "digits" / "finetune" / "seed-2").mkdir()
    (folder / "digits" / "ewc" / "seed-0").mkdir(parents=True)
    (folder / "digits" / "ewc" / "seed-0" / "checkpoint.pt").write_bytes(b"half")
    page, markdown = reported(folder)
    said = "Not finished, and not counted: ewc/seed-0, finetune/seed-2."
    assert said in page.text
    assert said in markdown
    assert [row[-1] for row in page.tables[0]] == ["seeds", "1", "3", "2"]


def test_what_is_not_a_result_is_left_alone(folder):
    before = reported(folder)[1]
    (folder / "search.json").write_text("{}")
    (folder / "digits" / "search.json").write_text("{}")
    saved(folder / "grid" / "ewc.strength=1", result("ewc"))
    assert reported(folder)[1] == before


def test_several_datasets(tmp_path):
    saved(tmp_path, result(), result("finetune", matrix=((90, 60), (NAN, 90)), dataset="photos"))
    page, markdown = reported(tmp_path, title="Both")
    assert markdown.startswith("# Both\n\n2 runs, 2 datasets, 2 methods.\n\n## digits\n")
    assert "\n## photos\n" in markdown
    assert [data["name"] for data in page.charts["datasets"]] == ["digits", "photos"]
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    places = [attributes["id"] for tag, attributes in page.tags if tag == "section"]
    assert links == [f"#{place}" for place in places] == ["#dataset-0", "#dataset-1"]


def test_one_seed_has_no_interval(tmp_path):
    page, markdown = reported(saved(tmp_path, result()))
    assert page.tables[0][1][1:] == ["87.5", "10.0", "92.5", "-10.0", "1,035", "10.0", "1"]
    assert page.charts["datasets"][0]["methods"][0]["curve"]["half"] == [None, None]
    assert "±" not in markdown.partition("Mean ± 95%")[0] + markdown.partition("Mean ± 95%")[2]


def test_joint_alone_has_an_accuracy_and_no_forgetting(tmp_path):
    page, markdown = reported(saved(tmp_path, JOINT))
    assert page.tables[0][1] == ["joint ★ best ACC", "98.0", "-", "-", "-", "1,034", "10.0", "1"]
    assert page.charts["datasets"][0]["methods"][0]["tasks"]["learned"] == [None, None, 97.0]
    assert "NaN" not in page.data
    assert "nan" not in markdown


def test_twenty_tasks(tmp_path):
    matrix = np.where(np.tri(20, dtype=bool).T, 100.0 - np.arange(20)[:, None], NAN)
    page, markdown = reported(saved(tmp_path, result(matrix=matrix)))
    cells = page.charts["datasets"][0]["methods"][0]["views"]["mean"]["cells"]
    assert [cells[i][19] for i in range(20)] == [100.0 - i for i in range(20)]
    assert len([value for row in cells for value in row if value is not None]) == 210
    table = markdown_table(markdown, "Average accuracy on the tasks learned so far (%)")
    assert table[1] == ["confit", *(f"{100 - k / 2:.1f}" for k in range(20))]


def test_methods_may_have_learned_fewer_tasks(tmp_path):
    page, markdown = reported(saved(tmp_path, *CONFIT, result("finetune")))
    assert page.charts["datasets"][0]["tasks"] == 3
    assert page.tables[2][2] == ["finetune", "90.0", "87.5", "-"]
    assert {len(row) for row in markdown_table(markdown, "Average accuracy on the tasks learned so far (%)")} == {4}


# ---- what cannot be reported, and the command ------------------------------------------------------------------------


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(ConfituneError, match=rf"no results in {tmp_path}: `confitune run --out .*` writes them as"):
        write_report(tmp_path)
    with pytest.raises(ConfituneError, match=r"there is no folder .*nowhere"):
        write_report(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_results_that_lie_elsewhere_are_pointed_at(tmp_path):
    deep = tmp_path / "retrained" / "ewc.strength=1"
    saved(deep, result("ewc"))
    with pytest.raises(ConfituneError, match=re.escape(f"but there are some in {deep}; name that folder")):
        write_report(tmp_path)
    with pytest.raises(ConfituneError, match="name the folder that holds <dataset>/<method>/seed-<k>"):
        write_report(deep / "digits")


def test_a_broken_result_is_named(folder):
    broken = folder / "digits" / "confit" / "seed-1" / "result.json"
    broken.write_text("{}")
    with pytest.raises(ConfituneError, match=re.escape(f"{broken} is not a result")):
        write_report(folder)
    assert not (folder / "report.html").exists()


def test_seeds_of_different_experiments_have_no_mean(tmp_path):
    saved(tmp_path, CONFIT[0], result(seed=1))
    with pytest.raises(ConfituneError, match=r"confit: its seeds differ in their number of tasks \(\[2, 3\]\)"):
        write_report(tmp_path)


def test_the_page_is_html_and_its_place_can_be_written(folder, tmp_path):
    with pytest.raises(ConfituneError, match=r"report\.md is to be an HTML page: give it a name that ends in \.html"):
        write_report(folder, tmp_path / "report.md")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfituneError, match="the report cannot be written to"):
        write_report(folder, tmp_path / "file" / "report.html")


def called(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["confitune", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code or 0, capsys.readouterr()


def test_the_command_writes_both_and_says_where(folder, monkeypatch, capsys):
    code, said = called(monkeypatch, capsys, "report", folder)
    assert code == 0
    assert said.out.strip() == f"The report is {folder}/report.html, as Markdown {folder}/report.md"
    assert (folder / "report.md").read_text().startswith("# out\n\n6 runs, 1 dataset, 3 methods.\n")
    code, _ = called(monkeypatch, capsys, "report", folder, "--out", folder / "x.html", "--title", "My [runs]")
    assert code == 0
    assert "<h1>My [runs]</h1>" in (folder / "x.html").read_text()


def test_the_command_refuses_in_one_message(tmp_path, monkeypatch, capsys):
    code, said = called(monkeypatch, capsys, "report", tmp_path)
    assert code == 2
    assert said.err.startswith("error: no results in")


def test_templates_are_installed_with_the_package():
    declared = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    folder = Path(cli.__file__).parents[1] / "experiments" / "report"
    kinds = {path.suffix for path in folder.iterdir() if path.is_file()} - {".py"}
    assert kinds == {".html", ".css", ".js"}
    for kind in kinds:
        assert f'"experiments/report/*{kind}"' in declared
