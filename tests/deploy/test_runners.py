"""Runners answer as the modules that they were made of, with onnxruntime and without, and make room for one another."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from confitune.deploy import Bundle, Predictor, folding
from confitune.deploy.folding import Runners, folded
from confitune.methods.ccll import Calibrations
from confitune.nn import Deltas, Norms, build_model, headless, two_scales

SIZE = 48


@pytest.fixture(params=["onnxruntime", "torch"])
def runtime(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(folding, "find_spec", lambda package: None)
    else:
        pytest.importorskip("onnxruntime", reason="pip install 'confitune[export]'")
        pytest.importorskip("onnx", reason="pip install 'confitune[export]'")
    return request.param


def small(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    layers[1].running_mean.normal_()
    return nn.Sequential(*layers).eval().requires_grad_(False)


def made(found: Runners, name: str, module: nn.Module):
    """Asked for the second time."""
    assert found.find(name, lambda: module) is None
    return found.find(name, lambda: module)


@torch.no_grad()
@pytest.mark.parametrize("model", ["tf_efficientnet_lite0", "test_convnext", "torchvision:resnet18"])
def test_known_networks_agree_for_any_batch(images, runtime, model):
    torch.manual_seed(0)
    module = headless(build_model(model)).eval()
    other = copy.deepcopy(module)
    for parameter in other.parameters():
        parameter.mul_(1.05)
    found = Runners(SIZE)
    both = [(made(found, str(n), copy.deepcopy(each)), each) for n, each in enumerate((module, other))]
    for run, each in both:
        for count in (1, 2, 5):
            torch.testing.assert_close(run(images(count, SIZE)), each(images(count, SIZE)), atol=1e-4, rtol=1e-4)
    assert (both[0][0](images(2, SIZE)) - both[1][0](images(2, SIZE))).abs().max() > 1e-3


@pytest.mark.parametrize("parts", [lambda: [Norms(keep_pretrained=True), Deltas(2)], lambda: [Norms(), Calibrations()]])
@torch.no_grad()
def test_tasks_of_a_network_agree(trained, images, runtime, parts):
    net, found = trained("test_byobnet", parts(), size=SIZE).eval(), Runners(SIZE)
    for task in net.tasks:
        module = folded(net, task)
        logits = module.head(made(found, task, module.backbone)(images(3, SIZE)))
        torch.testing.assert_close(logits, net(images(3, SIZE), task), atol=1e-4, rtol=1e-4)
    assert len(found._made) == 2
    assert len(found._compilers) == 1


class Deciding(nn.Module):
    """Does something else with dark images, which no trace knows of."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean((2, 3)) * (1 if x.abs().sum() > 0 else 2)


@torch.no_grad()
def test_a_network_that_decides_on_the_way_runs_as_it_is(images, runtime):
    module = Deciding()
    run = made(Runners(SIZE), "a", module)
    for x in (images(2, SIZE), torch.zeros(2, 3, SIZE, SIZE)):
        assert torch.equal(run(x), module(x))


def test_those_used_longest_ago_make_room_by_bytes(images):
    one = sum(tensor.nbytes for tensor in small(0).state_dict().values())
    found = Runners(SIZE, most_bytes=2 * one)
    for seed in range(2):
        assert made(found, str(seed), small(seed)) is not None
    for _ in range(folding._OFTEN - 1):  # one that is asked now and then is not worth another's place
        assert found.find("2", partial(small, 2)) is None
    assert found.find("0", partial(small, 0)) is not None
    assert found.find("2", partial(small, 2)) is not None
    assert set(found._made) == {found._keys[name] for name in "02"}
    assert found.find("1", partial(small, 1)) is None


def test_equal_backbones_are_held_once(images):
    backbone, found = small(0), Runners(SIZE)
    assert len({made(found, str(n), copy.deepcopy(backbone)) for n in range(3)}) == 1
    assert len(found._made) == 1


@torch.no_grad()
def test_equal_weights_that_are_read_otherwise_are_two(images):
    """As those of linear probing, whose heads read one stage, and of guesses, which read two."""
    plain, found = small(0), Runners(SIZE)
    scales = two_scales(copy.deepcopy(plain))
    for name, module in {"pretrained": scales, "task": plain}.items():
        run, x = made(found, name, module), images(2, SIZE)
        torch.testing.assert_close(run(x), module(x), atol=1e-4, rtol=0)
    assert len(found._made) == 2


@torch.no_grad()
def test_a_predictor_answers_the_same_ever_after(taught_once, runtime):
    bundle = Bundle.open(taught_once[3])
    predictor = Predictor(bundle, device="cpu")
    chance = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (4, 3, 224, 224), dtype=torch.uint8, generator=chance)
    tasks = ["reds", "stripes", None, "reds"]
    first, *others = (predictor.predict(pixels, tasks, top=9) for _ in range(4))
    for again in others:
        for one, other in zip(first, again, strict=True):
            assert one.task == other.task
            assert dict(one.classes) == pytest.approx(dict(other.classes), abs=1e-4)
    expected = bundle.load_network(["stripes"]).eval()(predictor.preprocess(pixels), "stripes")
    torch.testing.assert_close(torch.stack(predictor.logits(pixels, ["stripes"] * 4)), expected, atol=1e-4, rtol=0)
    assert len(predictor._tasks._runners._made) >= 3


def test_a_frozen_backbone_is_held_once(teach, tmp_path):
    teach("reds", tmp_path / "model", method="best")
    predictor = Predictor.from_bundle(tmp_path / "model", device="cpu")
    predictor.predict(torch.zeros(1, 3, 224, 224, dtype=torch.uint8), [None])
    assert predictor._tasks._pretrained is None
