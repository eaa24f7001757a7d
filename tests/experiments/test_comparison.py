"""Runs of different settings side by side."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from confitune.cli import app
from confitune.errors import ConfituneError
from confitune.experiments import comparison_page
from confitune.experiments.comparison import compare

ROOT = Path(__file__).parents[2]


@pytest.fixture
def runs(tmp_path):
    """Two seeds of finetune and of confit with two learning rates, from a real result with other numbers in it."""
    real = json.loads(next((ROOT / "results/beyond/confit-photos").rglob("result.json")).read_text())
    accs = {("finetune", 0.01): [80, 82], ("confit", 0.01): [90, 91], ("confit", 0.03): [94, 95]}
    for (method, lr), seeds in accs.items():
        for seed, acc in enumerate(seeds):
            config = {**real["config"], "method": method, "lr": lr, "seed": seed, "options": {}}
            if lr == 0.03:
                config["options"] = {"conv-step": {"factor": 1 / 3}}
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
        *("method", "conv-step.factor", "lr"),
        *("ACC ↑", "FGT ↓", "when learned", "numbers a task", "seeds"),
    ]
    settings = [["confit", "0.333", "0.03"], ["confit", "", "0.01"], ["finetune", "", "0.01"]]
    assert [row[:3] for row in rows[2:]] == settings
    assert rows[2][3] == "94.5 ± 6.4"
    assert rows[2][-1] == "2"
    assert page.startswith("**photos**, tf_efficientnet_lite0, 2 tasks, on ")


def test_best_first_within_a_dataset(runs):
    (settings,) = compare([runs]).values()
    assert [setting.acc for setting in settings] == [94.5, 90.5, 81]


def test_a_result_is_counted_once(runs):
    twice = compare([runs, runs / "confit-0.01"])
    assert {len(setting.results) for setting in twice["photos"]} == {2}


def test_nothing_to_compare_is_said(tmp_path):
    with pytest.raises(ConfituneError, match="no results below"):
        compare([tmp_path])


def test_the_command_prints_and_writes(runs, tmp_path):
    out = tmp_path / "page.md"
    result = CliRunner().invoke(app, ["compare", str(runs), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert out.read_text() == result.stdout == comparison_page([runs])


def test_the_page_on_what_was_tried_is_what_the_program_says():
    results = ROOT / "results"
    folders = [results / "beyond", *results.glob("*/*/best"), *results.glob("*-follow/runs/*/*/confit")]
    assert (ROOT / "results/beyond/comparison.md").read_text() == comparison_page(folders)
