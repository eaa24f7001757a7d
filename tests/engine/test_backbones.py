"""Networks without batch norm, whole: a convolutional and an attention one, untrained, on small images."""

import dataclasses

import pytest
import timm
import torch

from confitune.engine import Listener, SequenceRun, TrainSettings, evaluate, fit
from confitune.methods import create_method
from confitune.nn import NoBatchNormError
from confitune.tasks import TaskSequence

NAMES = ["convnext_atto", "vit_tiny_patch16_224"]
METHODS = ["finetune", "linear-probe", "bn-only"]


def network(method, name):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name.startswith("vit"):
            return method.network(timm.create_model(name, img_size=32), example_input=torch.zeros(2, 3, 32, 32))
        return method.network(timm.create_model(name))


@pytest.fixture
def tasks(make_task):
    """The tiny tasks at twice their size."""
    tasks = make_task("dark", (14, 12, 8)), make_task("bright", (12, 14), base=170)
    preprocess = dataclasses.replace(tasks[0].preprocess, resize=32)
    return TaskSequence("two", "own", tuple(dataclasses.replace(task, preprocess=preprocess) for task in tasks))


def settings(**options):
    return TrainSettings(**{"epochs": 5, "batch_size": 12, "lr": 0.01, "device": "cpu", **options})


def answers(net, task):
    with torch.no_grad():
        return net.eval()(task.inputs(task.test.pixels[task.test.rows]), task.name).clone()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", METHODS)
def test_what_moves_and_what_is_kept(name, method, tasks):
    method = create_method(method)
    net = network(method, name)
    before = {key: value.clone() for key, value in net.backbone.state_dict().items()}
    norms = {key for key, module in net.backbone.named_modules() if "Norm" in type(module).__name__}
    assert len(norms) >= 5
    fit(net, tasks[0], method, settings())
    first = answers(net, tasks[0])
    fit(net, tasks[1], method, settings())
    moved = {key for key, value in net.backbone.state_dict().items() if not torch.equal(value, before[key])}
    of_norms = {key for key in before if key.rpartition(".")[0] in norms}
    numbers = sum(before[key].numel() for key in of_norms)
    kept = [storage.beside_head for storage in net.storage().values()]
    if method.name == "finetune":
        assert kept == [0, 0]
        assert moved - of_norms
        assert not torch.equal(answers(net, tasks[0]), first)
    else:
        assert torch.equal(answers(net, tasks[0]), first)  # nothing is forgotten
        assert moved <= of_norms
        assert bool(moved) == (method.name == "bn-only")
        assert kept == [0 if method.name == "linear-probe" else numbers] * 2
    assert 0 <= evaluate(net, tasks[1], settings()) <= 100


class Killed(Exception):
    pass


class Killer(Listener):
    def epoch_ended(self, end):
        if (end.task, end.epoch) == (1, 3):
            raise Killed


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", METHODS)
def test_resumed_equals_undisturbed(name, method, tasks, tmp_path):
    def run(folder=None, *listeners):
        made = create_method(method)
        net = network(made, name)
        return SequenceRun(net, tasks, made, settings(), folder=folder, listeners=listeners, checkpoint_seconds=0)

    expected = run().run()
    with pytest.raises(Killed):
        run(tmp_path, Killer()).run()
    resumed = run(tmp_path)
    assert resumed.resume()
    found = resumed.run()
    assert found.final_sha256 == expected.final_sha256
    assert found.accuracy_matrix == expected.accuracy_matrix
    if method != "finetune":
        assert found.fgt == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", ["confit", "finetune-xconv"])
def test_what_recovers_means_says_that_it_needs_batch_norm(name, method):
    with pytest.raises(NoBatchNormError, match=r"has no batch norm .*finetune, bn-only and linear-probe run on any"):
        network(create_method(method), name)
