import math
from pathlib import Path

import pytest

from confitune.errors import ConfituneError
from confitune.experiments.runs.recipe import Recipe, make_recipe, merge_settings, read_recipe
from confitune.tasks import DATASETS

RECIPES = sorted((Path(__file__).parents[3] / "src/confitune/recipes").glob("*.yaml"))


def refused(values, source="r.yaml"):
    with pytest.raises(ConfituneError) as caught:
        make_recipe(values, source)
    return str(caught.value)


def test_the_default_compares_finetune_and_confit_on_photos():
    recipe = make_recipe({})
    assert (recipe.dataset, recipe.methods, recipe.model) == ("photos", ("finetune", "confit"), "tf_efficientnet_lite0")
    assert (recipe.seeds, recipe.order_seed, recipe.pipeline, recipe.device) == (1, 0, "clean", "auto")


@pytest.mark.parametrize("dataset", [name for name in DATASETS if name != "folder"])
def test_epochs_and_batch_size_come_from_the_dataset_unless_given(dataset):
    info = DATASETS[dataset]
    settings = make_recipe({"dataset": dataset}).train_settings(3, "finetune")
    assert (settings.epochs, settings.batch_size, settings.seed) == (info.epochs, info.batch_size, 3)
    settings = make_recipe({"dataset": dataset, "epochs": 3, "batch_size": 7}).train_settings(0, "finetune")
    assert (settings.epochs, settings.batch_size) == (3, 7)


def test_the_papers_epochs_and_batch_sizes():
    found = {name: (DATASETS[name].batch_size, DATASETS[name].epochs) for name in DATASETS}
    paper = {"cifar100": (128, 10), "cub200": (32, 50), "caltech101": (32, 20), "flowers102": (32, 10)}
    assert {name: found[name] for name in paper} == paper


def clipped_at(method, **given):
    return make_recipe({"methods": [method], **given}).train_settings(0, method).clip_norm


@pytest.mark.parametrize("method", ["ewc", "si", "rwalk", "mas", "mas-cpr", "mas-afec", "ewc+confit", "confit+mas"])
@pytest.mark.parametrize("dataset", ["photos", "flowers102"])
def test_clipping_goes_with_the_strengths_that_were_chosen_with_it(method, dataset):
    assert clipped_at(method, dataset=dataset) == 100
    assert clipped_at(method, dataset=dataset, clip_norm=3) == 3
    assert clipped_at(method, dataset=dataset, clip_norm=None) is None


@pytest.mark.parametrize("method", ["confit", "finetune", "ccll", "single-task"])
def test_methods_without_a_pull_are_not_clipped(method):
    assert clipped_at(method, dataset="flowers102") is None


def test_every_training_option_reaches_the_settings():
    given = {
        "lr": 0.2,
        "optimizer": "adamw",
        "momentum": 0.5,
        "weight_decay": 0.01,
        "lr_schedule": "cosine",
        "augmentation": "flip",
        "precision": "bf16",
        "device": "cpu",
    }
    settings = make_recipe(given).train_settings(0, "finetune")
    assert {name: getattr(settings, name) for name in given} == given


@pytest.mark.parametrize(
    ("option", "near"),
    [
        ("epoch", "epochs"),
        ("method", "methods"),
        ("learning_rate", None),
        ("batchsize", "batch_size"),
        ("seedss", "seeds"),
    ],
)
def test_an_unknown_option_is_answered_with_the_nearest(option, near):
    message = refused({option: 3})
    assert message.startswith(f"r.yaml: no option {option!r}; ")
    assert f"did you mean {near!r}?" in message if near else all(name in message for name in Recipe.model_fields)


@pytest.mark.parametrize(
    ("option", "value", "known"),
    [
        ("means", "windows", "window"),
        ("statistics", "runing", "running"),
        ("pipeline", "publish", "published"),
        ("optimizer", "Adam", "adam"),
        ("lr_schedule", "cos", "cosine"),
        ("augmentation", "flips", "flip"),
        ("precision", "fp16", "bf16"),
    ],
)
def test_an_unknown_value_is_answered_with_what_there_is(option, value, known):
    message = refused({option: value})
    assert f"r.yaml: {option}={value!r}: Input should be " in message
    assert repr(known) in message


def test_unknown_datasets_and_methods_are_answered_with_the_nearest():
    assert "'flower102'; did you mean 'flowers102'?" in refused({"dataset": "flower102"})
    assert "no method 'confitt': did you mean 'confit'?" in refused({"methods": ["finetune", "confitt"]})


@pytest.mark.parametrize(
    ("option", "value"),
    [("epochs", 0), ("seeds", 0), ("lr", -1), ("batch_size", 1), ("tasks", 0), ("momentum", 1.0), ("epochs", "many")],
)
def test_impossible_values_are_named(option, value):
    assert refused({option: value}).startswith(f"r.yaml: {option}={value!r}: ")


def test_all_problems_are_named_at_once():
    message = refused({"epochs": 0, "means": "x", "epoch": 3})
    assert len(message.splitlines()) == 3


def test_a_method_named_twice_is_refused():
    assert "r.yaml name a method twice: confit, finetune, confit" in refused(
        {"methods": ["confit", "finetune", "confit"]}
    )


def test_no_method_is_refused():
    assert "methods" in refused({"methods": []})


@pytest.mark.parametrize("text", ["1: 2", "yes: no", "[a]: 3", "dataset: digits\n3.5: x"])
def test_names_that_are_no_text_are_refused(tmp_path, text):
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    with pytest.raises(ConfituneError, match=r"odd\.yaml"):
        make_recipe(read_recipe(path), str(path))


def test_a_file_gives_its_values(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("dataset: digits\nmethods: [confit, joint]\nlr: 1e-3\nseeds: 5\n")
    recipe = make_recipe(read_recipe(path))
    assert (recipe.dataset, recipe.methods, recipe.lr, recipe.seeds) == ("digits", ("confit", "joint"), 0.001, 5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- confit\n- finetune\n", "must hold options by name, e.g. 'dataset: photos'"),
        (b"", "must hold options by name"),
        (b"just text", "must hold options by name"),
        (b"dataset: [digits", "is not YAML"),
        (b"a: b: c", "is not YAML"),
        (b"\xff\xfe\x00", "is not YAML"),
        (b"!!python/object/apply:os.system [ls]", "is not YAML"),
    ],
)
def test_a_file_that_is_no_recipe_is_named(tmp_path, content, message):
    path = tmp_path / "odd.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfituneError) as caught:
        read_recipe(path)
    assert str(caught.value).startswith(f"{path} {message}")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfituneError, match=r"no recipe .*none\.yaml: No such file"):
        read_recipe(tmp_path / "none.yaml")
    with pytest.raises(ConfituneError, match=r"no recipe .*: Is a directory"):
        read_recipe(tmp_path)


def identity(method="confit", seed=0, weights="abc", **values):
    return make_recipe(values).identity(method, seed, weights)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("dataset", "digits"),
        ("order_seed", 1),
        ("tasks", 2),
        ("classes_per_task", 3),
        ("model", "resnet18"),
        ("epochs", 3),
        ("batch_size", 7),
        ("lr", 0.5),
        ("optimizer", "adam"),
        ("momentum", 0.9),
        ("weight_decay", 0.1),
        ("lr_schedule", "step"),
        ("augmentation", "flip"),
        ("precision", "bf16"),
        ("means", "phase"),
        ("statistics", "pass"),
        ("pipeline", "published"),
    ],
)
def test_what_determines_a_result_is_part_of_its_identity(option, value):
    other = identity(**{option: value})
    assert other[option] == value
    assert other != identity()


def test_method_seed_and_weights_are_part_of_the_identity():
    assert identity(method="finetune-xconv") != identity()
    assert identity(seed=1) != identity()
    assert identity(weights="abd") != identity()


@pytest.mark.parametrize(
    ("option", "value"),
    [("device", "cpu"), ("seeds", 7), ("methods", ["joint"]), ("data_dir", "/d"), ("cache_dir", "/c")],
)
def test_where_and_how_often_it_runs_is_not(option, value):
    assert identity(**{option: value}) == identity()


def test_xconv_options_do_not_change_what_finetune_is():
    plain = identity("finetune")
    assert identity("finetune", means="phase", statistics="pass") == plain
    assert (plain["means"], plain["statistics"]) == (None, None)


def test_the_recipes_that_come_along_are_valid():
    """Those with a `what` are for `confitune reproduce`, and tested there."""
    of_runs = {path: values for path in RECIPES if "what" not in (values := read_recipe(path))}
    assert len(of_runs) >= 6
    for path, values in of_runs.items():
        make_recipe(values, str(path))


def test_the_default_recipe_is_the_default():
    (path,) = (path for path in RECIPES if path.name == "default.yaml")
    assert make_recipe(read_recipe(path)) == make_recipe({})


LAUGHS = "a: &a [ha, ha]\n" + "".join(f"b{n}: &b{n} [*a, *a]\n" for n in range(3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAUGHS, r"has an alias, \*a; write out what it stands for"),
        ("a: " + "[" * 30 + "]" * 30, "is nested more than 20 deep"),
        ("a: " + "9" * 3000, "has a value of 3,000 characters"),
        ("a: " + "[1, 2],\n" * 10_000, "is larger than 65,536 bytes; it is not a recipe"),
        ("a: !!timestamp x", "is not YAML"),
        ("a: 2024-13-45", "is not YAML"),
        ("1: 2", "must hold options by name"),
    ],
)
def test_a_file_that_stands_for_more_than_it_says_is_refused(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfituneError, match=rf"mine\.yaml {message}"):
        read_recipe(path)


@pytest.mark.parametrize(
    "values",
    [
        {"seeds": 10**12},
        {"order_seed": 2**63},
        {"lr": math.inf},
        {"weight_decay": math.nan},
        {"cache_dir": "a\0b"},
        {"dataset": "folder:a\0b"},
        {"device": "\ud800"},
        {"model": 5},
    ],
)
def test_values_that_no_experiment_has(values):
    (name,) = values
    with pytest.raises(ConfituneError, match=f"the options given: {name}="):
        make_recipe({"dataset": "digits", **values})


def test_long_values_are_shortened_when_they_are_refused():
    with pytest.raises(ConfituneError) as caught:
        make_recipe({"dataset": "digits", "lr": ["x" * 10**6]})
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("options", [5, {"ewc": 5}, [1]])
def test_options_that_are_not_by_part(options):
    with pytest.raises(ConfituneError, match="must be by part"):
        merge_settings({"options": options}, ["ewc.strength=3"])
