"""Bundles that learn with `best`: tasks that keep the pre-trained state among tasks that are trained."""

import importlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from confitune.methods.probe import Probe

from confitune.deploy import Bundle, BundleError, Predictor, TaskRecord, check_tasks, export_bundle
from confitune.deploy.fitting import Fit, layers_of, logits_and_distances
from confitune.deploy.folding import folded
from confitune.deploy.format import Network, head_from_bytes, head_to_bytes
from confitune.engine import TrainSettings
from confitune.experiments import examine
from confitune.methods import METHODS
from confitune.nn import create_backbone
from confitune.tasks import load_folder_task

learning = importlib.import_module("confitune.deploy.learn")  # the package has a function of that name

SETTLED = {"reds": True, "stripes": True, "greens": False, "checks": True}
OLD_FIELDS = {"model", "means", "mean", "std", "size", "weights", "weights_sha256"}


@pytest.fixture(scope="module")
def deciding():
    """Makes the probe decide as it is told."""

    def deciding(patch, settles):
        patch.setattr(Probe, "may_stay", lambda self, pretrained, own=0.0: settles)

    return deciding


@pytest.fixture(scope="module")
def once(teach, deciding, tmp_path_factory):
    """By the number of tasks of `SETTLED` the bundle that has learned so many, and the reports."""
    root, found, reports = tmp_path_factory.mktemp("best"), {}, {}
    for count, (task, settles) in enumerate(SETTLED.items(), 1):
        with pytest.MonkeyPatch.context() as patch:
            deciding(patch, settles)
            new = {} if found else {"method": None}
            reports[task] = teach(task, root / "model", lr=None, **new)
        found[count] = shutil.copytree(root / "model", root / str(count))
    return found, reports


@pytest.fixture
def bundle(once, tmp_path):
    """Copies a bundle with so many tasks for a test to change."""
    return lambda count, name="model": Bundle.open(shutil.copytree(once[0][count], tmp_path / name))


@pytest.fixture(scope="module")
def predictor(once):
    return Predictor.from_bundle(once[0][4], device="cpu", unknown_above=float("inf"))


@pytest.fixture(scope="module")
def pixels(pictures, predictor):
    """New pictures of every task, decoded."""
    return {
        task: torch.stack([torch.from_numpy(predictor._pipeline(image)) for image in pictures(task)])
        for task in SETTLED
    }


def training_inputs(photos, network, task):
    """What a task was learned from, as the network takes it."""
    images = load_folder_task(photos(task), task, mean=network.mean, std=network.std, size=network.size)
    return images.inputs(images.train.batch(torch.arange(len(images.train)))[0])


def channel_means(net, x, task):
    """Of what every batch norm is given: [images, channels], layer by layer."""
    seen = {}
    hooks = [
        norm.register_forward_pre_hook(lambda norm, args: seen.update({norm: args[0].mean((2, 3))}))
        for norm in layers_of(net)
    ]
    with torch.no_grad():
        net.eval()(x, task)
    for hook in hooks:
        hook.remove()
    return seen


# ---- learning --------------------------------------------------------------------------------------------------------


def test_a_new_bundle_is_made_for_best(once):
    network = Bundle.open(once[0][1]).network
    expected = {"means": "window", "rank": 2, "statistics": "pass", "variance": "ratio", "keep_pretrained": True}
    assert network.options == METHODS["best"].network == expected
    assert network.method == "best"
    net = Bundle.open(once[0][1]).load_network(["reds"])
    assert (net.means, net.rank, net.statistics, net.variance) == ("window", 2, "pass", "ratio")
    assert net.pretrained.images == 16


def test_a_task_that_keeps_the_pretrained_state_is_a_head_and_nothing_moves(once, new_bundle):
    bundles, reports = once
    bundle, report = Bundle.open(bundles[2]), reports["stripes"]
    assert (report.only_head, report.numbers) == (True, 0)
    assert (bundle.record("stripes").epochs, bundle.record("stripes").images) == (0, 24)
    state = bundle.task_state("stripes")
    assert {key for key in state if not key.startswith("fit.")} == {
        *("head.weight", "head.bias", "image_size", "finished", "pretrained")
    }
    start = create_backbone(new_bundle["model"], new_bundle["weights"]).module.state_dict()
    shared = bundle.load_network().shared_state_dict()
    convolutions = [key for key in shared if key in start]
    assert len(convolutions) > 10
    assert all(torch.equal(shared[key], start[key]) for key in convolutions)


def test_one_that_is_trained_after_it_moves_nothing_that_the_others_use(once):
    bundles, reports = once
    before, after = Bundle.open(bundles[2]), Bundle.open(bundles[3])
    report = reports["greens"]
    assert (report.only_head, after.record("greens").epochs) == (False, 4)
    assert report.numbers == after.load_network(["greens"]).numbers_per_task > 0
    assert {name: after.record(name) for name in before.tasks} == dict(before.tasks)
    was, now = (bundle.load_network().shared_state_dict() for bundle in (before, after))
    weights = [key for key in now if key.endswith("conv.weight")]
    assert weights
    ratios = [key for key in now if key.endswith("variance_ratio")]
    assert ratios
    assert all(torch.equal(was[key], now[key]) for key in (*weights, *ratios))
    assert [change.task for change in report.changes] == ["reds", "stripes"]
    assert all(change.before == change.after for change in report.changes)


def test_what_the_reports_say_is_what_the_reopened_bundle_does(once):
    bundle = Bundle.open(once[0][4])
    checks = check_tasks(bundle, "cpu")
    assert checks.accuracy == pytest.approx(dict(bundle.accuracy))
    said = {change.task: change.after for change in once[1]["checks"].changes}
    assert said == {task: bundle.accuracy[task] for task in ("reds", "stripes", "greens")}
    assert min(checks.accuracy.values()) >= 75
    assert checks.guessed > 50  # chance is 25
    assert examine(once[0][4]).findings == []


def test_learning_goes_on_after_the_last_task_is_removed(bundle, teach, deciding, monkeypatch):
    opened = bundle(4)
    with opened.changing():
        opened.remove_task("checks")
        opened.remove_task("greens")
        opened.rename_task("stripes", "bars")
    deciding(monkeypatch, False)
    report = teach("blues", opened.path)
    assert not report.only_head
    assert list(Bundle.open(opened.path).tasks) == ["reds", "bars", "blues"]
    assert [change.task for change in report.changes] == ["reds", "bars"]
    assert min(check_tasks(Bundle.open(opened.path), "cpu").accuracy.values()) >= 50


def test_a_settled_task_is_copied_with_its_backbone_and_without_its_task(bundle, pixels):
    source, target = bundle(4, "source"), bundle(4, "target")
    with target.changing():
        target.remove_task("reds")
        target.copy_task(source, "reds", "rot")
    ours, theirs = Predictor(target, device="cpu"), Predictor(source, device="cpu")
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            ours.logits(pixels["reds"], ["rot"] * 8), theirs.logits(pixels["reds"], ["reds"] * 8), strict=True
        )
    )
    assert "pretrained" in target.task_state("rot")


def test_phase_means_may_be_asked_for(teach, deciding, monkeypatch, tmp_path):
    deciding(monkeypatch, True)
    report = teach("reds", tmp_path / "model", method=None, means="phase")
    assert report.only_head
    assert Bundle.open(tmp_path / "model").network.options == {**METHODS["best"].network, "means": "phase"}


@pytest.mark.parametrize(("method", "lr"), [(None, 0.03), ("best", 0.03), ("confit", 0.01)])
def test_the_learning_rate_is_the_methods_own(teach, monkeypatch, tmp_path, method, lr):
    class Stopped(Exception):
        pass

    def seen(net, task, method, settings, *_):
        raise Stopped(method.name, settings.lr, settings.epochs)

    monkeypatch.setattr(learning, "TaskFit", seen)
    for given, expected in ((None, lr), (0.5, 0.5)):
        with pytest.raises(Stopped) as stopped:
            teach("reds", tmp_path / "model", method=method, lr=given, epochs=7)
        assert stopped.value.args == (method or "best", expected, 7)
    assert lr == METHODS[method or "best"].settings.get("lr", TrainSettings().lr)


def test_the_method_cannot_be_changed(once, taught_once, teach, monkeypatch):
    monkeypatch.setattr(learning, "load_folder_task", lambda *_, **__: pytest.fail("images were read"))
    with pytest.raises(BundleError, match="has method 'best', which cannot be changed to 'confit'"):
        teach("greens", once[0][2], method="confit")
    with pytest.raises(BundleError, match="has method 'confit', which cannot be changed to 'best'"):
        teach("greens", taught_once[1], method="best")


def test_the_method_may_be_said_again(bundle, teach):
    assert teach("greens", bundle(2).path, method="best", epochs=1).task == "greens"


# ---- bundles from before ---------------------------------------------------------------------------------------------


def test_a_bundle_of_confit_has_no_field_that_it_had_not_before(taught, teach):
    path = taught(1)
    for _ in range(2):
        data = (path / "bundle.json").read_bytes()
        assert json.loads(data)["network"].keys() == OLD_FIELDS
        assert head_to_bytes(head_from_bytes(data, "here")) == data
        bundle = Bundle.open(path)
        assert bundle.network.method == "confit"
        assert bundle.network.options == {
            **{"means": "window", "statistics": "running", "variance": "stored", "rank": None},
            "keep_pretrained": False,
        }
        if len(bundle.tasks) == 1:
            report = teach("stripes", path, epochs=1)
    assert not report.only_head
    assert report.numbers == Bundle.open(path).load_network().numbers_per_task == 6035


def test_a_field_is_written_where_it_says_something(once):
    written = json.loads((Path(once[0][1]) / "bundle.json").read_bytes())["network"]
    assert written.keys() == OLD_FIELDS | {"statistics", "variance", "rank", "keep_pretrained"}
    assert Network.model_validate(written) == Bundle.open(once[0][1]).network


# ---- answering -------------------------------------------------------------------------------------------------------


def test_tasks_are_answered_alone_and_together(predictor, pixels):
    tasks = list(SETTLED)
    batch = torch.cat([pixels[task][:2] for task in tasks])
    wanted = [task for task in tasks for _ in range(2)]
    together = predictor.logits(batch, wanted)
    for n, task in enumerate(wanted):
        (alone,) = predictor.logits(batch[n : n + 1], [task])
        assert torch.allclose(together[n], alone, atol=1e-4)


def test_the_guess_tells_settled_tasks_apart(predictor, pixels, once):
    for guessing in (predictor, Predictor.from_bundle(once[0][2], device="cpu", unknown_above=float("inf"))):
        settled = [task for task in guessing.tasks if SETTLED[task]]
        for task in settled:
            found = [name for name, _ in guessing.guess(pixels[task], among=settled)]
            assert found.count(task) >= 6, (task, found)
        answers = predictor.predict(pixels["reds"], [None] * 8, among=settled)
        assert sum(answer.classes[0][0] == f"reds {n % 2}" for n, answer in enumerate(answers)) >= 6


def test_a_reference_is_how_far_training_images_are_from_the_shared_means(once, photos):
    bundle = Bundle.open(once[0][2])
    net = bundle.load_network(["reds", "stripes"])
    references = {}
    for task in ("reds", "stripes"):
        x = training_inputs(photos, bundle.network, task)
        means = channel_means(net, x, task)
        expected = torch.cat([seen.mean(0) - norm.running_mean for norm, seen in means.items()])
        references[task] = bundle.task_state(task)["fit.reference"]
        assert torch.allclose(references[task], expected, atol=1e-4)
        assert expected.abs().max() > 0.1
        distances = logits_and_distances(net, x, task, references[task])[1]
        norm, seen = next(iter(means.items()))
        away = (seen - seen.mean(0)).square() / (norm.running_var + norm.eps)
        assert torch.allclose(distances[:, 0], away.mean(1).log(), atol=1e-3)
        fit = Fit.from_state(bundle.task_state(task), [norm.num_features for norm in layers_of(net)])
        assert torch.allclose(distances.mean(0), fit.mean, atol=1e-3)
    assert not torch.allclose(references["reds"], references["stripes"], atol=0.1)


def test_a_trained_task_has_no_reference(once):
    assert "fit.reference" not in Bundle.open(once[0][3]).task_state("greens")


def test_a_reference_follows_when_the_weights_move(once, photos):
    bundle = Bundle.open(once[0][1])  # the shared means were measured on this task's images alone
    net, reference = bundle.load_network(["reds"]), bundle.task_state("reds")["fit.reference"]
    x = training_inputs(photos, bundle.network, "reds")
    (norm, then), *_ = channel_means(net, x, "reds").items()
    stayed = norm.running_mean.clone()
    with torch.no_grad():
        norm.conv.weight.mul_(1.2).add_(0.05)
    now = channel_means(net, x, "reds")[norm].mean(0)
    assert (now - then.mean(0)).abs().max() > 0.1
    # It reads images, which are what they were: what is recovered is exact.
    assert torch.allclose(norm.running_mean + reference[: len(now)], now, atol=1e-4)
    assert not torch.allclose(stayed + reference[: len(now)], now, atol=0.1)


def test_a_fit_is_not_used_without_its_reference_or_with_another_networks(once):
    state = dict(Bundle.open(once[0][2]).task_state("reds"))
    channels = [norm.num_features for norm in layers_of(Bundle.open(once[0][2]).load_network())]
    assert len(Fit.from_state(state, channels).reference) == sum(channels)
    assert Fit.from_state(state, [*channels[:-1], channels[-1] + 1]) is None
    assert Fit.from_state({**state, "fit.reference": state["fit.reference"][None]}, channels) is None
    del state["fit.reference"]
    assert Fit.from_state(state, channels) is None


@pytest.mark.parametrize("task", ["reds", "greens", "checks"])
def test_a_folded_network_gives_the_same_logits(predictor, pixels, task):
    net, x = predictor.network_for(task), predictor.preprocess(pixels[task]).contiguous()
    with torch.no_grad():
        assert torch.allclose(folded(net, task)(x), net(x, task), atol=1e-3)


def test_a_settled_task_is_exported(once, tmp_path):
    out, difference = export_bundle(once[0][4], "reds", "torch-export", tmp_path / "reds.pt2")
    assert out.exists()
    assert difference < 1e-3


# ---- files of others -------------------------------------------------------------------------------------------------

FLAG = "does not say clearly whether its task shares the state of pre-training"


@pytest.mark.parametrize(
    ("key", "tensor", "message"),
    [
        ("pretrained", torch.tensor(False), FLAG),
        ("pretrained", torch.tensor(1), FLAG),
        ("pretrained", torch.tensor(float("nan")), FLAG),
        ("pretrained", torch.ones(1, dtype=torch.bool), FLAG),
        ("pretrained", torch.ones(1000, dtype=torch.bool), FLAG),
        ("pretrained", None, r"must have shape \(.*\) and is missing"),
        ("image_size", torch.tensor([64, 64]), r"learned from images of \[64, 64\] pixels, not 32"),
        ("finished", torch.tensor(False), "does not say that its task was finished"),
        ("stem.input_size", torch.tensor([4, 4, 1]), r"and yet it has stem\.input_size of its own"),
        ("head.bias", torch.zeros(3), r"head\.bias must have shape \(2,\)"),
    ],
)
def test_a_file_that_says_odd_things_of_the_shared_state_is_refused(bundle, key, tensor, message):
    opened = bundle(1)
    odd = {**opened.task_state("reds"), key: tensor}
    if tensor is None:
        del odd[key]
    with opened.changing():
        opened.add_task("odd", TaskRecord(classes=("a", "b"), file=opened.store_task(odd, ["a", "b"])))
    net = opened.load_network(["reds"])
    with pytest.raises(BundleError, match=rf"\.safetensors: .*{message}"):
        opened.load_task(net, "odd")
    assert list(net.tasks) == ["reds"]


def test_a_task_on_the_shared_state_is_refused_where_none_is_kept(bundle, taught):
    settled, trained = bundle(1).task_state("reds"), Bundle.open(taught(1, "confit"))
    with trained.changing():
        trained.add_task("odd", TaskRecord(classes=("a", "b"), file=trained.store_task(settled, ["a", "b"])))
    with pytest.raises(BundleError, match="shares the pre-trained state, which this network does not keep"):
        trained.load_network(["odd"])


@pytest.mark.parametrize(
    ("ending", "tensor", "message"),
    [
        ("images", torch.tensor(-1), "was measured on -1 images"),
        ("images", torch.tensor(2**62), "was measured on 4611686018427387904 images"),
        ("images", torch.tensor(3.0), r"was measured on 3\.0 images"),
        ("images", torch.tensor(True), "was measured on True images"),
        ("images", torch.ones(9, dtype=torch.int64), "was measured on very many numbers of images"),
        (".input_size", torch.tensor([10**9, 4]), "planes which no image of 32 pixels leads to"),
        (".input_size", torch.tensor([4, -1]), "planes which no image of 32 pixels leads to"),
        (".input_size", torch.tensor([4.0, 4.0]), "nothing that can be understood of the planes"),
        (".input_size", torch.tensor([4, 4, 4]), "nothing that can be understood of the planes"),
    ],
)
def test_a_backbone_that_says_odd_things_of_the_shared_state_is_refused(bundle, ending, tensor, message):
    opened = bundle(1)
    shared = opened.load_network().shared_state_dict()
    key = next(key for key in shared if key.startswith("pretrained.") and key.endswith(ending))
    with opened.changing():
        record = opened.record("reds")
        opened.add_task("again", record, {**shared, key: tensor})
    with pytest.raises(BundleError, match=rf"backbones.*\.safetensors: .*{message}"):
        opened.load_network()
