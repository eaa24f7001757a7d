import math

import pytest

from confitune.methods import METHODS, head_and_norm, head_only, hierarchical, plain

PARTS = {"head": {"head"}, "head+norm": {"head", "norm"}, "all": {"head", "norm", "conv"}}


@pytest.mark.parametrize("epochs", [*range(1, 61), 99, 100, 150, 1001])
def test_hierarchical_stages_end_at_a_fifth_and_at_a_half(epochs):
    names = [stage.name for stage in hierarchical(epochs) for _ in range(stage.epochs)]
    assert len(names) == epochs
    fifth, half = math.floor(epochs / 5), math.floor(epochs / 2)
    expected = ["head"] * fifth + ["head+norm"] * (half - fifth) + ["all"] * (epochs - half)
    assert names == expected
    assert all(stage.epochs > 0 for stage in hierarchical(epochs))


@pytest.mark.parametrize("epochs", range(1, 61))
def test_bn_only_is_hierarchical_without_its_last_stage(epochs):
    names = [stage.name for stage in head_and_norm(epochs) for _ in range(stage.epochs)]
    assert names == ["head"] * (epochs // 5) + ["head+norm"] * (epochs - epochs // 5)


@pytest.mark.parametrize("epochs", [1, 4, 5, 10])
def test_schedules_of_one_stage(epochs):
    assert [(stage.name, stage.epochs) for stage in plain(epochs)] == [("all", epochs)]
    assert [(stage.name, stage.epochs) for stage in head_only(epochs)] == [("head", epochs)]


@pytest.mark.parametrize("schedule", [plain, hierarchical, head_only, head_and_norm])
def test_a_stage_trains_what_its_name_says(schedule):
    for stage in schedule(10):
        assert stage.trains == PARTS[stage.name]


def test_every_method_trains_its_head_in_every_epoch():
    for method in METHODS.values():
        for epochs in (1, 2, 5, 10):
            stages = method.schedule(epochs)
            assert sum(stage.epochs for stage in stages) == epochs
            assert all("head" in stage.trains for stage in stages)
