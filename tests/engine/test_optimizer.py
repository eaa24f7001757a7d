"""Optimizers: learning rates and state that stay where captured steps read them."""

import copy

import pytest
import torch
from torch import nn

from confitune.engine import Executor, TaskFit, TrainSettings
from confitune.engine.optimizer import Optimizers
from confitune.methods import create_method


def test_the_learning_rate_reaches_steps_to_come():
    optimizers = Optimizers(TrainSettings(device="cpu"), torch.device("cpu"))
    optimizer = optimizers.make({1.0: [nn.Parameter(torch.ones(2))], 0.5: [nn.Parameter(torch.ones(3))]})
    for lr in (0.25, 0.125):
        optimizers.set_lr(optimizer, lr)
        assert [group["lr"] for group in optimizer.param_groups] == [lr, lr / 2]
    rates = optimizers._lrs = {1.0: torch.tensor(0.0), 0.5: torch.tensor(0.0)}  # a GPU's: captured steps read them
    optimizers._device = torch.device("cuda")
    optimizers.set_lr(optimizer, 0.5)
    assert [rate.item() for rate in rates.values()] == [0.5, 0.25]
    assert all(group["lr"] is rates[group["factor"]] for group in optimizer.param_groups)


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"optimizer": "adam"}, {"optimizer": "adamw"}])
def test_the_state_of_optimizers_stays_where_it_is(make_net, make_task, options):
    """So that captured steps serve later tasks; each task finds it at zero, also after one was resumed."""
    settings = TrainSettings(epochs=2, batch_size=8, device="cpu", **options)
    executor = Executor(make_net("confit"), settings)
    before = None
    for name in ("dark", "minus"):
        fit = TaskFit(executor, make_task(name), create_method("confit"))
        state = fit.optimizer.state
        assert not any(values.any() for of_parameter in state.values() for values in of_parameter.values())
        fit.fit()
        assert any(values.any() for of_parameter in state.values() for values in of_parameter.values())
        saved = copy.deepcopy(fit.state_dict())
        fit.load_state_dict(saved)
        where = [values.data_ptr() for of_parameter in fit.optimizer.state.values() for values in of_parameter.values()]
        assert before in (None, where)
        before = where
