"""The page about representational shift: what it shows, and with which networks."""

import json
import shutil

import pytest
from PIL import Image
from typer.testing import CliRunner

from confitune import cli
from confitune.experiments.runs.identity import filled, finished_runs


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
    return out, {result.method: result for result in finished_runs(out).values()}


def test_options_reach_the_runs(shown):
    out, results = shown
    configs = {method: result.config for method, result in results.items()}
    assert set(configs) == {"finetune", "finetune-xconv", "confit"}
    form = {"means": "window", "statistics": "pass"}
    for method in ("finetune-xconv", "confit"):
        assert {name: filled(configs[method])[name] for name in form} == form
    page = (out / "reproduction.md").read_text()
    assert "| confit | window means, pass statistics | 1 |" in page
    assert "| finetune | - | 1 |" in page
    assert page.count("Note: ") == page.count("Note: one run of each method") == 1


def test_the_page_shows_what_was_measured(shown):
    out, results = shown
    page = (out / "reproduction.md").read_text()
    data = json.loads((out / "outcomes.json").read_text())["shift"]["data"]["digits"]
    for method in results:
        result = results[method].measured["shift"]
        added = [after - before for after, before in zip(result["d2"], result["d0"], strict=True)]
        assert data["d1"][method] == result["d1"]
        assert data["d2_minus_d0"][method] == added
        assert f" {result['d1'][0]:.3f} | {added[0]:.3f} |" in page
    with Image.open(out / "shift-digits.png") as picture:
        assert picture.format == "PNG"
    assert "![Representational shift](shift-digits.png)" in page
