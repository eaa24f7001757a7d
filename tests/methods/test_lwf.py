"""The example of a method in a file of one's own: Learning without Forgetting."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax

from confitune.engine import Listener, fit
from confitune.methods import Method, Step, create_method

FILE = Path(__file__).parents[2] / "examples" / "lwf.py"
NAME = f"{FILE}:LwF"


@pytest.fixture
def lwf():
    def lwf(name=NAME, **options):
        return create_method(name, {"lwf": options})

    return lwf


def test_it_is_one_file_of_at_most_eighty_lines_that_says_how_to_run_it():
    text = FILE.read_text()
    assert len(text.splitlines()) <= 80
    assert "ECCV 2016" in text
    assert "confitune run --method examples/lwf.py:LwF" in text


def test_its_options(lwf):
    assert lwf().options.model_dump() == {"strength": 1.0, "temperature": 2.0}
    assert lwf().summary


@pytest.mark.parametrize(("strength", "temperature"), [(1.0, 2.0), (0.3, 1.0), (2.0, 5.0)])
def test_the_term_is_the_cross_entropy_of_softened_answers(
    linear_model, float_task, make_fit, lwf, strength, temperature
):
    """Two earlier tasks, weights that have moved since, answers and their cross entropy in numpy."""
    model, method = linear_model(), lwf(strength=strength, temperature=temperature)
    heads = []
    for name, classes in (("one", 3), ("two", 4)):
        make_fit(model.net, float_task(name, classes=classes), Method()).fit()
        heads.append([p.detach().numpy().copy() for p in model.net.head.linear.parameters()])
    context = make_fit(model.net, float_task("three", classes=2), method)
    w, b = model.arrays()[:2]
    method.attach(model.net, 2)
    with torch.no_grad():
        model.net.backbone[0].weight.add_(0.2)
    x, labels = next(iter(context.batches(9)))
    features = model.net.features(x)
    term = method.loss(Step(x, features, model.net.head(features), labels, model.net))

    colours, total = x.mean((2, 3)).numpy(), 0.0
    for v, c in heads:
        before = (colours @ w.T + b) @ v.T + c
        now = (colours @ (w + 0.2).T + b) @ v.T + c
        softened = softmax(before, 1) ** (1 / temperature)  # Eq. 3
        softened /= softened.sum(1, keepdims=True)
        total -= (softened * log_softmax(now / temperature, 1)).sum(1).mean()  # Eq. 2
    assert term.item() == pytest.approx(strength * total, rel=1e-5)
    term.backward()
    assert model.net.backbone[0].weight.grad.abs().max() > 1e-4
    assert model.net.head.linear.weight.grad is None  # the new head has no part in it


def test_a_network_that_has_not_moved_gets_no_gradient(linear_model, float_task, make_fit, lwf):
    model, method = linear_model(), lwf()
    make_fit(model.net, float_task("one"), Method()).fit()
    context = make_fit(model.net, float_task("two"), method)
    method.attach(model.net, 1)
    x, labels = next(iter(context.batches(9)))
    features = model.net.features(x)
    method.loss(Step(x, features, model.net.head(features), labels, model.net)).backward()
    assert model.net.backbone[0].weight.grad.abs().max() < 1e-6


def test_the_first_task_and_no_strength_are_fine_tuning_to_the_bit(make_run, lwf, tasks, finetuned):
    alone = make_run("finetune", tasks=tasks[:1]).run().final_sha256
    assert make_run(lwf(), tasks=tasks[:1]).run().final_sha256 == alone
    assert make_run(lwf(strength=0), epochs=2).run().final_sha256 == finetuned
    assert make_run(lwf(), epochs=2).run().final_sha256 != finetuned


@pytest.mark.parametrize("base", ["", "+hierarchical", "+confit"])
def test_earlier_heads_stay_as_they_are(make_net, make_settings, tasks, lwf, base):
    method = lwf(NAME + base)
    net, heads = make_net(method), {}
    for task in tasks:
        fit(net, task, method, make_settings(epochs=5))
        heads[task.name] = copy.deepcopy(net.task_state_dict(task.name))
        for name, state in heads.items():
            assert torch.equal(net.task_state_dict(name)["head.weight"], state["head.weight"])
            assert torch.equal(net.task_state_dict(name)["head.bias"], state["head.bias"])


def test_it_forgets_less_than_fine_tuning(make_run, lwf):
    lost = {
        strength: np.mean([make_run(lwf(strength=strength), epochs=10, seed=seed).run().fgt for seed in range(3)])
        for strength in (0, 5)
    }
    assert lost[5] < lost[0] - 3, lost


class Killed(Exception):
    pass


class Killer(Listener):
    def __init__(self, task, epoch):
        self.at = (task, epoch)

    def task_started(self, task, name, first_epoch):
        if (task, None) == self.at:
            raise Killed

    def epoch_ended(self, end):
        if (end.task, end.epoch) == self.at:
            raise Killed


@pytest.mark.parametrize("base", ["", "+confit"])
@pytest.mark.parametrize("at", [(0, 1), (1, None), (1, 2), (2, 4)])
def test_resumed_equals_undisturbed(make_run, lwf, tmp_path, base, at):
    expected = make_run(lwf(NAME + base), epochs=5, dropout=0.3).run()
    with pytest.raises(Killed):
        make_run(lwf(NAME + base), epochs=5, dropout=0.3, folder=tmp_path, listeners=(Killer(*at),)).run()
    run = make_run(lwf(NAME + base), epochs=5, dropout=0.3, folder=tmp_path)
    assert run.resume()
    found = run.run()
    assert found.final_sha256 == expected.final_sha256
    assert found.accuracy_matrix == expected.accuracy_matrix
    assert run.method.storage() == 0
    assert all(hook.state_dict() in ({}, {"before": None}) for hook in run.method.hooks)  # between tasks


def test_each_task_is_captured_for_itself(lwf):
    assert [lwf().captured_kind(index) for index in range(3)] == [0, 1, 2]
