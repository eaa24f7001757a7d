"""Each image of a mixed batch is answered as its task answers alone, whatever tasks own, and tasks come and go."""

import pytest
import torch
from torch import Tensor, nn

from confitune.deploy import BundleError, Predictor, mixed
from confitune.deploy.mixed import CannotMixError, Captured, MixedNet
from confitune.methods import METHODS
from confitune.methods.ccll import Calibrations
from confitune.nn import ContinualNet, Deltas, Moments, Norms, XconvNorms, build_model, headless, two_scales
from deploy.shared import damage_task, settling

SIZE = 64


def of_best(**options):
    return [Norms(moments="pretrained", keep_pretrained=True), Moments(), Deltas(**options)]


class Small(nn.Module):
    """Convolutions of all kinds: strides, dilation, groups, borders that are mirrored, one without a window."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 5, stride=2, padding=2),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.Conv2d(16, 24, 3, dilation=2, padding="same", bias=False),
            nn.BatchNorm2d(24, affine=False),
            nn.ReLU(),
            nn.Conv2d(24, 24, 3, padding=1, groups=4),
            nn.Conv2d(24, 48, 3, padding=(1, 0), padding_mode="reflect", groups=24),
            nn.BatchNorm2d(48),
            nn.ReLU(),
            nn.Conv2d(48, 48, 1, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(48, 40),
            nn.BatchNorm1d(40),
            nn.Linear(40, 40, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


NETWORKS = {
    "best": ("resnet18", of_best),
    "ConFiT": ("resnet18", lambda: [XconvNorms()]),
    "depthwise": ("mobilenetv2_035", of_best),
    "same padding": ("tf_efficientnet_lite0", lambda: [Norms(), Deltas()]),
    "LayerNorm": ("convnext_atto", of_best),
    "torchvision's": ("torchvision:shufflenet_v2_x0_5", of_best),
    "whole windows": ("test_byobnet", lambda: of_best(rank=2, products=False)),
    "all kinds": (Small, lambda: of_best(rank=2)),
    "all kinds, whole windows": (Small, lambda: [Norms(), Deltas(1, products=False)]),
    "two scales": (lambda: two_scales(headless(build_model("test_byobnet"))), of_best),
    "heads": ("test_byobnet", list),
}


@pytest.fixture
def learned(trained, images):
    """Makes a network, in evaluation mode, with tasks that own all parts, and of best's one more that owns a head."""

    def learned(model, parts):
        net = trained(model if isinstance(model, str) else model(), parts, size=SIZE)
        if "moments" in net.parts:
            net.add_task("fish", 6)
            net.finish_task(owns=["head"])
        return net.eval()

    return learned


def mixed_of(net: ContinualNet, room: int = 4) -> MixedNet:
    mixed = MixedNet(net, (3, SIZE, SIZE), room, 8)
    for task in net.tasks:
        load(mixed, net, task)
    return mixed


def load(mixed: MixedNet, net: ContinualNet, task: str) -> None:
    net.prepare(task)
    mixed.load(task, net)


@torch.no_grad()
def assert_as_alone(net: ContinualNet, logits: Tensor, x: Tensor, tasks: list[str]) -> None:
    for n, task in enumerate(tasks):
        expected = net(x[n : n + 1], task)[0]
        torch.testing.assert_close(logits[n, : len(expected)], expected, atol=1e-4, rtol=1e-4)
        assert (logits[n, len(expected) :] == -torch.inf).all()


@pytest.mark.parametrize("name", NETWORKS)
def test_a_mixed_batch_equals_one_image_at_a_time(learned, images, name):
    model, parts = NETWORKS[name]
    net = learned(model, parts())
    mixed, x = mixed_of(net), images(6, SIZE)
    tasks = (["birds", *net.tasks, "pets"] * 2)[:6]
    features, logits = mixed(x, tasks)
    assert logits.shape == (6, 8)
    assert features.shape == (6, net.head.features)
    assert_as_alone(net, logits, x, tasks)
    # Not an agreement of tasks that give the same.
    assert (mixed(x, tasks[::-1])[0] - features).abs().max() > 1e-3 or name == "heads"


def test_tasks_come_and_go_at_fixed_addresses(learned, images):
    net = learned("test_byobnet", of_best())
    mixed, x = mixed_of(net, room=3), images(3, SIZE)
    everything = [mixed._table, *mixed._backbone.state_dict().values()]
    places = [tensor.data_ptr() for tensor in everything]
    mixed.drop("pets")
    mixed.drop("pets")
    assert "pets" not in mixed
    with net.as_pretrained():
        mixed.load(None, net)
        expected = net.backbone(x)
    torch.testing.assert_close(mixed(x, [None] * 3)[0], expected, atol=1e-4, rtol=1e-4)
    mixed.drop(None)
    load(mixed, net, "pets")
    load(mixed, net, "birds")  # over its own row
    tasks = ["pets", "birds", "fish"]
    assert_as_alone(net, mixed(x, tasks)[1], x, tasks)
    assert [tensor.data_ptr() for tensor in everything] == places


class Windows(nn.Module):
    """Cuts images into four, as networks with window attention do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        windows = x.unfold(2, 32, 32).unfold(3, 32, 32).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
        return self.norm(self.conv(windows)).mean((2, 3)).unflatten(0, (len(x), -1)).mean(1)


@pytest.mark.parametrize(
    ("model", "parts", "why"),
    [
        (
            "test_byobnet",
            lambda: [Norms(), Calibrations()],
            "tasks own calibrations, which all images of a batch share",
        ),
        (Windows, lambda: [Norms()], "Windows does not take images one by one: norm sees 20 entries of 5 images"),
    ],
)
def test_what_cannot_be_mixed_says_why(learned, model, parts, why):
    with pytest.raises(CannotMixError, match=why):
        mixed_of(learned(model, parts()))


def test_without_a_compiler_there_are_no_kernels(monkeypatch, caplog):
    """As in a container that has none: torch's own operators do it then."""
    module = type("module", (), {"inner": lambda *inputs: _fail(), "finished": None})
    monkeypatch.setattr(mixed, "find_spec", lambda name: True)
    monkeypatch.setattr(mixed, "import_module", lambda name: module)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: torch.empty(shape))
    assert mixed._kernels.__wrapped__() is None
    assert "take longer than they could: Failed to find C compiler" in caplog.text
    monkeypatch.setattr(mixed, "find_spec", lambda name: None)
    assert mixed._kernels.__wrapped__() is None


def _fail():
    raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nmore")


class Twice(nn.Module):
    """What is between a convolution and its norm, or between that and its ReLU, goes somewhere else, too."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.conv, self.norm, self.relu = where, nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        convolved = self.conv(x)
        normalised = self.norm(convolved)
        other = {"convolution": convolved, "norm": normalised, "nowhere": 0}[self.where]
        return (self.relu(normalised) + other).mean((2, 3))


@pytest.mark.parametrize("where", ["convolution", "norm", "nowhere"])
def test_norms_finish_convolutions_that_nobody_else_reads(learned, images, where):
    net = learned(lambda: Twice(where), of_best(rank=1))
    mixed, x = mixed_of(net), images(3, SIZE)
    assert mixed._norm_after == ({"conv": "norm"} if where == "nowhere" else {})
    tasks = ["birds", "pets", "fish"]
    assert_as_alone(net, mixed(x, tasks)[1], x, tasks)


def test_of_a_resnet_norms_finish_all_convolutions_and_every_first_relu(learned):
    mixed = mixed_of(learned("resnet18", of_best()))
    assert len(mixed._norm_after) == 20
    blocks = {f"layer{stage}.{block}.bn1" for stage in range(1, 5) for block in range(2)}
    assert mixed._rectified == {"bn1"} | blocks  # the others are followed by an addition


# ---- a predictor that mixes, as on a GPU -----------------------------------------------------------------------------


@pytest.fixture
def mixing():
    """Makes a predictor on the CPU that does what one on a GPU does, but for capturing."""

    def mixing(path, **options):
        predictor = Predictor.from_bundle(path, device="cpu", **options)
        load = predictor._tasks._load

        def load_mixing(bundle):
            load(bundle)
            predictor._tasks._runners, predictor._tasks.mixed = None, predictor._tasks._mixes(bundle)

        predictor._tasks._load = load_mixing
        predictor._tasks._load(predictor.bundle)
        return predictor

    return mixing


@pytest.fixture(scope="module")
def pixels():
    chance = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (7, 3, 224, 224), dtype=torch.uint8, generator=chance)


def assert_same_answers(first, second):
    for one, other in zip(first, second, strict=True):
        assert (one.task, one.version) == (other.task, other.version)
        assert dict(one.classes) == pytest.approx(dict(other.classes), abs=1e-4)
        assert one.task_confidence == pytest.approx(other.task_confidence, abs=1e-4)
        assert {other[:2] for other in one.others} == {other[:2] for other in other.others}


@pytest.mark.parametrize("ready", [2, 256])
def test_a_predictor_that_mixes_answers_the_same(taught_once, mixing, pixels, ready):
    plain, mixed = Predictor.from_bundle(taught_once[6], device="cpu"), mixing(taught_once[6], ready=ready)
    tasks = ["reds", "stripes", "greens", "reds", "checks", "blues", "stripes"]
    for found, expected in zip(mixed.logits(pixels, tasks), plain.logits(pixels, tasks), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    some = [*tasks[:4], None, None, None]
    for given, top in ((tasks, 9), (some, 9), ([None] * 7, 9), (tasks[:1] * 7, 1)):
        assert_same_answers(mixed.predict(pixels, given, top), plain.predict(pixels, given, top))
    assert set(mixed._tasks._heads) == set(mixed._tasks.net.tasks) == set(mixed._tasks.mixed._rows) - {None}
    assert 2 <= len(mixed._tasks._heads) <= ready


def test_heads_read_what_the_guess_has_read(teach, tmp_path, mixing, pixels, monkeypatch):
    for task, only_head in (("reds", True), ("greens", False), ("blues", True)):
        monkeypatch.setattr(METHODS["best"], "settle", settling(only_head=only_head))
        teach(task, tmp_path / "model", method="best")
    plain, mixed = Predictor.from_bundle(tmp_path / "model", device="cpu"), mixing(tmp_path / "model")
    for tasks in (["reds", "greens", "blues", "greens", "reds", "blues", "blues"], [None] * 7):
        assert_same_answers(mixed.predict(pixels, tasks, 9), plain.predict(pixels, tasks, 9))
    passes, forward = [], mixed._tasks.mixed._forward
    mixed._tasks.mixed._forward = lambda x, rows: passes.append(rows.tolist()) or forward(x, rows)
    answers = mixed.predict(pixels, [None] * 7)
    pretrained, greens = mixed._tasks.mixed._rows[None], mixed._tasks.mixed._rows.get("greens")
    assert passes[0] == [pretrained] * 7
    assert all(set(rows) == {greens} for rows in passes[1:])
    assert len(passes) <= 2
    assert len(answers) == 7


def test_a_changed_bundle_is_followed(taught, teach, mixing, pixels):
    """ConFiT moves the shared weights."""
    path = taught(1)
    mixed = mixing(path)
    mixed.predict(pixels, ["reds"] * 7)
    teach("stripes", path)
    assert mixed.renew()
    tasks = ["reds", "stripes"] * 3 + ["reds"]
    assert_same_answers(mixed.predict(pixels, tasks), Predictor.from_bundle(path, device="cpu").predict(pixels, tasks))


def test_a_damaged_task_is_refused_and_guessed_without(taught, mixing, pixels):
    path = taught(3)
    damage_task(path, "stripes")
    plain, mixed = Predictor.from_bundle(path, device="cpu"), mixing(path)
    with pytest.raises(BundleError, match="is damaged"):
        mixed.predict(pixels, ["reds", "stripes"] * 3 + ["reds"])
    assert_same_answers(mixed.predict(pixels, [None] * 7, 9), plain.predict(pixels, [None] * 7, 9))
    assert_same_answers(mixed.predict(pixels, ["reds"] * 7), plain.predict(pixels, ["reds"] * 7))


def test_outputs_that_are_not_finite_name_their_task(taught_once, mixing, pixels):
    mixed = mixing(taught_once[3])
    mixed.logits(pixels[:3], ["reds", "stripes", "greens"])
    mixed._tasks.mixed._table[mixed._tasks.mixed._rows["stripes"]].fill_(torch.nan)
    with pytest.raises(BundleError, match="task 'stripes' gives NaN or infinite outputs"):
        mixed.logits(pixels[:3], ["reds", "stripes", "greens"])


def test_a_network_that_cannot_mix_is_noted_and_answers_task_by_task(teach, tmp_path, mixing, pixels, caplog):
    for task in ("reds", "stripes"):
        teach(task, tmp_path / "model", method="ccll")
    mixed = mixing(tmp_path / "model")
    assert mixed._tasks.mixed is None
    assert "tasks own calibrations, which all images of a batch share. Images of several tasks" in caplog.text
    plain, tasks = Predictor.from_bundle(tmp_path / "model", device="cpu"), ["reds", "stripes", "reds"]
    assert_same_answers(mixed.predict(pixels[:3], tasks), plain.predict(pixels[:3], tasks))


# ---- on a GPU --------------------------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def exact(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # ten bits would hide what is compared


@needs_gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", ["best", "ConFiT", "depthwise", "LayerNorm", "all kinds", "two scales"])
def test_captured_batches_of_all_sizes_agree_with_the_cpu(learned, images, name, caplog):
    net = learned(NETWORKS[name][0], NETWORKS[name][1]())
    on_cpu, mixed = mixed_of(net), mixed_of(net.to("cuda"))
    for count in (1, 3, 8, 20, 300):
        x, tasks = images(count, SIZE), (["birds", "pets", "pets"] * count)[:count]
        for again in range(2):
            found, expected = mixed(x.to("cuda"), tasks), on_cpu(x, tasks)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one.cpu(), other, atol=1e-3, rtol=1e-3, msg=lambda m, n=again: f"{n}: {m}")
        mixed.drop("birds")  # and back, perhaps into another row
        mixed.drop("pets")
        load(mixed, net, "birds")
        load(mixed, net, "pets")
    assert all(isinstance(run, Captured) for run in mixed._passes.values())
    assert "take longer" not in caplog.text


@needs_gpu
@pytest.mark.usefixtures("exact")
def test_a_network_that_waits_answers_kernel_by_kernel(learned, images, caplog):
    class Waits(Small):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2 if x.sum().item() > 1e30 else 1)

    net = learned(Waits, of_best(rank=2))
    on_cpu, mixed, x, tasks = mixed_of(net), mixed_of(net.to("cuda")), images(3, SIZE), ["birds", "pets", "pets"]
    torch.testing.assert_close(mixed(x.cuda(), tasks)[1].cpu(), on_cpu(x, tasks)[1], atol=1e-3, rtol=1e-3)
    assert "batches of 8 images take longer than they could" in caplog.text
    assert torch.randn(2, device="cuda").isfinite().all()  # random numbers are drawn as before


@needs_gpu
@pytest.mark.usefixtures("exact")
def test_a_predictor_on_a_gpu_answers_as_on_a_cpu(taught, teach, pixels):
    path = taught(3)
    cpu, gpu = (Predictor.from_bundle(path, device=device) for device in ("cpu", "cuda"))
    for tasks in (["reds", "stripes", "greens", "reds", None, None, "stripes"], [None] * 7, ["reds"] * 7):
        for one, other in zip(gpu.predict(pixels, tasks, 9), cpu.predict(pixels, tasks, 9), strict=True):
            assert dict(one.classes) == pytest.approx(dict(other.classes), abs=1e-2)
    teach("checks", path)
    assert cpu.renew()
    assert gpu.renew()
    tasks = ["checks", "reds", "stripes"]
    for one, other in zip(gpu.logits(pixels[:3], tasks), cpu.logits(pixels[:3], tasks), strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)
