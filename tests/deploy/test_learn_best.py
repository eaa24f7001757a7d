"""Bundles that learn with `best`: heads on pre-trained features among tasks that are trained, and nothing forgotten."""

import importlib
import shutil

import pytest
import torch

from confitune.deploy import Bundle, BundleError, Predictor, changing, check_tasks, examine, export_bundle
from confitune.deploy.bundle import TaskRecord
from confitune.deploy.folding import folded
from confitune.methods import METHODS
from confitune.nn import create_backbone
from deploy.shared import answers, backbone_of, checked, guess, settling

learning = importlib.import_module("confitune.deploy.learn")  # the package has a function of that name

SETTLED = {"reds": True, "greens": False, "stripes": True, "checks": False}


@pytest.fixture(scope="module")
def deciding():
    """Makes `best` decide as it is told whether a head is enough."""

    def deciding(patch, settles):
        patch.setattr(METHODS["best"], "settle", settling(settles))

    return deciding


@pytest.fixture(scope="module")
def once(teach, deciding, tmp_path_factory):
    """By the number of tasks of `SETTLED` the bundle that has learned so many, and the reports."""
    root, found, reports = tmp_path_factory.mktemp("best"), {}, {}
    for count, (task, settles) in enumerate(SETTLED.items(), 1):
        with pytest.MonkeyPatch.context() as patch:
            deciding(patch, settles)
            new = {} if found else {"method": "best"}
            reports[task] = teach(task, root / "model", **new)
        found[count] = shutil.copytree(root / "model", root / str(count))
    return found, reports


@pytest.fixture
def bundle(once, tmp_path):
    """Copies a bundle with so many tasks for a test to change."""
    return lambda count, name="model": Bundle.open(shutil.copytree(once[0][count], tmp_path / name))


@pytest.fixture(scope="module")
def predictor(once):
    return Predictor.from_bundle(once[0][4], device="cpu", unknown=False)


@pytest.fixture(scope="module")
def pixels(pictures, predictor):
    """New pictures of every task, decoded."""
    return {
        task: torch.stack([torch.from_numpy(predictor._pipeline(image)) for image in pictures(task)])
        for task in SETTLED
    }


def require_same_answers(before, after):
    """Of all tasks that there were before, to the bit."""
    assert before.keys() <= after.keys()
    assert all(torch.equal(before[task], after[task]) for task in before)


# ---- learning --------------------------------------------------------------------------------------------------------


def test_a_task_for_which_pretrained_features_are_enough_is_a_head(once):
    bundle, report = Bundle.open(once[0][4]), once[1]["stripes"]
    assert (report.record.only_head, report.numbers) == (True, 0)
    record = bundle.record("stripes")
    assert (record.only_head, record.epochs, record.images) == (True, 0, 24)
    state = bundle.task_state("stripes")
    assert set(state) == {*("head.weight", "head.bias", "image_size", "finished")}


def test_another_one_owns_norms_and_changes_of_weights(once):
    bundle, report = Bundle.open(once[0][2]), once[1]["greens"]
    net = bundle.load_network(["greens"])
    assert report.numbers == net.numbers_per_task == net.storage()["greens"].beside_head > 0
    record = bundle.record("greens")
    assert (report.record.only_head, record.only_head, record.epochs) == (False, False, 4)
    changes = [tensor for key, tensor in bundle.task_state("greens").items() if key.endswith(".delta.b")]
    assert len(changes) == len(net.parts["deltas"].layers) > 10
    assert all(change.abs().max() > 0 for change in changes)


def test_nothing_is_forgotten_and_the_backbone_stays(once, new_bundle):
    bundles, reports = once
    for count in (1, 2, 3):
        require_same_answers(answers(bundles[count]), answers(bundles[4]))
    assert len({backbone_of(path).name for path in bundles.values()}) == 1
    assert len(list((bundles[4] / "backbones").iterdir())) == 1
    assert len({Bundle.open(path).manifest.lineage for path in bundles.values()}) == 1
    shared = Bundle.open(bundles[4]).load_network().shared_state_dict()
    start = create_backbone(new_bundle["model"], new_bundle["weights"]).module.state_dict()
    assert shared.keys() == {key for key in start if not key.endswith("num_batches_tracked")}
    assert all(torch.equal(tensor, start[key]) for key, tensor in shared.items())
    changes = [change for report in reports.values() for change in report.changes]
    assert len(changes) == 0 + 1 + 2 + 3
    assert all(change.before == change.after for change in changes)


def test_what_the_reports_say_is_what_the_reopened_bundle_does(once):
    bundle = Bundle.open(once[0][4])
    checks = check_tasks(bundle, "cpu")
    assert checks.accuracy == pytest.approx(checked(bundle.path))
    said = {change.task: change.after for change in once[1]["checks"].changes}
    assert said == {task: bundle.record(task).checked for task in ("reds", "greens", "stripes")}
    assert sum(checks.accuracy.values()) / 4 >= 75
    assert checks.guessed > 50  # chance is 25
    assert examine(once[0][4]).findings == []


def test_tasks_are_removed_and_learned_again(bundle, teach, deciding, monkeypatch):
    opened = bundle(4)
    before = answers(opened.path)
    with changing(opened) as change:
        change.remove_task("checks")
        change.remove_task("greens")  # no task that is left owns norms
        change.rename_task("stripes", "bars")
    deciding(monkeypatch, False)
    report = teach("greens", opened.path)
    assert not report.record.only_head
    assert [change.task for change in report.changes] == ["reds", "bars"]
    deciding(monkeypatch, True)
    assert teach("checks", opened.path).record.only_head
    after = answers(opened.path)
    assert list(after) == ["reds", "bars", "greens", "checks"]
    require_same_answers({"reds": before["reds"], "bars": before["stripes"]}, after)


def test_every_task_is_trained_where_a_head_is_never_enough(teach, tmp_path):
    path = tmp_path / "model"
    for task in ("reds", "greens"):
        report = teach(task, path, method="best", options={"best": {"owns": "moments", "rank": 2}})
        assert not report.record.only_head
        if task == "reds":
            first = answers(path)
    assert [change.before == change.after for change in report.changes] == [True]
    require_same_answers(first, answers(path))
    bundle = Bundle.open(path)
    assert bundle.network.options == {"owns": "moments", "rank": 2}
    assert bundle.load_network(["reds"]).parts["deltas"].rank == 2
    for other in ({"best": {"rank": 3}}, {"best": {"owns": "head"}}):
        with pytest.raises(BundleError, match=r"learns with best \(rank=2 owns='moments'\), which cannot be changed"):
            teach("stripes", path, options=other)
    with pytest.raises(BundleError, match="options of confit have no effect in a bundle that learns with best"):
        teach("stripes", path, options={"confit": {"means": "phase"}})


@pytest.mark.parametrize(("method", "lr"), [(None, 0.003), ("best", 0.003), ("confit", 0.01)])
def test_the_learning_rate_is_the_methods_own(photos, decoded, new_bundle, monkeypatch, tmp_path, method, lr):
    class Stopped(Exception):
        pass

    def seen(executor, task, method, index):
        raise Stopped(method.name, executor.settings.lr, executor.settings.epochs)

    monkeypatch.setattr(learning, "TaskFit", seen)
    new = {name: value for name, value in new_bundle.items() if name != "method"}
    new |= {} if method is None else {"method": method}
    for given, expected in (({}, lr), ({"lr": 0.5}, 0.5)):
        settings = learning.LearnSettings(epochs=7, device="cpu", **new, **given)
        with pytest.raises(Stopped) as stopped:
            learning.learn(photos("reds"), "reds", tmp_path / "model", settings, cache_dir=decoded)
        assert stopped.value.args == (method or "best", expected, 7)


def test_the_method_cannot_be_changed(once, taught_once, teach, monkeypatch):
    monkeypatch.setattr(learning, "load_folder_task", lambda *_, **__: pytest.fail("images were read"))
    with pytest.raises(BundleError, match="has method 'best', which cannot be changed to 'confit'"):
        teach("blues", once[0][2], method="confit")
    with pytest.raises(BundleError, match="has method 'confit', which cannot be changed to 'best'"):
        teach("blues", taught_once[1], method="best")


def test_the_method_may_be_said_again(bundle, teach):
    report = teach("blues", bundle(2).path, method="best", options={"best": {"owns": "chosen"}}, epochs=1)
    assert report.task == "blues"


# ---- answering -------------------------------------------------------------------------------------------------------


def test_tasks_are_answered_alone_and_together(predictor, pixels):
    batch = torch.cat([pixels[task][:2] for task in SETTLED])
    wanted = [task for task in SETTLED for _ in range(2)]
    together = predictor.logits(batch, wanted)
    for n, task in enumerate(wanted):
        (alone,) = predictor.logits(batch[n : n + 1], [task])
        assert torch.allclose(together[n], alone, atol=1e-4)
    assert not torch.allclose(together[0], predictor.logits(batch[:1], ["greens"])[0], atol=1e-2)


def test_the_guess_tells_heads_on_the_same_features_apart(predictor, pixels):
    settled = [task for task, settles in SETTLED.items() if settles]
    for task in settled:
        found = [name for name, _ in guess(predictor, pixels[task])]
        assert found.count(task) >= 6, (task, found)
    given = predictor.predict(pixels["reds"], [None] * 8)
    assert sum(answer.classes[0][0] == f"reds {n % 2}" for n, answer in enumerate(given)) >= 6


@pytest.mark.parametrize("task", SETTLED)
def test_a_folded_task_gives_the_same_logits(predictor, pixels, task):
    net, x = predictor.network_for(task), predictor.preprocess(pixels[task]).contiguous()
    with torch.no_grad():
        plain = folded(net, task)
        assert torch.allclose(plain(x), net(x, task), atol=1e-4)
    assert not any(type(module).__module__.startswith("confitune") for module in plain.modules())


@pytest.mark.parametrize("task", ["reds", "checks"])
def test_a_task_is_exported(once, tmp_path, task):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    out, difference = export_bundle(once[0][4], task, tmp_path / "task.onnx")
    assert out.exists()
    assert difference < 1e-4


# ---- files of others -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "key", "tensor", "message"),
    [
        ("reds", "image_size", torch.tensor([64, 64]), r"learned from images of \[64, 64\] pixels, not 32"),
        ("reds", "finished", torch.tensor(False), "its task is not marked as finished"),
        ("reds", "head.bias", torch.zeros(3), r"head\.bias must have shape \(2,\)"),
        ("reds", "stem.bn.running_var", torch.ones(10**6), r"running_var must have shape|must have shape \(.*missing"),
        ("checks", ".delta.a", torch.zeros(10**6, 1), r"\.delta\.a must have shape"),
        ("checks", ".delta.b", torch.zeros(0), r"\.delta\.b must have shape"),
        ("checks", ".delta.b", None, r"\.delta\.b must have shape .* and is missing"),
        ("checks", ".running_var", None, r"\.running_var must have shape .* and is missing"),
    ],
)
def test_a_file_that_says_odd_things_is_refused(bundle, task, key, tensor, message):
    opened = bundle(4)
    state = opened.task_state(task)
    key = next((name for name in state if name.endswith(key)), key)
    odd = {**state, key: tensor}
    if tensor is None:
        del odd[key]
    with changing(opened) as change:
        change.add_task("odd", TaskRecord(classes=("a", "b"), file=change.store_task(odd, ["a", "b"])))
    net = opened.load_network(["reds"])
    with pytest.raises(BundleError, match=rf"\.safetensors is not what a bundle keeps: .*({message})"):
        opened.load_task(net, "odd")
    assert list(net.tasks) == ["reds"]


def test_a_head_alone_is_refused_where_no_pretrained_norms_are_kept(bundle, taught):
    settled, trained = bundle(1).task_state("reds"), Bundle.open(taught(1, "confit"))
    with changing(trained) as change:
        change.add_task("odd", TaskRecord(classes=("a", "b"), file=change.store_task(settled, ["a", "b"])))
    with pytest.raises(BundleError, match=r"must have shape .* and is missing; is it the task of another network"):
        trained.load_network(["odd"])
