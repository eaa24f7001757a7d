"""The page about representational shift: what it shows of moments, with which networks, and of results from before."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from confitune import cli
from confitune.analysis import ShiftResult
from confitune.engine import RunResult
from confitune.experiments.identity import filled
from confitune.experiments.reproduce import Outcome, Scope, reproduce
from confitune.experiments.reproduce.moment_errors import add_moment_errors


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
    for name in ("after_first", "after_last", "variance_moved"):
        del kept[name]
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
        assert told["mean_error_after_first"] == [layer.mean_error.rms for layer in result.after_first]
        assert told["mean_error_after_last"] == [layer.mean_error.rms for layer in result.after_last]
        assert told["variance_error_after_first"] == [layer.variance_error.rms for layer in result.after_first]
        assert told["variance_error_after_last"] == [layer.variance_error.rms for layer in result.after_last]
        assert told["variance_moved"] == [layer.rms for layer in result.variance_moved]
        assert told["near_zero_after_last"] == [layer.near_zero for layer in result.after_last]
        first, last, moved = result.after_first[0], result.after_last[0], result.variance_moved[0]
        row = (
            f"| {result.layers[0]} | {last.channels} | {first.near_zero} → {last.near_zero} "
            f"| {first.mean_error.rms:.3f} → {last.mean_error.rms:.3f} "
            f"| {last.mean_error.worst_channel}: {last.mean_error.worst:+.3f} "
            f"| {moved.rms:.3f} | {moved.worst_channel}: {moved.worst:+.3f} "
            f"| {first.variance_error.rms:.3f} → {last.variance_error.rms:.3f} "
            f"| {last.variance_error.worst_channel}: {last.variance_error.worst:+.3f} |"
        )
        assert row in page.split(f"## digits, {path.parts[-3]}: ")[1].split("\n## ")[0]
    with Image.open(out / "shift-moments-digits.png") as picture:
        assert picture.format == "PNG"
    assert "![Representational shift](shift-moments-digits.png)" in page


def test_recovered_means_of_the_first_layer_are_right(shown):
    """Its input is the image, which nothing moves: what is off is off by how the test set differs, as it was before."""
    _, paths = shown
    found = {path.parts[-3]: ShiftResult.load(path) for path in paths}
    for method in ("finetune-xconv", "confit"):
        first, last = found[method].after_first[0], found[method].after_last[0]
        assert last.mean_error.rms == pytest.approx(first.mean_error.rms, abs=0.02)


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
    (note,) = outcome.notes
    assert "finetune (seed 0), finetune-xconv (seed 0), confit (seed 0); to see them, delete these runs" in note


def test_some_results_from_before(shown, given):
    out, paths = shown
    without_errors(next(path for path in paths if path.parts[-3] == "finetune"))
    outcome = page_again(out, given)
    assert set(outcome.data["digits"]["d1"]) == {"finetune", "finetune-xconv", "confit"}
    assert set(outcome.data["digits"]["moments"]) == {"finetune-xconv", "confit"}
    assert not any(heading.startswith("digits, finetune:") for heading in outcome.tables)
    (note,) = outcome.notes
    assert ": finetune (seed 0); " in note


def one(rms, worst, channel):
    return {"rms": rms, "worst": worst, "worst_channel": channel}


def result(seed, scale, **changed):
    """Two layers, whose errors are `scale` times the same numbers."""

    def after(times):
        return [
            {"mean_error": one(m * times, -m, 1), "variance_error": one(v * times, v, 2), "channels": 8}
            | {"near_zero": zero * round(times)}
            for m, v, zero in ((0.1 * scale, 0.2 * scale, 0), (0.3 * scale, 0.1 * scale, seed))
        ]

    moved = [one(0.5 * scale, -scale, seed), one(0.25 * scale, scale, 7)]
    values = {"after_first": after(0.5), "after_last": after(1), "variance_moved": moved, **changed}
    described = {"dataset": "d", "method": "m", "task": "a", "last_task": "b", "layers": ["x", "y"]}
    return ShiftResult.model_validate(
        {**described, **{name: [0, 0] for name in ("d0", "d1", "d2")}, "seed": seed, **values}
    )


def test_seeds_are_averaged_and_the_worst_channel_is_the_worst_of_all(tmp_path):
    old = result(9, 100, after_first=[], after_last=[], variance_moved=[])
    outcome = Outcome(what="shift", title="Shift", data={"d": {}})
    add_moment_errors(outcome, Scope(tmp_path), "d", {"m": [result(3, 1), result(4, 3), old], "n": [result(0, 1)]})
    told = outcome.data["d"]["moments"]["m"]
    assert told["seeds"] == [3, 4]
    np.testing.assert_allclose(told["mean_error_after_first"], [0.1, 0.3])
    np.testing.assert_allclose(told["mean_error_after_last"], [0.2, 0.6])
    np.testing.assert_allclose(told["variance_error_after_last"], [0.4, 0.2])
    np.testing.assert_allclose(told["variance_moved"], [1.0, 0.5])
    assert told["near_zero_after_last"] == [0, 3.5]
    assert told["worst"]["variance_moved"] == [{"channel": 4, "value": -3}, {"channel": 7, "value": 3}]
    overview, of_m, _ = outcome.tables.values()
    assert "| m | 0.400 | y: 0.600 | 0.750 | x: 1.000 | 0.300 | x: 0.400 |" in overview
    assert "| y | 8 | 0 → 3.5 | 0.300 → 0.600 | 1: -0.900 | 0.500 | 7: +3.000 | 0.100 → 0.200 | 2: +0.300 |" in of_m
    assert outcome.notes[0].startswith(
        "d: runs from before variances were measured have no errors of moments: m (seed 9)"
    )
