"""What is asked for on the command line or in a file, and which runs that is."""

import pytest

from confitune.errors import ConfituneError
from confitune.experiments.paper.plan import Part, Scope, read_scope
from confitune.experiments.paper.reproduce import parts_of
from found import of_two_tasks


def test_a_file_names_what_to_do_and_options_win(tmp_path):
    path = tmp_path / "some.yaml"
    path.write_text("what: [table1, curves]\ndatasets: [cifar100, flowers102]\nseeds: 3\nmodel: resnet34\n")
    scope, whats = read_scope(
        [str(path), "storage"], tmp_path, given={"datasets": ["photos,digits"]}, changes=["lr=0.3"]
    )
    assert whats == ["table1", "curves", "storage"]
    assert (scope.datasets, scope.methods) == (("photos", "digits"), None)
    assert scope.given == {"seeds": 3, "model": "resnet34", "lr": 0.3}


def test_a_file_can_train_some_rows_otherwise(tmp_path):
    path = tmp_path / "some.yaml"
    rows = "rows: {mas-afec: {warmup: 0.1, options: {mas: {strength: 60}, afec: {strength: 20}}}}"
    path.write_text(f"what: table1\nmethods: [mas, mas-afec]\n{rows}\n")
    scope, _ = read_scope([str(path)], tmp_path)
    mas, afec = parts_of("table1", scope)
    assert (mas.recipe.warmup, afec.recipe.warmup) == (0.0, 0.1)
    assert mas.recipe.method("mas").options.strength == 30
    with_mas, with_afec = afec.recipe.method("mas-afec").hooks
    assert (with_mas.options.strength, with_mas.options.mode) == (60, "train")
    assert (with_afec.options.strength, with_afec.options.mode) == (20, "train")


def test_runs_are_found_whatever_device_did_them(tmp_path):
    recipe = Scope(tmp_path, ("digits",), given={"seeds": 2}).recipe("digits", "confit")
    configs = [recipe.identity("confit", seed, "abc") for seed in (0, 1)]
    one = of_two_tasks("confit", 0, ((84.0, 82.0), 90.0))
    runs = [one.model_copy(update={"config": {**config, "precision": "bf16"}}) for config in configs]
    assert Part(recipe).found(runs).results == runs
    assert Part(recipe.model_copy(update={"precision": "fp32"})).found(runs).results == []
    assert Part(Scope(tmp_path, given={"seeds": 2, "lr": 0.3}).recipe("digits", "confit")).found(runs).results == []


def test_quick_fills_in_only_what_is_not_asked_for(tmp_path):
    scope = Scope(tmp_path, ("digits",), quick=True, given={"tasks": 4, "seeds": 3})
    recipe = scope.recipe("digits", "confit", epochs=50)
    assert (recipe.seeds, recipe.tasks, recipe.epochs) == (3, 4, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("what: 5", "what must be names, with commas or as a list: got 5"),
        ("what: [table1, 5]", "what must be names"),
        ("what: table1\ndatasets: {a: b}", "datasets must be names"),
        ("what: table1\nmethods: 3", "methods must be names"),
        ("what: table1\nrows: {ewc: 3}", "rows must be recipe values by method"),
        ("what: table1\nrows: {ewc: {lrr: 3}}", "no option 'lrr'"),
        (
            "what: table1\ndatasets: digits\npipeline: publisht",
            "pipeline='publisht': Input should be 'clean' or 'published'",
        ),
        ("what: table1\ndatasets: digits\nseeds: 0", "seeds=0"),
    ],
)
def test_a_file_that_asks_for_what_there_is_not(tmp_path, text, message):
    (tmp_path / "mine.yaml").write_text(text)

    def asked():
        scope, whats = read_scope([str(tmp_path / "mine.yaml")], tmp_path)
        return [parts_of(what, scope) for what in whats]

    with pytest.raises(ConfituneError, match=message):
        asked()
