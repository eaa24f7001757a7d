import pytest

from confitune.experiments import matching_models
from confitune.experiments.catalog import MOST, WELL_KNOWN, model_row
from confitune.nn import model_names


@pytest.mark.parametrize(
    ("name", "norms", "phase", "window"),
    [
        ("resnet18", 20, 19_148, 45_523),
        ("torchvision:resnet18", 20, 19_148, 45_523),
        ("tf_efficientnet_lite0", 49, 86_220, 255_835),
    ],
)
def test_numbers_per_task(name, norms, phase, window):
    assert model_row(name)[2:] == [str(norms), str(norms), f"{phase:,}", f"{window:,}"]


def test_parameters_are_counted_without_the_head():
    assert model_row("resnet18")[1] == "11.2M"  # 11,689,512 less 1000 x 512 + 1000


def test_batch_norms_without_a_convolution_are_not_recovered():
    _, _, norms, recovered, *_ = model_row("densenet121")
    assert 0 < int(recovered) < int(norms) == 121


@pytest.mark.parametrize(
    ("name", "problem"), [("vit_tiny_patch16_224", "has no batch norm"), ("resnet81", "no model 'resnet81'")]
)
def test_a_network_that_does_not_convert_says_why(name, problem):
    _, why = model_row(name)
    assert why.startswith(problem)


def test_without_a_pattern_the_well_known_ones():
    assert matching_models(None) == list(WELL_KNOWN)
    assert len(WELL_KNOWN) <= MOST
    assert set(WELL_KNOWN) <= set(model_names())


def test_a_pattern_is_part_of_a_name_or_has_wildcards():
    assert "resnet18" in matching_models("resnet18")
    assert "torchvision:resnet18" in matching_models("resnet18")
    assert all("resnet18" in name for name in matching_models("resnet18"))
    assert matching_models("resnet1?") == ["resnet18"]
    assert all(name.startswith("vgg") and name.endswith("_bn") for name in matching_models("vgg*_bn"))
    assert len(matching_models("vgg*_bn")) == 4
    assert matching_models("no such thing") == []


def test_short_names_come_first():
    assert matching_models("resnet")[:3] == ["resnet18", "resnet26", "resnet34"]
