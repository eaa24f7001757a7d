"""A linear model whose gradients are known in closed form, a tiny network with batch norm, and tasks for both."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from confitune.engine import Executor, SequenceRun, TaskFit, TrainSettings
from confitune.methods import METHODS, Method, create_method
from confitune.tasks import Images, Preprocess, Task, TaskSequence

PREPROCESS = Preprocess((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


class LinearModel:
    """logits = V (W x + b) + c, x the mean colour of an image: a 1x1 convolution, pooling, and a head; float64."""

    def __init__(self, start=0, features=4):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(start)
            conv = nn.Conv2d(3, features, 1)
        backbone = nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.net = Method().network(backbone.double())

    def arrays(self):
        """W, b, V and c."""
        conv, head = self.net.backbone[0], self.net.head.linear
        tensors = (conv.weight[:, :, 0, 0], conv.bias, head.weight, head.bias)
        return [tensor.detach().numpy().copy() for tensor in tensors]

    def logits(self, x):
        w, b, v, c = self.arrays()
        return (x @ w.T + b) @ v.T + c

    def shared_gradients(self, x, by_logits):
        """Of each image, from the gradient by its logits [N, K]: {parameter: [N, ...]}."""
        by_features = by_logits @ self.arrays()[2]
        return {"0.weight": np.einsum("nf,nc->nfc", by_features, x)[..., None, None], "0.bias": by_features}


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def colours(context):
    """The mean colour and the label of every training image, in the order in which importance is measured."""
    inputs, labels = zip(*context.batches(20), strict=True)
    return torch.cat(inputs).mean((2, 3)).numpy(), torch.cat(labels).numpy()


def _float_task(name="colours", images=47, classes=3, *, seed=0, spread=1.0):
    """Images of 2 x 2 float64 numbers, taken by the network as they are; the test images are the training images."""
    draw = np.random.default_rng([seed, *map(ord, name)])
    labels = draw.integers(0, classes, images)
    centres = draw.normal(0, spread, (classes, 3))
    pixels = centres[labels][:, :, None, None] + draw.normal(0, 1, (images, 3, 2, 2))
    split = Images(torch.from_numpy(pixels), torch.arange(images), torch.from_numpy(labels))
    return Task(name, tuple(f"{name}-{k}" for k in range(classes)), split, split, PREPROCESS)


def _backbone(weights_seed=0, dropout=0.0):
    """Two conv-BN-ReLU blocks whose batch norms look pre-trained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(weights_seed)
        backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 12, 3, padding=1),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(dropout),
        )
        for module in backbone.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.uniform_(module.bias, 0.1, 0.5)  # never 0, where the smallest of pulls would leave a trace
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.5, 2)
                module.num_batches_tracked.fill_(7)
    return backbone


def _net(method="finetune", options=None, **of_backbone):
    """What a method, by name or not, trains."""
    return _create(method, options).network(_backbone(**of_backbone))


def _task(name, train=(10, 9, 8), *, base=60, step=60, seed=0):
    """8 x 8 images; class k is `step` brighter than `base` in colour channel k % 3; `train` is images per class."""
    draw = np.random.default_rng([seed, *map(ord, name)])
    labels = np.tile(np.repeat(np.arange(len(train)), train), 2)
    pixels = np.full((len(labels), 3, 8, 8), float(base))
    pixels[np.arange(len(labels)), labels % 3] += step * (1 + labels[:, None, None] // 3)
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


TASKS = (_task("dark"), _task("bright", (12, 13), base=150), _task("minus", (9, 8, 7, 7), base=190, step=-50))


def _settings(**options):
    return TrainSettings(**{"epochs": 3, "batch_size": 8, "lr": 0.05, "device": "cpu", **options})


def _create(method, options=None, hooks=()):
    """By name, with hooks that take part in its steps."""
    method = create_method(method, options) if isinstance(method, str) else method
    method.added += tuple(hooks)
    return method


def _run(method, options=None, *, listeners=(), folder=None, net=None, tasks=TASKS, hooks=(), dropout=0.0, **settings):
    """A run of a method on three tiny tasks of 3, 2 and 4 classes, with a checkpoint after every epoch."""
    method = _create(method, options, hooks)
    net = net or method.network(_backbone(dropout=dropout))
    sequence = TaskSequence("tiny", "own", tuple(tasks))
    return SequenceRun(
        net, sequence, method, _settings(**settings), folder=folder, listeners=listeners, checkpoint_seconds=0
    )


def _fit(net, task, method="finetune", index=-1, **settings):
    """A task that is about to be trained."""
    return TaskFit(Executor(net, _settings(**settings)), task, _create(method), index)


def _context(net, task, index=-1, **settings):
    """What methods get of a task that is about to be trained, on a network of any parts."""
    names = [name for name in METHODS if [part.kind for part in create_method(name).parts()] == net.kinds]
    return _fit(net, task, names[0], index, **settings)


class Steps(Method):
    """Changes nothing and keeps what a network is trained on, step by step."""

    def __init__(self):
        super().__init__()
        self.inputs, self.labels = [], []

    def loss(self, step):
        self.inputs.append(step.inputs.detach().clone())
        self.labels.append(step.labels.clone())


def _by_hand(model, steps, lr, extra_loss):
    """SGD with autograd on cross entropy + extra_loss(backbone, logits), over the recorded steps."""
    model.train()
    for x, labels in zip(steps.inputs, steps.labels, strict=True):
        logits = model(x)
        loss = cross_entropy(logits.float(), labels) + extra_loss(model[0], logits)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= lr * gradient


def _snapshot(net):
    """All that an onlooker must not change: tensors, counters, modes, gradients and their flags, random numbers."""
    return copy.deepcopy(
        {
            "state": net.state_dict(),
            "modes": {name: module.training for name, module in net.named_modules()},
            "flags": {name: p.requires_grad for name, p in net.named_parameters()},
            "gradients": {name: p.grad for name, p in net.named_parameters()},
            "current": net.current_task,
            "random": torch.get_rng_state(),
        }
    )


def _same(found, expected, where=""):
    """Equal to the bit, through dicts and lists."""
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            _same(found[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for place, (mine, other) in enumerate(zip(found, expected, strict=True)):
            _same(mine, other, f"{where}/{place}")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), where
    else:
        assert found == expected, where


@pytest.fixture
def linear_model():
    return LinearModel


@pytest.fixture
def float_task():
    return _float_task


@pytest.fixture
def make_net():
    return _net


@pytest.fixture
def make_task():
    return _task


@pytest.fixture
def tasks():
    return TASKS


@pytest.fixture
def make_method():
    return _create


@pytest.fixture
def make_settings():
    return _settings


@pytest.fixture
def make_run():
    return _run


@pytest.fixture
def make_fit():
    return _fit


@pytest.fixture
def context_of():
    return _context


@pytest.fixture
def record_steps():
    return Steps


@pytest.fixture
def train_by_hand():
    return _by_hand


@pytest.fixture
def snapshot():
    return _snapshot


@pytest.fixture
def assert_same():
    return _same


@pytest.fixture
def image_colours():
    return colours


@pytest.fixture
def numpy_softmax():
    return softmax


@pytest.fixture(scope="session")
def finetuned():
    """What plain fine-tuning of the tiny tasks ends with, two epochs each."""
    return _run("finetune", epochs=2).run().final_sha256
