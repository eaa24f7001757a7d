"""Bundles of other methods, of networks without batch norm, by strangers, and from before there was a choice."""

import importlib
import json

import pytest
import torch

from confitune.deploy import Bundle, BundleError, Predictor, changing
from confitune.deploy.bundle import TaskRecord
from confitune.deploy.folding import folded
from confitune.methods import METHODS, create_method
from confitune.nn import NoBatchNormError
from deploy.shared import NETWORK, answers, backbone_of, edited

learning = importlib.import_module("confitune.deploy.learn")  # the package has a function of that name

TOO_MUCH = ("ewc", "si", "rwalk", "mas", "afec", "single-task", "joint")


@pytest.fixture
def pixels(pictures):
    """Gives new pictures of a task, decoded."""

    def pixels(predictor, task):
        return torch.stack([torch.from_numpy(predictor._pipeline(image)) for image in pictures(task)])

    return pixels


# ---- methods ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["linear-probe", "bn-only", "ccll"])
def test_a_method_that_never_moves_the_backbone_forgets_nothing(teach, pixels, tmp_path, method):
    path, settings = tmp_path / "model", {"augmentation": "flip", "optimizer": "adamw", "lr": 0.01}
    settings |= {"epochs": 12} if method == "ccll" else {}  # its gates start at one half
    for count, task in enumerate(("reds", "stripes", "greens")):
        report = teach(task, path, **({} if count else {"method": method}), **settings)
        assert len(report.changes) == count
        assert all(change.before == change.after for change in report.changes)
        if count == 0:
            first, backbone = answers(path), backbone_of(path).name
    assert backbone_of(path).name == backbone
    assert torch.equal(answers(path)["reds"], first["reds"])
    bundle = Bundle.open(path)
    assert (bundle.network.method, bundle.network.learner().name) == (method, method)
    assert not any(record.only_head for record in bundle.tasks.values())
    assert (report.numbers == 0) == (method == "linear-probe")
    predictor = Predictor(bundle, device="cpu", unknown=False)
    for task in ("reds", "greens"):
        images = pixels(predictor, task)
        found = [answer.task for answer in predictor.predict(images, [None] * len(images))]
        assert found.count(task) >= 5, (task, found)
    net, x = predictor.network_for("greens"), predictor.preprocess(pixels(predictor, "greens")).contiguous()
    with torch.no_grad():
        assert torch.allclose(folded(net, "greens")(x), net(x, "greens"), atol=1e-4)


def test_fine_tuning_moves_the_backbone_and_keeps_both_states(teach, tmp_path):
    path, backbones = tmp_path / "model", []
    for task in ("reds", "greens"):
        teach(task, path, **({} if backbones else {"method": "finetune"}))
        backbones.append(backbone_of(path).name)
    files = {file.name for file in (path / "backbones").iterdir()}
    assert set(backbones) < files
    assert len(files) == 3  # and the network before its first task


def test_settings_reach_the_training(teach, monkeypatch, tmp_path):
    class Stopped(Exception):
        pass

    def seen(executor, *_):
        raise Stopped(executor.settings)

    monkeypatch.setattr(learning, "TaskFit", seen)
    with pytest.raises(Stopped) as stopped:
        teach("reds", tmp_path / "model", method="ccll", epochs=3, augmentation="flip", weight_decay=0.1)
    settings = stopped.value.args[0]
    assert (settings.epochs, settings.augmentation, settings.weight_decay) == (3, "flip", 0.1)
    assert settings.lr_schedule == "step"  # the method's own, where nothing is said


@pytest.mark.parametrize("method", [*TOO_MUCH, "ewc+confit", "nonsense", "", "method.py:Mine", "confitune.methods:EWC"])
def test_a_method_that_a_bundle_cannot_go_on_with_is_refused_at_once(teach, monkeypatch, tmp_path, method):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "method.py").write_text("open('ran', 'w')")
    monkeypatch.setattr(learning, "create_backbone", lambda *_: pytest.fail("a network was made"))
    why = "needs more of earlier tasks than a bundle keeps" if method in TOO_MUCH else "is no method for a bundle"
    with pytest.raises(BundleError, match=rf"{why}; choose one of .*confit, .*best") as refused:
        teach("reds", tmp_path / "model", method=method)
    assert not set(TOO_MUCH) & {*str(refused.value).partition("choose one of ")[2].split(", ")}
    assert {file.name for file in tmp_path.iterdir()} == {"method.py"}


def test_every_other_method_of_ours_keeps_nothing_between_tasks():
    ours = [name for name, kind in METHODS.items() if kind.__module__.startswith("confitune.")]
    assert set(TOO_MUCH) < set(ours)
    assert all(create_method(name).state_dict() == {} for name in ours if name not in TOO_MUCH)


def test_options_of_another_method_are_refused(teach, tmp_path):
    with pytest.raises(BundleError, match="options of best have no effect in a bundle that learns with confit"):
        teach("reds", tmp_path / "model", options={"best": {"rank": 2}})
    with pytest.raises(ValueError, match=r"options\.best\.rank"):
        teach("reds", tmp_path / "model", options={"best": {"rank": [2]}})
    assert not (tmp_path / "model").exists()


# ---- records of others -----------------------------------------------------------------------------------------------


def renamed(path, **network):
    """The bundle with another network on record, and no way back."""
    (path / "bundle.before.json").unlink(missing_ok=True)
    edited(path / "bundle.json", network={**json.loads((path / "bundle.json").read_bytes())["network"], **network})
    return path


@pytest.mark.parametrize("method", ["x.py:Y", "./x.py:Y", "x:Y", "os", "ewc+x.py:Y", "", "confit\n", "no-such-one"])
def test_a_record_that_names_no_method_of_ours_is_refused_and_nothing_runs(taught, tmp_path, monkeypatch, method):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("x.py", "no-such-one.py"):
        (tmp_path / name).write_text("open('ran', 'w')\nclass Y: pass")
    path = renamed(taught(1), method=method)
    with pytest.raises(
        BundleError, match=r"which this confitune does not have|bundle\.json is damaged or not a bundle"
    ):
        Predictor.from_bundle(path, device="cpu")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ({"method": "best", "options": {"rank": -1}}, "options of best: rank: Input should be greater than or equal"),
        ({"method": "best", "options": {"rank": "x"}}, "options of best: rank"),
        ({"options": {"rank": 10**9}}, "options of confit: rank: Extra inputs are not permitted"),
        ({"options": {"means": ["window"]}}, r"bundle\.json is damaged or not a bundle"),
        ({"options": 3}, r"bundle\.json is damaged or not a bundle"),
        ({"method": "bn-only"}, "the shared weights are those of another network|must have shape"),
        ({"method": "best"}, "the shared weights are those of another network"),
        ({"variance": "ratio"}, r"bundle\.json is damaged or not a bundle"),
    ],
)
def test_a_record_that_does_not_belong_to_the_files_is_refused(taught, network, message):
    path = renamed(taught(1), **network)
    with pytest.raises(BundleError, match=message):
        Bundle.open(path).load_network(["reds"])


# ---- networks without batch norm -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "size", "method"),
    [
        ("test_convnext", 32, "best"),
        ("test_convnext", 32, "linear-probe"),
        ("test_convnext", 32, "bn-only"),
        ("test_vit", 160, "best"),
    ],
)
def test_a_network_without_batch_norm_learns_answers_and_guesses(teach, pixels, tmp_path, model, size, method):
    path = tmp_path / "model"
    new = {"model": model, "weights": "none", "size": size, "method": method}
    new |= {"options": {"best": {"owns": "moments"}}} if method == "best" else {}
    for task in ("reds", "greens"):
        report = teach(task, path, lr=0.003 if model == "test_vit" else 0.01, epochs=8, **new)
        new = {}
        if task == "reds":
            first = answers(path)["reds"]
    assert not report.record.only_head
    assert report.changes[0].before == report.changes[0].after
    found = answers(path)
    assert torch.equal(found["reds"], first)
    predictor = Predictor.from_bundle(path, device="cpu", unknown=False)
    images = torch.cat([pixels(predictor, task)[:2] for task in ("reds", "greens")])
    together = predictor.logits(images, ["reds", "reds", "greens", "greens"])
    for n, task in enumerate(("reds", "reds", "greens", "greens")):
        assert torch.allclose(together[n], predictor.logits(images[n : n + 1], [task])[0], atol=1e-4)
    guesses = predictor.predict(images, [None] * 4)
    assert all(answer.task in ("reds", "greens") and answer.task_confidence >= 0.5 for answer in guesses)


def test_a_size_that_the_network_does_not_take_is_refused(teach, tmp_path):
    new = {"model": "vit_tiny_patch16_224", "weights": "none", "method": "best"}
    with pytest.raises(BundleError, match="vit_tiny_patch16_224 does not accept images of 64 pixels: choose"):
        teach("reds", tmp_path / "model", size=64, **new)
    assert not (tmp_path / "model").exists()


def test_confit_says_that_it_needs_batch_norm(teach, tmp_path):
    with pytest.raises(NoBatchNormError, match=r"has no batch norm .* Choose a network with batch norm"):
        teach("reds", tmp_path / "model", model="test_convnext", weights="none")
    assert not (tmp_path / "model").exists()


def test_a_network_of_linear_layers_that_the_file_cannot_hold_is_not_built(real, tmp_path, monkeypatch):
    network = NETWORK.model_copy(update={"model": "vit_giant_patch14_224", "size": 224, "method": "linear-probe"})
    bundle = Bundle(tmp_path / "model", network)
    with changing(bundle) as change:
        record = TaskRecord(classes=("a", "b"), file=change.store_task(real, ["a", "b"]))
        change.add_task("a", record, {"patch_embed.proj.weight": torch.zeros(1408, 3, 14, 14)})
    monkeypatch.setattr("confitune.deploy.bundle.bundle.build_model", lambda name: pytest.fail("memory was taken"))
    with pytest.raises(BundleError, match="bytes cannot be the weights of vit_giant_patch14_224: they take 4"):
        bundle.load_network()
