"""Means and intervals against numpy and scipy; pictures that are there; runs of different settings side by side."""

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from scipy import stats
from typer.testing import CliRunner

from confitune.cli import app
from confitune.engine import RunResult
from confitune.engine.result import summary_of
from confitune.errors import ConfituneError
from confitune.experiments import (
    collect_results,
    comparison_page,
    draw_pictures,
    run_folder,
    summary_table,
    write_summary,
)

NAN = math.nan
ROOT = Path(__file__).parents[3]


def result(method="confit", seed=0, matrix=((90.0, 80.0), (NAN, 95.0)), dataset="digits"):
    matrix = np.array(matrix)
    images = {"classes": ["cat", "dog"], "train_images": 7, "test_images": 2}
    tasks = [{"name": f"t{i}", **images, "norm_numbers": 1000 + i, "head_numbers": 34} for i in range(len(matrix))]
    return RunResult(
        dataset=dataset,
        method=method,
        seed=seed,
        **summary_of(matrix),
        tasks=tasks,
        config={"model": "test_byobnet", "seed": seed, "lr": 0.01},
        versions={"torch": "2"},
        device="cpu",
        weights="start.pth",
        weights_sha256="abc",
        final_sha256="def",
        seconds=10.0 + seed,
        images_per_second=100.0,
        command="confitune run",
    )


def saved(out, *results):
    for r in results:
        folder = run_folder(out, r.dataset, r.method, r.seed)
        folder.mkdir(parents=True, exist_ok=True)
        r.save(folder / "result.json")


SEEDS = [result(seed=seed, matrix=((90.0 + seed, 80.0 - 2 * seed), (NAN, 95.0 - seed**2))) for seed in range(4)]


def test_mean_and_interval_are_students(tmp_path):
    saved(tmp_path, *SEEDS)
    summary = write_summary(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    entry = summary["digits"]["confit"]
    assert entry["seeds"] == [0, 1, 2, 3]
    for metric in ("acc", "fgt", "learning_acc", "bwt"):
        values = [getattr(r, metric) for r in SEEDS]
        assert entry[metric]["values"] == values
        assert entry[metric]["mean"] == pytest.approx(np.mean(values))
        low, high = stats.t.interval(0.95, df=3, loc=np.mean(values), scale=stats.sem(values))
        assert entry[metric]["mean"] - entry[metric]["ci95"] == pytest.approx(low)
        assert entry[metric]["mean"] + entry[metric]["ci95"] == pytest.approx(high)
    assert entry["acc"]["values"][1] == (78 + 94) / 2
    assert entry["seconds"] == [10.0, 11.0, 12.0, 13.0]
    assert entry["numbers_per_task"] == [1034, 1035]
    assert (entry["config"]["model"], entry["config"]["pipeline"]) == ("test_byobnet", "clean")  # said, and left out
    assert "seed" not in entry["config"]  # it is not one of all of them
    assert (entry["weights"], entry["weights_sha256"], entry["command"]) == ("start.pth", "abc", "confitune run")


def test_the_markdown_table_says_what_the_json_does_best_first(tmp_path):
    better = result("task-bn", matrix=((90.0, 90.0), (NAN, 99.0)))
    saved(tmp_path, *SEEDS, better, result("joint", 0, ((NAN, 100.0), (NAN, 100.0))))
    confit = write_summary(tmp_path)["digits"]["confit"]
    rows = [line for line in (tmp_path / "summary.md").read_text().splitlines() if line.startswith("| ")][1:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in cells] == ["joint", "task-bn", "confit"]
    assert cells[0] == ["joint", "100.0", "-", "-", "1,035"]
    assert cells[1] == ["task-bn", "94.5", "0.0", "94.5", "1,035"]
    shown = [
        f"{confit[metric]['mean']:.1f} ± {confit[metric]['ci95']:.1f}" for metric in ("acc", "fgt", "learning_acc")
    ]
    assert cells[2] == ["confit", *shown, "1,035"]


def test_one_seed_has_no_interval(tmp_path):
    saved(tmp_path, result())
    entry = write_summary(tmp_path)["digits"]["confit"]
    assert entry["acc"] == {"mean": 87.5, "ci95": None, "values": [87.5]}
    assert "NaN" not in (tmp_path / "summary.json").read_text()


def test_joint_has_an_accuracy_and_no_forgetting(tmp_path):
    saved(tmp_path, *(result("joint", seed, ((NAN, 80.0 + seed), (NAN, 90.0))) for seed in range(2)))
    entry = write_summary(tmp_path)["digits"]["joint"]
    assert entry["acc"]["values"] == [85.0, 85.5]
    assert (entry["fgt"], entry["learning_acc"], entry["bwt"]) == (None, None, None)


def test_results_are_collected_by_dataset_method_and_seed(tmp_path):
    saved(tmp_path, *(result("confit", seed) for seed in (10, 2, 0)), result("finetune"), result(dataset="photos"))
    found = collect_results(tmp_path)
    assert {dataset: {m: [r.seed for r in rs] for m, rs in methods.items()} for dataset, methods in found.items()} == {
        "digits": {"confit": [0, 2, 10], "finetune": [0]},
        "photos": {"confit": [0]},
    }


def test_nothing_there_is_an_empty_summary(tmp_path):
    assert write_summary(tmp_path) == {}


def printed(table):
    console = Console(file=io.StringIO(), width=150, force_terminal=False)
    console.print(table)
    return console.file.getvalue()


def row_of(text, method):
    (line,) = (line for line in text.splitlines() if f"│ {method} " in line)
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_the_table_shows_mean_and_interval():
    text = printed(summary_table([*SEEDS, result("joint", 0, ((NAN, 80.0), (NAN, 90.0)))]))
    acc = [r.acc for r in SEEDS]
    half = stats.t.ppf(0.975, 3) * stats.sem(acc)
    row = row_of(text, "confit")
    assert row[1] == f"{np.mean(acc):.1f} ± {half:.1f}"
    assert row[4:] == ["1,035", "12"]  # numbers a task; mean of 10 to 13 seconds, 11.5
    assert row_of(text, "joint") == ["joint", "85.0", "-", "-", "1,035", "10"]
    assert "digits: 2 tasks, test_byobnet, 4 seed(s)" in text


def test_one_seed_is_shown_without_an_interval():
    row = row_of(printed(summary_table([result()])), "confit")
    assert row == ["confit", "87.5", "10.0", "92.5", "1,035", "10"]


def test_the_best_method_stands_out():
    better = result("finetune", matrix=((90.0, 90.0), (NAN, 95.0)))
    table = summary_table([result("confit"), better])
    assert [row.style for row in table.rows] == ["bold", ""]
    assert row_of(printed(table), "finetune")[1] == "92.5"
    assert printed(table).index("finetune") < printed(table).index("confit")


def test_a_path_with_brackets_is_shown_as_it_is():
    assert "folder:/data/[cats]/x: 2 tasks" in printed(summary_table([result(dataset="folder:/data/[cats]/x")]))
    assert "/data/[cats]/x.py:Mine" in printed(summary_table([result("/data/[cats]/x.py:Mine")]))


def test_pictures_are_drawn_of_every_dataset(tmp_path):
    joint = result("joint", 0, ((NAN, 80.0), (NAN, 90.0)))
    saved(tmp_path, *SEEDS, result("finetune"), joint, result(dataset="photos"))
    drawn = draw_pictures(tmp_path)
    assert drawn == [tmp_path / dataset / "overview.png" for dataset in ("digits", "photos")]
    for path in drawn:
        with Image.open(path) as picture:
            assert picture.format == "PNG"
            assert min(picture.size) > 300
            assert len(picture.convert("RGB").getcolors(10**6)) > 20


def test_pictures_of_chosen_methods_in_their_order(tmp_path, monkeypatch):
    saved(tmp_path, *SEEDS, result("finetune"), result("task-bn"))
    shown = {}

    def overview(data, title):
        shown.update(methods=list(data), title=title, first=next(iter(data.values())))
        return "a picture"

    monkeypatch.setattr("confitune.experiments.reporting.table.overview_figure", overview)
    monkeypatch.setattr("confitune.experiments.reporting.table.save_figure", lambda figure, path: None)
    draw_pictures(tmp_path, ("task-bn", "confit", "not run"))
    assert (shown["methods"], shown["title"]) == (["task-bn", "confit"], "digits, test_byobnet")
    draw_pictures(tmp_path, ("confit",))
    np.testing.assert_array_equal(shown["first"], np.stack([r.matrix for r in SEEDS]))
    own = ("/home/me/one.py:Mine", "ewc+../one.py:Mine", "/a/two.py:Mine", "/b/two.py:Mine")
    saved(tmp_path, *map(result, own))
    draw_pictures(tmp_path, own)
    assert shown["methods"] == ["one.py:Mine", "ewc+one.py:Mine", "a-two.py-Mine", "b-two.py-Mine"]


def test_joint_alone_gives_no_picture(tmp_path):
    saved(tmp_path, result("joint", 0, ((NAN, 80.0), (NAN, 90.0))))
    assert draw_pictures(tmp_path) == []


# ---- settings side by side ------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path):
    """Two seeds of finetune and of confit with two learning rates, from a real result with other numbers in it."""
    real = json.loads(next((ROOT / "results/photos/photos/confit").rglob("result.json")).read_text())
    accs = {("finetune", 0.01): [80, 82], ("confit", 0.01): [90, 91], ("confit", 0.03): [94, 95]}
    for (method, lr), seeds in accs.items():
        for seed, acc in enumerate(seeds):
            config = {**real["config"], "method": method, "lr": lr, "seed": seed, "options": {}}
            if lr == 0.03:
                config["options"] = {"cpr": {"beta": 1 / 3}}
            matrix = [[float(acc), float(acc)], [None, float(acc)]]
            values = {"acc": acc, "fgt": 0, "learning_acc": acc, "bwt": 0, "accuracy_matrix": matrix}
            tasks = real["tasks"][:2]
            result = {**real, **values, "tasks": tasks, "method": method, "seed": seed, "config": config}
            folder = tmp_path / f"{method}-{lr}" / f"seed-{seed}"
            folder.mkdir(parents=True)
            (folder / "result.json").write_text(json.dumps(result))
    return tmp_path


def test_seeds_are_one_row_and_only_what_differs_is_shown(runs):
    page = comparison_page([runs])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    assert rows[0] == [
        *("method", "lr", "cpr.beta"),
        *("ACC ↑", "FGT ↓", "when learned", "numbers a task", "seeds"),
    ]
    settings = [["confit", "0.03", "0.333"], ["confit", "0.01", ""], ["finetune", "0.01", ""]]
    assert [row[:3] for row in rows[2:]] == settings
    assert rows[2][3] == "94.5 ± 6.4"
    assert rows[2][-1] == "2"
    assert page.startswith("**photos**, tf_efficientnet_lite0, 2 tasks, on ")


def test_a_result_is_counted_once(runs):
    assert comparison_page([runs, runs / "confit-0.01"]) == comparison_page([runs])


def test_nothing_to_compare_is_said(tmp_path):
    with pytest.raises(ConfituneError, match="no results below"):
        comparison_page([tmp_path])


def test_the_command_prints_and_writes(runs, tmp_path):
    out = tmp_path / "page.md"
    result = CliRunner().invoke(app, ["compare", str(runs), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert out.read_text() == result.stdout == comparison_page([runs])
