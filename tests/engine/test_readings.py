"""What is read of an epoch: means and sums of its steps, and where its numbers went bad."""

import math
import time

import pytest
import torch
from torch import nn

from confitune.engine.readings import EpochReadings

CPU = torch.device("cpu")


def read(losses, right=None, weights=()):
    """Readings of an epoch whose steps gave these losses and right answers, and which left these weights."""
    readings = EpochReadings(len(losses), CPU)
    for step, (loss, count) in enumerate(zip(losses, right or [0] * len(losses), strict=True)):
        readings.put(step, torch.tensor([loss, float(count)]), 10)
    readings.close(iter([torch.zeros(2), *weights]))
    readings.read()
    return readings


def test_loss_is_the_mean_and_right_the_sum_over_the_steps():
    readings = read([0.5, 1.5, 4.0], [3, 0, 8])
    assert readings.loss == 2.0
    assert readings.right == 11
    assert isinstance(readings.right, int)
    assert readings.first_bad_step is None
    assert readings.weights_finite


def test_many_steps_are_summed_without_losing_digits():
    """In float32 a sum of ten thousand would be off in the fifth digit, and an odd count beyond 2**24 by one."""
    readings = read([0.1] * 10_001, [2049] * 10_001)
    assert readings.loss == pytest.approx(float(torch.tensor(0.1)), rel=1e-12)
    assert readings.right == 20_492_049


def test_what_was_put_is_a_copy():
    """A captured step gives its outcome in the same tensor each time."""
    readings, outcome = EpochReadings(2, CPU), torch.tensor([1.0, 2.0])
    readings.put(0, outcome, 4)
    outcome.copy_(torch.tensor([3.0, 5.0]))
    readings.put(1, outcome, 3)
    outcome.zero_()
    readings.close([torch.ones(1)])
    readings.read()
    assert (readings.loss, readings.right, readings.images) == (2.0, 7, 7)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("step", [0, 2, 4])
def test_the_first_bad_step_is_named(bad, step):
    losses = [1.0] * 5
    losses[step] = bad
    readings = read(losses)
    assert readings.first_bad_step == step
    assert not math.isfinite(readings.loss)
    assert readings.weights_finite


def test_of_several_bad_steps_the_first():
    assert read([1.0, math.inf, 2.0, math.nan]).first_bad_step == 1


def test_a_huge_loss_is_not_a_bad_one():
    readings = read([3e38, 3e38])
    assert readings.first_bad_step is None
    assert readings.loss == pytest.approx(3e38, rel=1e-6)  # not the infinity a float32 sum would give


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_bad_weight_anywhere_is_seen(bad, place):
    weights = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2, 1, 3, 3))]
    with torch.no_grad():
        weights[place].view(-1)[-1] = bad
    readings = read([1.0, 1.0], weights=weights)
    assert not readings.weights_finite
    assert readings.first_bad_step is None
    assert readings.loss == 1.0


@pytest.mark.parametrize("huge", [1e30, -1e30, torch.finfo(torch.float32).max])
def test_huge_weights_are_finite(huge):
    """Their squares are not: a 2-norm would report them as ruined."""
    assert read([1.0], weights=[torch.zeros(3), torch.full((100,), huge)]).weights_finite


def test_whether_weights_are_finite_is_not_counted_as_a_step():
    readings = read([2.0], [5], weights=[torch.tensor([math.nan])])
    assert (readings.loss, readings.right) == (2.0, 5)


def test_seconds_are_from_the_first_step_to_the_last():
    readings = EpochReadings(1, CPU)
    time.sleep(0.03)
    readings.put(0, torch.zeros(2), 4)
    readings.close([torch.zeros(1)])
    readings.read()
    taken = readings.seconds
    time.sleep(0.03)
    assert readings.seconds == taken
    assert 0.03 <= taken < 5
