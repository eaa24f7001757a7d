import itertools
import math

import pytest
import torch
from pydantic import ValidationError

from confitune.engine import TrainSettings
from confitune.errors import ConfituneError


def test_defaults_are_the_papers():
    settings = TrainSettings()
    assert (settings.optimizer, settings.lr, settings.momentum, settings.weight_decay) == ("sgd", 0.01, 0.0, 0.0)
    assert (settings.lr_schedule, settings.augmentation) == ("constant", "none")


def test_step_schedule_divides_by_ten_after_its_shares():
    settings = TrainSettings(epochs=150, lr_schedule="step")  # ccll: at 50, 100 and 125 of 150
    factors = [settings.lr_factor(epoch) for epoch in range(150)]
    assert factors == pytest.approx([1.0] * 50 + [0.1] * 50 + [0.01] * 25 + [0.001] * 25)


def test_step_schedule_with_own_milestones():
    settings = TrainSettings(epochs=4, lr_schedule="step", lr_milestones=(0.5,))
    assert [settings.lr_factor(epoch) for epoch in range(4)] == pytest.approx([1, 1, 0.1, 0.1])


@pytest.mark.parametrize("epochs", [1, 2, 7, 50])
def test_cosine_starts_at_one_falls_and_ends_above_zero(epochs):
    settings = TrainSettings(epochs=epochs, lr_schedule="cosine")
    factors = [settings.lr_factor(epoch) for epoch in range(epochs)]
    assert factors[0] == 1
    assert all(later < earlier for earlier, later in itertools.pairwise(factors))
    assert factors[-1] == pytest.approx(0.5 + 0.5 * math.cos(math.pi * (epochs - 1) / epochs))
    assert factors[-1] > 0


@pytest.mark.parametrize("momentum", [0.01, 0.1, 0.5])
def test_silent_steps_weigh_less_than_track_from(momentum):
    steps = TrainSettings().tracked_steps(momentum)
    assert (1 - momentum) ** steps <= 3e-5 < (1 - momentum) ** (steps - 1)


def test_track_from_zero_tracks_everything():
    assert TrainSettings(track_from=0).tracked_steps(0.1) >= 10**9


@pytest.mark.parametrize("name", ["nonsense", "cuda:99", "cpu:x", "cuda:-1"])
def test_a_device_that_cannot_be_used_is_named(name):
    with pytest.raises(ConfituneError, match="cannot be used") as caught:
        TrainSettings(device=name).torch_device()
    assert repr(name) in str(caught.value)
    assert "--device cpu" in str(caught.value)


def test_devices_that_can():
    assert TrainSettings(device="cpu").torch_device() == torch.device("cpu")
    auto = TrainSettings().torch_device().type
    assert auto == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0},
        {"batch_size": 1},
        {"lr": 0},
        {"lr": 1e300},
        {"momentum": 1},
        {"seed": -1},
        {"epoch": 3},
        {"optimizer": "x"},
    ],
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValidationError):
        TrainSettings(**wrong)
