"""ConFiT as one would write it first, in the style of the published code: the baseline of `end_to_end.py`.

A DataLoader whose workers open and normalise every image in every epoch, a full batch norm as tracker of each
convolution's input, float32, one kernel after the other.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import CenterCrop, Compose, Normalize, Resize, ToTensor

from confitune.nn import headless, trace_flow
from confitune.tasks import Images, Task


class Files(Dataset):
    """Image files, opened, resized and normalised each time they are asked for."""

    def __init__(self, paths: Sequence[Path], images: Images, task: Task, original: bool) -> None:
        self.paths, self.labels = paths, images.labels.tolist()
        sized = [Resize(256), CenterCrop(224)] if original else []
        if not original and task.preprocess.resize is not None:
            sized = [Resize(task.preprocess.resize)]
        self.transform = Compose([*sized, ToTensor(), Normalize(task.preprocess.mean, task.preprocess.std)])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.transform(Image.open(self.paths[i]).convert("RGB")), self.labels[i]


def write_files(images: Images, folder: Path) -> list[Path]:
    """Stored pixels as PNG files, for datasets that have none."""
    folder.mkdir(parents=True)
    paths = [folder / f"{i}.png" for i in range(len(images))]
    for i, path in enumerate(paths):
        pixels = images.batch(torch.tensor([i]))[0][0]
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(path, compress_level=1)
    return paths


class PhaseTracker(nn.Module):
    """A batch norm per stride phase, run on the convolution's input for the sake of its running mean."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.stride = conv.stride
        phases = conv.stride[0] * conv.stride[1]
        self.norms = nn.ModuleList(nn.BatchNorm2d(conv.in_channels, affine=False) for _ in range(phases))
        conv.register_forward_pre_hook(lambda module, args: self.observe(args[0]))

    def observe(self, x: Tensor) -> None:
        self.size = x.shape[-2:]
        if self.training:
            with torch.no_grad():
                for norm, (a, b) in zip(self.norms, self._phases(), strict=True):
                    norm(x[:, :, a :: self.stride[0], b :: self.stride[1]])

    def recovered(self, conv: nn.Conv2d) -> Tensor:
        plane = torch.zeros(1, conv.in_channels, *self.size, device=conv.weight.device)
        for norm, (a, b) in zip(self.norms, self._phases(), strict=True):
            plane[:, :, a :: self.stride[0], b :: self.stride[1]] = norm.running_mean[:, None, None]
        return conv(plane).mean((0, 2, 3))

    def _phases(self) -> list[tuple[int, int]]:
        return [(a, b) for a in range(self.stride[0]) for b in range(self.stride[1])]


Loaders = list[tuple[DataLoader, DataLoader]]


def make_loaders(
    tasks: Sequence[Task], folder: Path, batch_size: int, workers: int, originals: Sequence[Path] | None = None
) -> Loaders:
    """Training and test loaders of each task.

    Args:
        folder: where files are written if the dataset has none.
        originals: the dataset's own image files, in the order of the tasks' rows.
    """

    def files(images: Images, task: Task, name: str) -> Files:
        if originals is None:
            return Files(write_files(images, folder / task.name / name), images, task, original=False)
        return Files([originals[row] for row in images.rows.tolist()], images, task, original=True)

    return [
        (
            DataLoader(
                files(task.train, task, "train"),
                batch_size,
                shuffle=True,
                drop_last=True,
                num_workers=workers,
                persistent_workers=True,
            ),
            DataLoader(files(task.test, task, "test"), 256, num_workers=workers),
        )
        for task in tasks
    ]


def learn(model: nn.Module, tasks: Sequence[Task], loaders: Loaders, epochs: int) -> float:
    """ConFiT over all tasks, each evaluated after each; the final average accuracy in percent."""
    device = next(model.parameters()).device
    model = headless(model)
    flow = trace_flow(model)
    modules = dict(model.named_modules())
    norms = {name: m for name, m in modules.items() if isinstance(m, nn.BatchNorm2d)}
    pairs = {name: call.module for name in norms if (call := flow.conv_before(name)[0])}
    trackers = nn.ModuleDict({conv.replace(".", "/"): PhaseTracker(modules[conv]) for conv in pairs.values()}).to(
        device
    )
    stored = []
    accuracies: list[float] = []
    for index, task in enumerate(tasks):
        head = nn.Linear(flow.features[0], len(task.classes)).to(device)
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.01)
        for epoch in range(epochs):
            for parameter in model.parameters():
                parameter.requires_grad_(epoch >= epochs // 2)
            for norm in norms.values():
                for parameter in norm.parameters():
                    parameter.requires_grad_(epoch >= epochs // 5)
            model.train()
            trackers.train()
            for x, y in loaders[index][0]:
                loss = cross_entropy(head(model(x.to(device))), y.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        stored.append(copy.deepcopy((head, [n.state_dict() for n in norms.values()], trackers.state_dict())))
        accuracies = [_accuracy(model, norms, pairs, modules, trackers, s, loaders[i][1]) for i, s in enumerate(stored)]
        _restore(norms, trackers, stored[-1])
    return sum(accuracies) / len(accuracies)


def _restore(norms: dict[str, nn.BatchNorm2d], trackers: nn.ModuleDict, state: tuple) -> None:
    for norm, saved in zip(norms.values(), state[1], strict=True):
        norm.load_state_dict(saved)
    trackers.load_state_dict(state[2])


@torch.no_grad()
def _accuracy(model, norms, pairs, modules, trackers, state, loader) -> float:
    _restore(norms, trackers, state)
    model.eval()
    trackers.eval()
    for name, conv in pairs.items():
        norms[name].running_mean.copy_(trackers[conv.replace(".", "/")].recovered(modules[conv]))
    device = next(model.parameters()).device
    right = [(state[0](model(x.to(device))).argmax(1).cpu() == y).float() for x, y in loader]
    return 100 * torch.cat(right).mean().item()
