"""Two conv-BN-ReLU blocks, tasks of 8 x 8 images, and a forward pass of them written out."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from confitune.engine import SequenceRun, TrainSettings
from confitune.methods import create_method
from confitune.nn import XconvNorms
from confitune.tasks import Images, Preprocess, Task, TaskSequence

PREPROCESS = Preprocess((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
SETTINGS = {"epochs": 2, "batch_size": 8, "lr": 0.1, "device": "cpu", "eval_batch_size": 7}


def _backbone(start=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(start)
        return nn.Sequential(
            nn.Conv2d(3, 6, 3, 2, padding=1, bias=True),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )


def _task(name, *, classes=3, base=60, step=40):
    draw = np.random.default_rng([*map(ord, name)])
    labels = np.tile(np.arange(classes), 18)
    pixels = np.full((len(labels), 3, 8, 8), float(base))
    pixels[np.arange(len(labels)), labels % 3] += step
    pixels += draw.normal(0, 20, (len(labels), 3, 1, 1)) + draw.normal(0, 25, pixels.shape)
    pixels, labels = torch.from_numpy(pixels.clip(0, 255).astype(np.uint8)), torch.from_numpy(labels)
    rows, cut = torch.arange(len(labels)), 2 * len(labels) // 3
    train, test = Images(pixels, rows[:cut], labels[:cut]), Images(pixels, rows[cut:], labels[cut:])
    return Task(name, tuple(f"{name}-{k}" for k in range(classes)), train, test, PREPROCESS)


@pytest.fixture
def make_backbone():
    return _backbone


@pytest.fixture
def sequence():
    tasks = (_task("dark"), _task("bright", classes=2, base=170), _task("minus", base=200, step=-70))
    return TaskSequence("tiny", "own", tasks)


@pytest.fixture
def settings():
    return TrainSettings(**SETTINGS)


@pytest.fixture
def make_run(sequence, settings):
    def make(method, options=None, *, net=None, listeners=(), folder=None):
        method = create_method(method, options)
        net = net or method.network(_backbone())
        return SequenceRun(
            net, sequence, method, settings, folder=folder, listeners=listeners, config={}, checkpoint_seconds=0
        )

    return make


@pytest.fixture
def same_state():
    """Whether two state dicts, whatever is nested in them, are equal to the bit."""

    def same(a, b):
        if isinstance(a, torch.Tensor):
            return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        if isinstance(a, (list, tuple)):
            return len(a) == len(b) and all(map(same, a, b))
        return a == b

    return same


@pytest.fixture
def state_of():
    return lambda net: copy.deepcopy((net.state_dict(), net._bank.current, net.training))


@pytest.fixture
def at_test():
    """A copy of a network in a task's state at test time, and the batch norm after each convolution."""

    def ready(net, task):
        net = copy.deepcopy(net).eval()
        net.set_task(task.name)
        norms = {"0": net.backbone[1], "3": net.backbone[4]}
        for part in net.parts.values():
            for layer in part.layers.values() if isinstance(part, XconvNorms) else ():
                layer.norm.running_mean.copy_(layer.recovered_mean())
        return net, norms

    return ready


@pytest.fixture
def by_hand():
    """Forward of the tiny network in float64, one line a layer, all test images at once.

    `moments(layer, x)` says what a batch norm normalises with. Gives the convolutions' outputs and the logits.
    """

    def forward(net, task, moments):
        pixels = task.test.pixels[task.test.rows].double()
        x = (pixels / 255 - 0.5) / 0.25
        outputs, layers = {}, list(net.backbone)
        for conv, norm in (("0", layers[1]), ("3", layers[4])):
            module = layers[int(conv)]
            outputs[conv] = x = _convolve(x, module)
            mean, variance = moments(norm, x)
            scale = norm.weight.double() / (variance.double() + norm.eps).sqrt()
            x = (x - mean.double()[:, None, None]) * scale[:, None, None] + norm.bias.double()[:, None, None]
            x = x.clamp(min=0)
        features = x.mean((2, 3))
        return outputs, features @ net.head.linear.weight.double().T + net.head.linear.bias.double()

    return forward


def _convolve(x, module):
    """Cross-correlation of padding 1, written as a sum over taps."""
    stride, weight = module.stride[0], module.weight.double()
    n, _, h, w = x.shape
    padded = torch.zeros(n, x.shape[1], h + 2, w + 2, dtype=torch.float64)
    padded[:, :, 1:-1, 1:-1] = x
    out_h, out_w = (h - 1) // stride + 1, (w - 1) // stride + 1
    total = torch.zeros(n, weight.shape[0], out_h, out_w, dtype=torch.float64)
    for i in range(3):
        for j in range(3):
            part = padded[:, :, i : i + stride * out_h : stride, j : j + stride * out_w : stride]
            total += torch.einsum("nchw,oc->nohw", part[:, :, :out_h, :out_w], weight[:, :, i, j])
    return total if module.bias is None else total + module.bias.double()[:, None, None]
