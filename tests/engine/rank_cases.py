"""The same small runs by one process or by several: `torchrun --nproc-per-node 2 rank_cases.py FOLDER`.

Each process leaves what it found in FOLDER/<rank>.pt. A checkpoint in FOLDER/by-one is gone on with; one that is made
here stays in FOLDER/by-several.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from confitune.engine import Checkpoint, DivergedError, Listener, SequenceRun, TrainSettings, evaluate
from confitune.methods import create_method
from confitune.nn import ContinualNet
from confitune.ranks import Ranks, joined
from confitune.tasks import Images, Preprocess, Task, TaskSequence

# Of an odd batch size, but where said otherwise: parts of 5 and 4.
CASES: dict[str, dict[str, Any]] = {
    "finetune": {"method": "finetune"},
    "finetune, even": {"method": "finetune", "batch_size": 8, "momentum": 0.9, "lr": 0.01},
    "confit": {"method": "confit"},
    "confit, pass": {"method": "confit", "statistics": "pass", "augmentation": "flip-shift"},
    "confit, phase, adam, clipped": {
        **{"method": "confit", "means": "phase"},
        **{"optimizer": "adam", "lr": 0.003, "clip_norm": 0.5},
    },
    "confit, ratio, averaged": {
        **{"method": "confit+conv-step+averaging", "statistics": "pass", "variance": "ratio"},
        "options": {"averaging": {"share": 0.7}},
    },
    "confit, following images": {"method": "confit", "statistics": "pass", "follow": "images"},
    # The first task, whose labels say nothing, is trained; the second settles. 40 images are 3 batches of 13 and one.
    "best": {"method": "best", "batch_size": 13, "shuffled": "dark", "lr": 0.01, "options": {"probe": {"worse": 0}}},
    "bn-only": {"method": "bn-only"},
    "linear-probe": {"method": "linear-probe"},
    "joint": {"method": "joint"},
    "ewc": {"method": "ewc", "lr": 0.01},
    "ewc, sampled": {"method": "ewc", "lr": 0.01, "options": {"ewc": {"fisher": "sampled"}}},
    "ewc, exact": {"method": "ewc", "lr": 0.01, "options": {"ewc": {"fisher": "exact"}}},
    "ewc, train": {"method": "ewc", "lr": 0.01, "options": {"ewc": {"mode": "train"}}},
    "mas, sample": {"method": "mas", "options": {"mas": {"gradients": "sample"}}},
    "mas+cpr": {"method": "mas+cpr", "options": {"cpr": {"beta": 0.5}}},
    "mas+afec": {"method": "mas+afec"},
    "si": {"method": "si"},
    "rwalk": {"method": "rwalk"},
}
RESUMED: dict[str, Any] = {"method": "confit", "momentum": 0.9, "lr": 0.01, "epochs": 5}
STOP = (1, 3)  # task and epoch after which a run is broken off: all is trained, statistics are pending


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    with joined() as ranks:
        if not ranks.first:
            Checkpoint.save = _must_not_write  # type: ignore[method-assign]
        found: dict[str, Any] = {name: run(ranks, **options) for name, options in CASES.items()}
        found["resumed"] = run(ranks, folder=folder / "by-one", **RESUMED)
        run(ranks, folder=folder / "by-several", stop=STOP, **RESUMED)
        found["diverged"] = diverged(ranks)
        found["primitives"] = primitives(ranks)
        torch.save(found, folder / f"{ranks.rank}.pt")


def _must_not_write(*arguments: object) -> None:
    raise AssertionError("only the first process writes")


class Stopped(Exception):
    pass


class Watch(Listener):
    """Keeps what epochs measured; breaks the run off after a task's epoch."""

    def __init__(self, stop: tuple[int, int] | None) -> None:
        self.stop, self.losses, self.accuracies = stop, [], []

    def epoch_ended(self, end: Any) -> None:
        if (end.task, end.epoch) == self.stop:
            raise Stopped
        self.losses.append(end.loss)
        self.accuracies.append(end.accuracy)


def run(
    ranks: Ranks,
    method: str,
    *,
    folder: Path | None = None,
    stop: tuple[int, int] | None = None,
    shuffled: str = "",
    **options: Any,
) -> dict[str, Any] | None:
    """All a run leaves behind that can be compared; None if it was broken off."""
    of_net = {name: options.pop(name) for name in ("statistics", "means", "variance", "follow") if name in options}
    chosen = create_method(method, options.pop("options", {}))
    net = make_net(chosen.norm, **{**chosen.network, **of_net})
    net.ranks = ranks
    settings = TrainSettings(**{"epochs": 3, "batch_size": 9, "lr": 0.05, "device": "cpu", **options})
    if folder is not None:
        folder.mkdir(exist_ok=True)
    watch, tasks = Watch(stop), make_tasks(shuffled)
    sequence_run = SequenceRun(
        net, tasks, chosen, settings, listeners=(watch,), folder=folder, config=options, checkpoint_seconds=0
    )
    resumed = sequence_run.resume()
    try:
        result = sequence_run.run()
    except Stopped:
        return None
    few = tasks[0].test.only(torch.tensor([3])) if not chosen.joint else None
    return {
        "resumed": resumed,
        "losses": watch.losses,
        "accuracies": watch.accuracies,
        "matrix": result.accuracy_matrix,
        "rows": {name: entry.row for name, entry in net.tasks.items()},  # recovered through input means
        "state": net.backbone.state_dict(),
        "pretrained": {} if net.pretrained is None else net.pretrained.state(),
        "penalties": [penalty.state_dict() for penalty in chosen.penalties if penalty.name != "afec"],
        "one image": few and evaluate(net, tasks[0], settings, images=few),
        "execution": result.execution,
        "sha256": result.final_sha256,
    }


def diverged(ranks: Ranks) -> str:
    """Every process sees that numbers went bad, wherever they did."""
    try:
        run(ranks, "finetune", lr=1e30)
    except DivergedError as error:
        return str(error)
    raise AssertionError("it went well")


def primitives(ranks: Ranks) -> dict[str, Any]:
    """What all else is made of."""
    mine = [torch.full((2, 2), ranks.rank + 1.0), torch.tensor([ranks.rank + 1]), torch.tensor(10.0 ** (ranks.rank))]
    ranks.add_up(mine)
    try:
        ranks.require_same(ranks.rank, "number")
        refused = ""
    except Exception as error:
        refused = str(error)
    ranks.require_same("all", "text")
    return {
        "added": mine,
        "gathered": ranks.gathered(torch.tensor([ranks.rank, 7])),
        "share": ranks.share(3 + ranks.rank, torch.device("cpu")),
        "decided": [ranks.decided(ranks.first), ranks.decided(not ranks.first)],
        "refused": refused,
    }


def make_net(norm: str, **options: Any) -> ContinualNet:
    """Three convolutions, where rounding stays rounding.

    A ReLU's gradient may be turned on or off by it; Adam would make steps of it for a bias before a batch norm, whose
    gradient is zero.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [
            layer
            for inputs, outputs, stride in ((3, 8, 2), (8, 12, 1), (12, 16, 2))
            for layer in (
                nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.SiLU(),
            )
        ]
        return ContinualNet(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), norm=norm, **options)  # type: ignore[arg-type]


def make_tasks(shuffled: str = "") -> TaskSequence:
    """Two tasks of 3 and 2 classes: 48 and 40 training, 31 and 20 test images; labels of one may say nothing."""
    sizes = {"dark": ((24, 16, 8), (14, 10, 7), 60), "bright": ((22, 18), (11, 9), 170)}
    return TaskSequence("tiny", "own", tuple(_task(name, *size, name == shuffled) for name, size in sizes.items()))


def _task(name: str, train: tuple[int, ...], test: tuple[int, ...], base: int, shuffled: bool) -> Task:
    draw = np.random.default_rng(base)
    labels = np.concatenate([np.repeat(np.arange(len(counts)), counts) for counts in (train, test)])
    pixels = draw.normal(base, 25, (len(labels), 3, 16, 16))
    pixels[np.arange(len(labels)), labels] += 40
    if shuffled:
        draw.shuffle(labels[: sum(train)])
    stored, cut = torch.from_numpy(pixels.clip(0, 255).astype(np.uint8)), sum(train)
    rows, of = torch.arange(len(labels)), torch.from_numpy(labels)
    classes = tuple(f"{name}-{k}" for k in range(len(train)))
    return Task(
        name=name,
        classes=classes,
        train=Images(stored, rows[:cut], of[:cut]),
        test=Images(stored, rows[cut:], of[cut:]),
        preprocess=Preprocess((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)),
    )


if __name__ == "__main__":
    main()
