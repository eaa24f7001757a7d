"""Tasks that grow and shrink without the photos they were learned from."""

from __future__ import annotations

import importlib
import shutil
from types import SimpleNamespace

import pytest
import torch

from confitune.deploy import Bundle, BundleError, LearnSettings, Predictor, changing, go_back, grow, remove_class
from confitune.methods import METHODS
from confitune.methods.linear import fit_linear, folds_of
from deploy.shared import answers, contents, settling

growing = importlib.import_module("confitune.deploy.grow")  # the package has a function of that name
TASKS = ("reds", "stripes", "greens", "blues", "yellows")
SETTINGS = LearnSettings(device="cpu", batch_size=4, keep=64)


@pytest.fixture(scope="module")
def once(teach, tmp_path_factory):
    """A bundle of `best`: 'reds' is a head, 'greens' has norms and changes of its own."""
    path = tmp_path_factory.mktemp("grow") / "model"
    for task in ("reds", "greens"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(METHODS["best"], "settle", settling(only_head=task == "reds"))
            teach(task, path, **({} if path.exists() else {"method": "best"}))
    return path


@pytest.fixture
def path(once, tmp_path):
    return shutil.copytree(once, tmp_path / "model")


@pytest.fixture(scope="module")
def pixels(once, pictures):
    """New pictures of every task, decoded."""
    pipeline = Predictor.from_bundle(once, device="cpu")._pipeline
    return {task: torch.stack([torch.from_numpy(pipeline(image)) for image in pictures(task)]) for task in TASKS}


def right(predictor, pixels, task, into=None):
    """How many of eight new pictures of a task get their class, asked of the task that it went into."""
    found = predictor.predict(pixels[task], [into or task] * 8)
    return sum(answer.classes[0][0] == f"{task} {n % 2}" for n, answer in enumerate(found))


@pytest.mark.parametrize("task", ["reds", "greens"])
def test_new_classes_join_a_task_and_the_old_ones_stay(path, photos, decoded, pixels, task):
    before, other = answers(path), "greens" if task == "reds" else "reds"
    report = grow(photos("stripes"), task, path, SETTINGS, cache_dir=decoded)
    assert report.record.classes == (f"{task} 0", f"{task} 1", "stripes 0", "stripes 1", "stripes 2")
    (change,) = report.changes
    assert (change.task, change.images) == (f"{task}, earlier photos", 4)
    bundle, predictor = Bundle.open(path), Predictor.from_bundle(path, device="cpu")
    record = bundle.record(task)
    assert (record.classes, record.images, record.only_head) == (report.record.classes, 16 + 24, task == "reds")
    assert len(bundle.held_out(task).test) == 4 + 6
    assert right(predictor, pixels, task) >= 6
    assert right(predictor, pixels, "stripes", into=task) >= 6
    assert torch.equal(answers(path)[other], before[other])


@pytest.mark.parametrize("task", ["reds", "greens"])
def test_the_head_is_that_of_all_photos_at_once(path, photos, decoded, task):
    old = Bundle.open(path).features(task)
    state = Bundle.open(path).task_state(task)
    grow(photos("stripes"), task, path, SETTINGS, cache_dir=decoded)
    bundle = Bundle.open(path)
    features, grown = bundle.features(task), bundle.task_state(task)
    assert torch.equal(features.train[:16], old.train)
    assert (features.own is None) == (task == "reds")
    fitted = features.train if features.own is None else features.own
    fit = fit_linear(fitted, features.labels, 5, folds_of(features.labels, 0))
    torch.testing.assert_close(grown["head.weight"], fit.weight)
    same = state.keys() - {"head.weight", "head.bias"}
    assert same == grown.keys() - {"head.weight", "head.bias"}
    assert all(torch.equal(state[key], grown[key]) for key in same)


def test_more_photos_of_a_class_that_is_there(path, photos, decoded, tmp_path):
    more = tmp_path / "more"
    shutil.copytree(photos("reds") / "reds 1", more / "reds 1")
    report = grow(more, "reds", path, SETTINGS, cache_dir=decoded)
    assert report.record.classes == ("reds 0", "reds 1")
    features = Bundle.open(path).features("reds")
    assert features.labels.bincount().tolist() == [8, 16]


def test_a_folder_of_images_alone_is_a_class(path, photos, decoded, tmp_path):
    shutil.copytree(photos("greens") / "greens 0", tmp_path / "leaf")
    report = grow(tmp_path / "leaf", "reds", path, SETTINGS, cache_dir=decoded)
    assert report.record.classes == ("reds 0", "reds 1", "leaf")


def test_the_label_space_is_that_of_learning_in_any_order(path, photos, decoded, pixels, tmp_path):
    """Grown and cut again, it is what it was."""
    before = Bundle.open(path).label_space()
    grow(photos("stripes"), "reds", path, SETTINGS, cache_dir=decoded)
    between = Bundle.open(path).label_space()
    assert (len(between.of_class), len(before.of_class)) == (7, 4)
    bundle = Bundle.open(path)
    with changing(bundle) as change:
        for name in ("stripes 1", "stripes 0", "stripes 2"):
            remove_class(change, "reds", name)
    after = Bundle.open(path).label_space()
    probe = torch.randn(5, before.means.shape[1], generator=torch.Generator().manual_seed(0))
    places = {name: n for n, name in enumerate(after.tasks)}
    order = torch.cat([(after.of_class == places[name]).nonzero().flatten() for name in before.tasks])
    torch.testing.assert_close(after.logits(probe)[:, order], before.logits(probe), rtol=1e-6, atol=1e-6)


def test_a_removed_task_leaves_the_label_space(path):
    bundle = Bundle.open(path)
    with changing(bundle) as change:
        change.remove_task("reds")
    space = Bundle.open(path).label_space()
    assert space.tasks == ("greens",)


@pytest.mark.parametrize("task", ["reds", "greens"])
def test_a_class_is_forgotten_and_the_others_answer_as_before(path, photos, decoded, pixels, task):
    grow(photos("stripes"), task, path, SETTINGS, cache_dir=decoded)
    before = Predictor.from_bundle(path, device="cpu").logits(pixels[task], [task] * 8)
    bundle = Bundle.open(path)
    with changing(bundle) as change:
        remove_class(change, task, "stripes 0")
    bundle = Bundle.open(path)
    assert bundle.record(task).classes == (f"{task} 0", f"{task} 1", "stripes 1", "stripes 2")
    assert bundle.record(task).images == 32
    assert sorted(set(bundle.held_out(task).test.labels.tolist())) == [0, 1, 2, 3]
    after = Predictor.from_bundle(path, device="cpu").logits(pixels[task], [task] * 8)
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(old[[0, 1, 3, 4]], new)


def test_growing_can_be_undone(path, photos, decoded):
    before = answers(path)
    grow(photos("stripes"), "reds", path, SETTINGS, cache_dir=decoded)
    go_back(Bundle.open(path))
    bundle = Bundle.open(path)
    assert bundle.record("reds").classes == ("reds 0", "reds 1")
    assert all(torch.equal(before[task], found) for task, found in answers(path).items())
    assert bundle.leftovers() == []


def test_a_failed_growth_changes_nothing(path, photos, decoded, tmp_path):
    before = contents(path)
    with pytest.raises(BundleError, match="no task 'birds'"):
        grow(photos("stripes"), "birds", path, SETTINGS, cache_dir=decoded)
    bundle = Bundle.open(path)
    with changing(bundle) as change:
        with pytest.raises(BundleError, match="has no class 'wren'"):
            remove_class(change, "reds", "wren")
        with pytest.raises(BundleError, match="needs at least two classes"):
            remove_class(change, "reds", "reds 0")
    assert contents(path) == before


def test_a_growth_that_came_out_wrong_is_not_committed(path, photos, decoded, monkeypatch):
    def fit(features, labels, classes, folds):
        return SimpleNamespace(weight=torch.full((classes, features.shape[1]), torch.nan), bias=torch.zeros(classes))

    before = contents(path)
    monkeypatch.setattr(growing, "fit_linear", fit)
    with pytest.raises(BundleError, match=r"'reds' is left as it was: .* are not finite"):
        grow(photos("stripes"), "reds", path, SETTINGS, cache_dir=decoded)
    assert contents(path) == before


def test_a_task_whose_network_moves_cannot_grow(taught, photos, decoded):
    with pytest.raises(BundleError, match="confit moves what tasks share"):
        grow(photos("greens"), "reds", taught(2), SETTINGS, cache_dir=decoded)


def test_a_server_takes_a_grown_task_over(path, photos, decoded, pixels):
    predictor = Predictor.from_bundle(path, device="cpu")
    assert len(predictor.logits(pixels["reds"][:1], ["reds"])[0]) == 2
    predictor.predict(pixels["reds"][:1], [None])
    grow(photos("stripes"), "reds", path, SETTINGS, cache_dir=decoded)
    predictor.renew()
    assert len(predictor.logits(pixels["reds"][:1], ["reds"])[0]) == 5
    (answer,) = predictor.predict(pixels["stripes"][:1], [None], top=9)
    assert len(answer.classes) + len(answer.others) == 7


def test_hostile_features_take_no_memory(path):
    bundle = Bundle.open(path)
    state = bundle.features("reds").state()
    state["train"], state["train.scale"] = torch.zeros(100_000, 1, dtype=torch.int8), torch.zeros(1, 50_000)
    with changing(bundle) as change:
        stored = bundle.files.store("features", state)
        record = bundle.record("reds").model_copy(update={"features": stored})
        change.commit({**change.bundle.tasks, "reds": record})  # it is not guessed any more, and that is said
    with pytest.raises(BundleError, match="train has no scale for each image"):
        Bundle.open(path).features("reds")
    assert Bundle.open(path).label_space().tasks == ("greens",)


def test_the_commands(confitune, path, photos, decoded):
    grown = confitune("learn", photos("stripes"), "--into", "reds", "--bundle", path, "--cache-dir", decoded)
    assert grown.code == 0, grown.err
    assert "reds: 5 classes" in grown.out
    assert "reds, earlier photos" in grown.out
    assert confitune("tasks", path, "--remove-class", "reds/stripes 0").code == 0
    assert Bundle.open(path).record("reds").classes == ("reds 0", "reds 1", "stripes 1", "stripes 2")
    for names in ([], ["--name", "a", "--into", "reds"]):
        wrong = confitune("learn", photos("stripes"), "--bundle", path, *names)
        assert wrong.code == 2
        assert "give --name for a new task, or --into for one that is there" in wrong.err
