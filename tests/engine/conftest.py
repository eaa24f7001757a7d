"""A network of three conv-BN-ReLU blocks and tasks of 16 x 16 images that it learns in a second."""

import numpy as np
import pytest
import torch
from torch import nn

from confitune.engine import Executor, SequenceRun, TaskFit, TrainSettings, place
from confitune.methods import Method, create_method
from confitune.tasks import Images, Preprocess, Task, TaskSequence

_OF_RUN = ("checkpoint_seconds", "weights", "scenario", "pretrained")
PREPROCESS = Preprocess((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


def _block(inputs, outputs, stride, bias=False):
    conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=bias)
    return conv, nn.BatchNorm2d(outputs), nn.ReLU()


def _method(name, *hooks, options=None, **xconv):
    """By name, with hooks that take part in its steps; `xconv` are options of ConFiT and of its second half."""
    if isinstance(name, str):
        name = create_method(name, {**(options or {}), "confit": xconv, "finetune-xconv": xconv})
    name.added += hooks
    return name


def _backbone(dropout=0.0):
    """Always of the same "pre-trained" weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            *_block(3, 8, stride=2),
            *_block(8, 12, stride=1),
            *_block(12, 16, stride=2, bias=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(dropout),
        )


def _net(method="confit", *, dropout=0.0, **xconv):
    return _method(method, **xconv).network(_backbone(dropout))


def _task(name, train=(24, 16, 8), test=None, *, base=60, step=40, seed=0):
    """Class k is `step` brighter than `base` in colour channel k; `train` and `test` are images per class."""
    test = (20, 14, 10)[: len(train)] if test is None else test
    draw = np.random.default_rng([seed, *map(ord, name)])
    labels = np.concatenate([np.repeat(np.arange(len(counts)), counts) for counts in (train, test)])
    pixels = np.full((len(labels), 3, 16, 16), float(base))
    pixels[np.arange(len(labels)), labels % 3] += step
    pixels += draw.normal(0, 15, (len(labels), 3, 1, 1)) + draw.normal(0, 25, pixels.shape)
    pixels = torch.from_numpy(pixels.clip(0, 255).astype(np.uint8))
    rows, labels = torch.arange(len(labels)), torch.from_numpy(labels)
    cut = sum(train)
    return Task(
        name=name,
        classes=tuple(f"{name}-{k}" for k in range(len(train))),
        train=Images(pixels, rows[:cut], labels[:cut]),
        test=Images(pixels, rows[cut:], labels[cut:]),
        preprocess=PREPROCESS,
    )


@pytest.fixture
def make_net():
    return _net


@pytest.fixture
def make_task():
    return _task


@pytest.fixture
def sequence():
    """Three tasks of 3, 2 and 3 classes that look unlike one another: dark, bright, and dark on bright."""
    tasks = (
        _task("dark"),
        _task("bright", (22, 18), (17, 15), base=170),
        _task("minus", (16, 14, 12), (13, 12, 11), base=200, step=-70),
    )
    return TaskSequence("tiny", "own", tasks)


@pytest.fixture
def make_run(sequence):
    """A run of a method by name (or of a Method) on the tiny tasks, 3 epochs of batches of 8."""

    def make(method="confit", *, listeners=(), folder=None, net=None, tasks=sequence, config=None, **options):
        of_method = {key: options.pop(key) for key in ("means", "statistics") if key in options}
        dropout = options.pop("dropout", 0.0)
        of_run = {"checkpoint_seconds": 0} | {key: options.pop(key) for key in _OF_RUN if key in options}
        settings = TrainSettings(**{"epochs": 3, "batch_size": 8, "lr": 0.05, "device": "cpu", **options})
        method = _method(method, **of_method)
        net = net or method.network(_backbone(dropout))
        tasks = place(tasks, settings.torch_device(), settings.pixels)
        return SequenceRun(net, tasks, method, settings, folder=folder, listeners=listeners, config=config, **of_run)

    return make


def _fit(net, task, method="confit", settings=None, listener=None, index=-1, kind=TaskFit):
    """A task that is about to be trained."""
    settings = settings or TrainSettings(device="cpu")
    return kind(Executor(net, settings, listener), task, _method(method), index)


class Batches(Method):
    """Keeps every training batch."""

    def __init__(self):
        super().__init__()
        self.inputs, self.labels = [], []

    def loss(self, step):
        self.inputs.append(step.inputs.clone())
        self.labels.append(step.labels.clone())


@pytest.fixture
def make_method():
    return _method


@pytest.fixture
def make_fit():
    return _fit


@pytest.fixture
def batch_recorder():
    """Makes a hook that changes nothing and keeps what a network is trained on."""
    return Batches
