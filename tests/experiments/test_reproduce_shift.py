"""The page about representational shift: what it shows of moments, with which networks, and of results from before."""

import json
import shutil

import pytest
from PIL import Image
from typer.testing import CliRunner

from confitune import cli
from confitune.analysis import ShiftResult
from confitune.engine import RunResult
from confitune.experiments.identity import filled
from confitune.experiments.reproduce import Scope, reproduce


@pytest.fixture(scope="module")
def given(values):
    return {key: values[key] for key in ("tasks", "batch_size", "model", "weights", "device")}


@pytest.fixture(scope="module")
def shown_once(given, tmp_path_factory):
    out = tmp_path_factory.mktemp("shift") / "out"
    arguments = ["reproduce", "shift", "--datasets", "digits", "--quick", "--out", str(out)]
    arguments += [f"--{name}={given[name]}" for name in ("model", "weights", "device", "tasks")]
    arguments += ["--means", "window", "--set", "statistics=pass", "--methods"]
    for methods in ("confit", "finetune,finetune-xconv,confit"):  # alone it is watched, too
        said = CliRunner().invoke(cli.app, [*arguments, methods])
        assert said.exit_code == 0, said.output
    return out


@pytest.fixture
def shown(shown_once, tmp_path):
    """A folder of its own with the shift of three methods, and what asks for it."""
    out = shutil.copytree(shown_once, tmp_path / "out")
    return out, sorted(out.glob("runs/*/digits/*/seed-0/shift.json"))


def page_again(out, given):
    form = {"means": "window", "statistics": "pass"}
    asked = {name: given[name] for name in ("model", "weights", "device", "tasks")}
    methods = ("finetune", "finetune-xconv", "confit")
    (outcome,) = reproduce(["shift"], Scope(out, ("digits",), methods, quick=True, given={**asked, **form}))
    return outcome


def without_errors(path):
    kept = json.loads(path.read_text())
    del kept["errors"]
    path.write_text(json.dumps(kept))


def test_options_reach_the_runs(shown):
    out, paths = shown
    configs = {path.parts[-3]: RunResult.load(path.with_name("result.json")).config for path in paths}
    assert set(configs) == {"finetune", "finetune-xconv", "confit"}
    form = {"means": "window", "statistics": "pass"}
    for method in ("finetune-xconv", "confit"):
        assert {name: filled(configs[method])[name] for name in form} == form
    assert {path.parts[-5] for path in paths} == {"clean-test_byobnet-window-pass-5-epochs"}
    page = (out / "shift.md").read_text()
    assert "| confit | window means, pass statistics | 1 |" in page
    assert "| finetune | - | 1 |" in page
    assert "Note" not in page


def test_the_page_shows_what_was_measured(shown):
    out, paths = shown
    page, data = (out / "shift.md").read_text(), json.loads((out / "shift.json").read_text())["data"]["digits"]
    for path in paths:
        result, told = ShiftResult.load(path), data["moments"][path.parts[-3]]
        for name, values in told.items():
            assert values == [layer[name] for layer in result.errors]
        row = " | ".join([result.layers[0], *(f"{value:.3f}" for value in result.errors[0].values())])
        assert row in page.split(f"## digits, {path.parts[-3]}: ")[1].split("\n## ")[0]
    with Image.open(out / "shift-moments-digits.png") as picture:
        assert picture.format == "PNG"
    assert "![Representational shift](shift-moments-digits.png)" in page


def test_recovered_means_of_the_first_layer_are_right(shown):
    """Its input is the image, which nothing moves: what is off is off by how the test set differs, as it was before."""
    _, paths = shown
    found = {path.parts[-3]: ShiftResult.load(path) for path in paths}
    for method in ("finetune-xconv", "confit"):
        layer = found[method].errors[0]
        assert layer["mean error, last"] == pytest.approx(layer["mean error, first"], abs=0.02)


def test_only_results_from_before(shown, given):
    out, paths = shown
    (out / "shift-moments-digits.png").unlink()
    for path in paths:
        without_errors(path)
    outcome = page_again(out, given)
    assert list(outcome.tables) == ["digits", "digits: what was run"]
    assert outcome.pictures == ["shift-digits.png"]
    assert not (out / "shift-moments-digits.png").exists()
    assert "moments" not in outcome.data["digits"]


def test_some_results_from_before(shown, given):
    out, paths = shown
    without_errors(next(path for path in paths if path.parts[-3] == "finetune"))
    outcome = page_again(out, given)
    assert set(outcome.data["digits"]["d1"]) == {"finetune", "finetune-xconv", "confit"}
    assert set(outcome.data["digits"]["moments"]) == {"finetune-xconv", "confit"}
    assert not any(heading.startswith("digits, finetune:") for heading in outcome.tables)
