"""Means and intervals against numpy and scipy; pictures that are there; runs of different settings side by side."""

import io
import math

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from scipy import stats
from typer.testing import CliRunner

from confitune.cli import app
from confitune.errors import ConfituneError
from confitune.experiments.reporting.report import draw_overview, write_pages
from confitune.experiments.reporting.table import compare, rows_of, sections_of, summary_tables
from found import made_up, saved

NAN = math.nan


SEEDS = [made_up(seed=seed, matrix=((90.0 + seed, 80.0 - 2 * seed), (NAN, 95.0 - seed**2))) for seed in range(4)]


def rows_in(page):
    """Cells of the rows of the tables in a page, without the heads."""
    lines = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| method |")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_has_students_intervals_best_first(tmp_path):
    better = made_up("task-bn", matrix=((90.0, 90.0), (NAN, 99.0)))
    saved(tmp_path, *SEEDS, better, made_up("joint", 0, ((NAN, 100.0), (NAN, 100.0))))
    write_pages(tmp_path)
    page = (tmp_path / "table.md").read_text()
    assert page.startswith(
        "**digits**, test_byobnet, 2 tasks, window means, running statistics, 1 to 4 seeds, on cpu\n"
    )
    joint, task_bn, confit = rows_in(page)
    assert joint == ["joint", "100.0", "-", "-", "1,034"]
    assert task_bn == ["task-bn", "94.5", "0.0", "94.5", "1,035"]
    expected = []
    for metric in ("acc", "fgt", "learning_acc"):
        values = [getattr(r, metric) for r in SEEDS]
        low, high = stats.t.interval(0.95, df=3, loc=np.mean(values), scale=stats.sem(values))
        expected.append(f"{np.mean(values):.1f} ± {(high - low) / 2:.1f}")
    assert confit == ["confit", *expected, "1,035"]


def test_of_one_or_two_seeds_the_runs_are_shown(tmp_path):
    saved(tmp_path, made_up(), *(made_up("ewc", seed, ((90.0, 80.0 + seed), (NAN, 90.0))) for seed in range(2)))
    write_pages(tmp_path)
    page = (tmp_path / "table.md").read_text()
    assert rows_in(page) == [
        ["confit", "87.5", "10.0", "92.5", "1,035"],
        ["ewc", "85.0, 85.5", "10.0, 9.0", "90.0, 90.0", "1,035"],
    ]
    assert "±" not in page


def test_the_readme_says_how_the_runs_were_made_and_leaves_others_alone(tmp_path):
    saved(tmp_path, *SEEDS, made_up("finetune"))
    (tmp_path / "overview-digits.png").touch()
    write_pages(tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert "5 runs on digits: finetune, confit." in page
    assert "```sh\nconfitune run --seeds 3\n```" in page  # each command once
    assert "![overview-digits](overview-digits.png)" in page
    write_pages(tmp_path)
    assert (tmp_path / "README.md").read_text() == page
    (tmp_path / "README.md").write_text("# Mine\n")
    write_pages(tmp_path)
    assert (tmp_path / "README.md").read_text() == "# Mine\n"


def test_rows_are_settings_with_their_seeds_in_order(tmp_path):
    results = [*(made_up("confit", seed) for seed in (10, 2, 0)), made_up("finetune"), made_up(dataset="photos")]
    found = [(row.method, row.runs[0].dataset, [run.seed for run in row.runs]) for row in rows_of(results)]
    assert found == [("confit", "digits", [0, 2, 10]), ("finetune", "digits", [0]), ("confit", "photos", [0])]


def test_a_section_for_each_way_to_run_a_method_and_a_row_for_each_of_its_options():
    ewc = [
        made_up("ewc", options={"ewc": {"strength": strength}}, means=None, statistics=None) for strength in (1.0, 9.0)
    ]
    finetune = made_up("finetune", means=None, statistics=None, lr=0.7)  # on its own: nothing to tell apart
    held_out = made_up("ewc", held_out=0.1, options={"ewc": {"strength": 9.0}}, means=None, statistics=None)
    results = [finetune, made_up(), made_up(means="phase"), made_up(precision="bf16"), *ewc, held_out]
    told = [(section.about, section.names) for section in sections_of(results)]
    assert told == [
        (
            "test_byobnet, 2 tasks, window means, running statistics, precision auto, 1 seed, on cpu",
            ["confit", "finetune", "ewc (ewc.strength=1)", "ewc (ewc.strength=9)"],
        ),
        ("test_byobnet, 2 tasks, phase means, running statistics, precision auto, 1 seed, on cpu", ["confit"]),
        ("test_byobnet, 2 tasks, window means, running statistics, precision bf16, 1 seed, on cpu", ["confit"]),
        (
            "test_byobnet, 2 tasks, tested on 10% of the training images, 1 seed, on cpu",
            ["ewc (ewc.strength=9)"],
        ),
    ]


def test_other_weights_are_another_section():
    first, second = sections_of([made_up(), made_up().model_copy(update={"weights_sha256": "xyz"})])
    assert "weights abc" in first.about
    assert "weights xyz" in second.about


def test_nothing_there_is_an_empty_table(tmp_path):
    write_pages(tmp_path)
    assert (tmp_path / "table.md").read_text() == ""


def printed(*tables):
    console = Console(file=io.StringIO(), width=150, force_terminal=False)
    console.print(*tables)
    return console.file.getvalue()


def row_of(text, method):
    (line,) = (line for line in text.splitlines() if f"│ {method} " in line)
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_the_table_shows_mean_and_interval():
    text = printed(*summary_tables([*SEEDS, made_up("joint", 0, ((NAN, 80.0), (NAN, 90.0)))]))
    acc = [r.acc for r in SEEDS]
    half = stats.t.ppf(0.975, 3) * stats.sem(acc)
    row = row_of(text, "confit")
    assert row[1] == f"{np.mean(acc):.1f} ± {half:.1f}"
    assert row[4:] == ["1,035", "12"]  # numbers a task; mean of 10 to 13 seconds, 11.5
    assert row_of(text, "joint") == ["joint", "85.0", "-", "-", "1,034", "10"]
    assert "digits: test_byobnet, 2 tasks, window means, running statistics, 1 to 4 seeds, on cpu" in " ".join(
        text.split()
    )


def test_one_seed_is_shown_without_an_interval():
    row = row_of(printed(*summary_tables([made_up()])), "confit")
    assert row == ["confit", "87.5", "10.0", "92.5", "1,035", "10"]


def test_the_best_method_stands_out():
    better = made_up("finetune", matrix=((90.0, 90.0), (NAN, 95.0)))
    (table,) = summary_tables([made_up("confit"), better])
    assert [row.style for row in table.rows] == ["bold", ""]
    assert row_of(printed(table), "finetune")[1] == "92.5"
    assert printed(table).index("finetune") < printed(table).index("confit")


def test_a_path_with_brackets_is_shown_as_it_is():
    assert "folder:/data/[cats]/x: test_byobnet, 2 tasks" in printed(
        *summary_tables([made_up(dataset="folder:/data/[cats]/x")])
    )
    assert "│ [x].py:Mine " in printed(*summary_tables([made_up("/data/cats/[x].py:Mine")]))


def test_a_picture_is_drawn(tmp_path):
    joint = made_up("joint", 0, ((NAN, 80.0), (NAN, 90.0)))
    saved(tmp_path, *SEEDS, made_up("finetune"), joint)
    path = draw_overview(tmp_path, SEEDS[0])
    assert path == tmp_path / "overview-digits.png"
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 300
        assert len(picture.convert("RGB").getcolors(10**6)) > 20


def test_a_picture_shows_all_methods_of_the_table_that_a_run_stands_in(tmp_path, monkeypatch):
    shown = {}

    def overview(data, title):
        shown.update(methods=list(data), title=title, last=list(data.values())[-1])
        return "a picture"

    monkeypatch.setattr("confitune.experiments.reporting.report.overview_figure", overview)
    monkeypatch.setattr("confitune.experiments.reporting.report.save_figure", lambda figure, path: None)
    saved(tmp_path / "all", made_up("task-bn"), *SEEDS, made_up(lr=0.7), made_up(dataset="photos"))
    draw_overview(tmp_path / "all", SEEDS[1])
    assert (shown["methods"], shown["title"]) == (["task-bn", "confit"], "digits, test_byobnet")
    np.testing.assert_array_equal(shown["last"], np.stack([r.matrix for r in SEEDS]))
    own = ("/home/me/one.py:Mine", "ewc+../one.py:Mine", "/a/two.py:Mine", "/b/two.py:Mine")
    draw_overview(saved(tmp_path / "own", *map(made_up, own)), made_up(own[0]))
    assert shown["methods"] == ["one.py:Mine", "ewc+one.py:Mine", "/a/two.py:Mine", "/b/two.py:Mine"]


def test_joint_alone_gives_no_picture(tmp_path):
    joint = made_up("joint", 0, ((NAN, 80.0), (NAN, 90.0)))
    assert draw_overview(saved(tmp_path, joint), joint) is None


# ---- settings side by side ------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path):
    """Two seeds of finetune, and of confit with two learning rates, each in a folder of its own."""
    none = {"means": None, "statistics": None}
    accs = {("finetune", 0.01): [80, 82], ("confit", 0.01): [90, 91], ("confit", 0.03): [94, 95]}
    for (method, lr), seeds in accs.items():
        for seed, acc in enumerate(seeds):
            config = {"lr": lr, **(none if method == "finetune" else {})}
            if lr == 0.03:
                config["options"] = {"cpr": {"beta": 1 / 3}}
            saved(tmp_path / f"{method}-{lr}", made_up(method, seed, ((acc, acc), (NAN, acc)), **config))
    return tmp_path


def test_seeds_are_one_row_and_only_what_differs_is_shown(runs):
    (comparison,) = compare([runs])
    head, rows = comparison.table()
    assert head == ["method", "settings", "ACC ↑", "FGT ↓", "numbers a task", "seeds"]
    assert [row[:3] for row in rows] == [
        ["confit", "lr=0.03, cpr.beta=0.333333", "94.0, 95.0"],
        ["confit", "lr=0.01", "90.0, 91.0"],
        ["finetune", "lr=0.01", "80.0, 82.0"],
    ]
    assert [row[-1] for row in rows] == ["2"] * 3
    about = "test_byobnet, 2 tasks, window means, running statistics, 2 seeds, on cpu"
    assert comparison.markdown().startswith(f"**digits**, {about}\n\n| method | settings |")


def test_what_a_method_is_always_run_with_is_noted_below(runs):
    saved(runs, made_up("best", optimizer="adamw", warmup=0.1), made_up("ewc", options={"ewc": {"strength": 7.0}}))
    (comparison,) = compare([runs])
    assert comparison.note == "best: optimizer=adamw, warmup=0.1"
    assert comparison.markdown().endswith("|\n\nbest: optimizer=adamw, warmup=0.1\n")
    assert "best: optimizer=adamw, warmup=0.1" in printed(comparison.terminal())


def test_networks_and_numbers_of_tasks_that_differ_are_all_named(tmp_path):
    long = made_up("confit", 0, ((90.0, 90.0, 90.0), (NAN, 90.0, 90.0), (NAN, NAN, 90.0)), model="resnet18")
    (comparison,) = compare([saved(tmp_path, made_up(), long)])
    assert comparison.about.startswith("resnet18 and test_byobnet, 3 and 2 tasks, ")
    assert [row[1] for row in comparison.table()[1]] == ["model=resnet18, tasks=3", "model=test_byobnet, tasks=2"]


def test_what_was_tested_on_other_images_is_not_in_one_table(tmp_path):
    first, second = compare([saved(tmp_path, made_up(), made_up(held_out=0.1))])
    assert "tested on 10% of the training images" in second.about
    assert "tested" not in first.about


def test_a_result_is_counted_once(runs):
    assert compare([runs, runs / "confit-0.01"]) == compare([runs])


def test_nothing_to_compare_is_said(tmp_path):
    with pytest.raises(ConfituneError, match="no results below"):
        compare([tmp_path])


def test_the_command_prints_and_writes(runs, tmp_path):
    out = tmp_path / "page.md"
    said = CliRunner().invoke(app, ["compare", str(runs), "--out", str(out)])
    assert said.exit_code == 0, said.output
    assert out.read_text() == said.stdout == compare([runs])[0].markdown()


def test_in_a_terminal_it_is_a_table(runs, monkeypatch):
    saved(runs, made_up("best", optimizer="adamw", warmup=0.1, label_smoothing=0.1, lr_schedule="cosine"))
    console = Console(force_terminal=True, width=80, file=io.StringIO(), color_system=None)
    monkeypatch.setattr("confitune.cli.training.Console", lambda: console)
    assert CliRunner().invoke(app, ["compare", str(runs)]).exit_code == 0
    text = console.file.getvalue()
    assert row_of(text, "finetune") == ["finetune", "lr=0.01", "80.0, 82.0", "0.0, 0.0", "1,035", "2"]
    assert sum(line.startswith("│") for line in text.splitlines()) <= 5  # no cell is squeezed into many lines
