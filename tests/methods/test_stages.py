import itertools
import math

import pytest

from confitune.methods import METHODS, create_method, hierarchical
from confitune.methods.stages import everything, head_only, head_then_norms

GROUPS = {"head": {"head"}, "head+norms": {"head", "norms"}, "all": {"head", "norms", "weights"}}


@pytest.mark.parametrize("epochs", [*range(1, 61), 99, 100, 150, 1001])
def test_hierarchical_stages_end_at_a_fifth_and_at_a_half(epochs):
    names = [stage.name for stage in hierarchical(epochs) for _ in range(stage.epochs)]
    assert len(names) == epochs
    fifth, half = math.floor(epochs / 5), math.floor(epochs / 2)
    expected = ["head"] * fifth + ["head+norms"] * (half - fifth) + ["all"] * (epochs - half)
    assert names == expected
    assert all(stage.epochs > 0 for stage in hierarchical(epochs))


@pytest.mark.parametrize("epochs", range(1, 61))
def test_bn_only_is_hierarchical_without_its_last_stage(epochs):
    names = [stage.name for stage in head_then_norms(epochs) for _ in range(stage.epochs)]
    assert names == ["head"] * (epochs // 5) + ["head+norms"] * (epochs - epochs // 5)


@pytest.mark.parametrize("epochs", [1, 4, 5, 10])
def test_schedules_of_one_stage(epochs):
    assert [(stage.name, stage.epochs) for stage in everything(epochs)] == [("all", epochs)]
    assert [(stage.name, stage.epochs) for stage in head_only(epochs)] == [("head", epochs)]


@pytest.mark.parametrize("schedule", [everything, hierarchical, head_only, head_then_norms])
def test_a_stage_trains_what_its_name_says(schedule):
    for stage in schedule(10):
        assert stage.trains == GROUPS[stage.name]


def test_every_method_trains_its_head_in_every_epoch():
    for method, index in itertools.product(map(create_method, METHODS), (0, 1)):
        for epochs in (1, 2, 5, 10):
            stages = method.stages(epochs, index)
            assert sum(stage.epochs for stage in stages) == epochs
            assert all("head" in stage.trains for stage in stages)
