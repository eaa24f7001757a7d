"""What identifies a run: a field at its default changes nothing, whichever version wrote it down."""

import re
from collections import Counter
from pathlib import Path

import pytest

from confitune.engine import read_results
from confitune.engine.checkpoint import differences
from confitune.errors import ConfituneError
from confitune.experiments.paper.numbers import chosen_options
from confitune.experiments.runs.identity import DEFAULTS, filled, option_defaults, run_key, shortened
from confitune.experiments.runs.recipe import make_recipe
from confitune.experiments.runs.runner import run_recipe
from confitune.methods import create_method
from confitune.settings import TrainSettings
from found import run_of

RESULTS = sorted((Path(__file__).parents[3] / "results").rglob("runs.jsonl"))


def identity(method="confit", seed=0, weights="abc", **values):
    return make_recipe(values).identity(method, seed, weights)


def test_defaults_are_left_out():
    made = {"device": "cpu", "dataset": "flowers102"}  # 10 epochs and batches of 32, as TrainSettings has them
    assert identity(**made) == {
        "version": 2,
        "dataset": "flowers102",
        "precision": "fp32",
        "method": "confit",
        "weights_sha256": "abc",
    }
    given = {name: value for name, value in DEFAULTS.items() if name not in ("dataset", "precision")}
    assert identity(**made, **given) == identity(**made)


def test_whether_the_task_is_given_is_written_where_it_is_not():
    assert identity(scenario="task") == identity()
    assert identity(scenario="class") == {**identity(), "scenario": "class"}


def test_what_the_dataset_or_the_method_chooses_is_written():
    assert (identity(dataset="digits")["epochs"], identity(dataset="digits")["batch_size"]) == (5, 16)
    ccll = identity("ccll", dataset="digits")
    assert (ccll["epochs"], ccll["lr_schedule"]) == (150, "step")
    assert "options" not in ccll


def test_options_are_written_where_they_differ_from_their_parts_defaults_whoever_chose_them():
    usual = option_defaults("mas")["mas"]
    paper = chosen_options("flowers102")["mas"]
    assert (usual["strength"], usual["mode"], paper) == (30.0, "eval", {"strength": 30, "mode": "train"})
    assert "options" not in identity("mas")
    assert identity("mas", dataset="flowers102")["options"] == {"mas": {"mode": "train"}}
    again = {"mas": {"mode": "eval", "strength": 7}}
    assert identity("mas", dataset="flowers102", options=again)["options"] == {"mas": {"strength": 7.0}}


def version_1(method, recipe, seed=0):
    """As it was once written: all settings, all options of the method's parts."""
    full = {**DEFAULTS, **recipe.identity(method, seed, "abc")}
    del full["version"]
    given = full.get("options", {})
    options = {part: {**usual, **given.get(part, {})} for part, usual in option_defaults(method).items()}
    return {**full, "options": options}


@pytest.mark.parametrize("method", ["confit", "finetune", "mas-cpr", "ccll", "ewc+confit"])
@pytest.mark.parametrize("dataset", ["digits", "flowers102"])
def test_a_configuration_of_version_1_is_the_same_run(method, dataset):
    recipe = make_recipe({"dataset": dataset, "methods": [method], "tasks": 3})
    old, new = version_1(method, recipe), recipe.identity(method, 0, "abc")
    assert shortened(old) == new
    unclipped = () if "clip_norm" in new else ("clip_norm",)
    for missing in ((), ("held_out",), (*unclipped, "held_out", "augmentation")):
        assert run_key({name: value for name, value in old.items() if name not in missing}) == run_key(new)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.5}, r"lr was 0\.5, now 0\.01"),
        ({"held_out": 0.1}, r"held_out was 0\.1, now None"),
        ({"variance": "ratio"}, "variance was 'ratio', now not set"),
        ({"options": {"ewc": {"strength": 7.0}}}, r"options was .*'strength': 7\.0.*, now .*'strength': 300\.0.*"),
        ({"seed": 3}, "seed was 3, now 0"),
    ],
)
def test_what_differs_is_another_run_and_said_with_both_values(change, message):
    recipe = make_recipe({"methods": ["ewc"]})
    for found in ({**version_1("ewc", recipe), **change}, {**recipe.identity("ewc", 0, "abc"), **change}):
        wanted = recipe.identity("ewc", 0, "abc")
        assert run_key(found) != run_key(wanted)
        assert re.fullmatch(message, differences(filled(shortened(found)), filled(shortened(wanted))))


def test_what_is_left_out_is_filled_in_for_readers():
    known = filled(identity("ewc", dataset="digits", tasks=3))
    assert (known["tasks"], known["model"], known["lr"]) == (3, "tf_efficientnet_lite0", TrainSettings().lr)
    assert (known["means"], known["statistics"]) == (None, None)  # there is no Xconv BN
    assert known["options"] == {"ewc": option_defaults("ewc")["ewc"]}
    assert "version" not in known


def recipe_of(config):
    """The recipe that a result's configuration asks for."""
    apart = {"version", "method", "seed", "weights_sha256"}
    values = {name: value for name, value in config.items() if name not in apart and value is not None}
    return make_recipe({"pull_limit": None, **values, "methods": [config["method"]]})  # results of before had none


# Methods that do something else than in confitune 0.1, whose results are not taken for theirs.
CHANGED = ("ewc", "si", "rwalk", "mas", "mas-cpr", "mas-afec", "ccll")


def test_every_committed_result_counts_as_finished_unless_its_method_has_changed():
    versions = Counter()
    for result in (result for path in RESULTS for result in read_results(path)):
        config = result.config
        version, method = config.get("version", 1), config["method"]
        if version == 1 and method in CHANGED and not (method == "ewc" and config.get("clip_norm")):
            with pytest.raises((ConfituneError, AssertionError), match=r"base: Extra inputs|clip_norm was None|'mode'"):
                _require_finished(result)
        else:
            _require_finished(result)
            versions[version] += 1
    assert versions[1] >= 260  # of confitune 0.1: before there were options, before there was clip_norm, and after
    assert versions[2] >= 100


def _require_finished(result):
    config = result.config
    wanted = recipe_of(config).identity(config["method"], result.seed, config["weights_sha256"])
    assert run_key(config) == run_key(wanted), differences(filled(shortened(config)), filled(shortened(wanted)))


def test_a_result_of_version_1_is_not_run_again(finished, values, monkeypatch):
    result = run_of(finished, "confit")
    recipe = make_recipe({**values, "methods": ["confit"]})
    config = {**version_1("confit", recipe), "weights_sha256": result.weights_sha256}
    (finished / "runs.jsonl").write_bytes(result.model_copy(update={"config": config}).line())
    monkeypatch.setattr("confitune.engine.SequenceRun", lambda *_, **__: pytest.fail("it was run again"))
    (again,) = run_recipe(recipe, finished, resume=True)
    assert again.final_sha256 == result.final_sha256


@pytest.mark.parametrize("method", ["mine.py:Mine", "package.module:Mine", "ewc+mine.py:Mine"])
def test_a_method_that_is_a_file_is_not_executed_to_read_a_result(monkeypatch, method):
    monkeypatch.setattr(
        "confitune.experiments.runs.identity.create_method", lambda name: pytest.fail(f"{name} was loaded")
    )
    given = {"mine": {"x": 1}}
    assert filled({"version": 2, "method": method, "options": given})["options"] == given


def test_methods_that_are_not_here_any_more_have_no_defaults():
    with pytest.raises(ConfituneError, match="no method 'gone'"):
        create_method("gone")
    assert option_defaults("gone") == {}
