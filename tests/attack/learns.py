"""Kill `learn`, `learn --into` and changes of `tasks` at random moments, and look at what the bundle is.

    PYTHONPATH=src:tests python -m attack.learns --kills 100

It must be what it was or what it should become, whole, every answer to the bit, with nothing in the way of the same
command done again, after which it is exactly what an undisturbed one gives. Every change is a child process, forked so
that torch is imported once; it dies before or after one of its calls to the operating system that touch the disk, drawn
at random.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from confitune.deploy import Bundle, LearnSettings, Predictor, changing, examine, go_back, grow, learn, remove_class
from confitune.deploy.bundle import BundleChange
from confitune.methods import METHODS
from deploy.shared import answers, settling
from deploy.taught import picture
from experiments.kills import child

CALLS = ("fsync", "replace", "unlink", "open")
BUNDLES = {  # method, and for `best` whether a task is a head alone
    "best, a head": ("best", True),
    "best, trained": ("best", False),
    "confit": ("confit", False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance, done = random.Random(options.seed), 0
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for task in ("reds", "stripes", "blues"):
            draw(root / "photos" / task, task)
        bundles = {name: Changes(root / name, root / "photos", *kind) for name, kind in BUNDLES.items()}
        while done < options.kills:
            name = chance.choice(sorted(bundles))
            bundles[name].kill_once(chance)
            done += 1
    print(f"{done} changes were killed, and every bundle was whole and ended as an undisturbed one")


def draw(folder: Path, task: str, side: int = 64) -> None:
    """Ten pictures of each of two classes, of three where there are three."""
    chance = np.random.default_rng(len(task))
    for label in range(3 if task == "stripes" else 2):
        (folder / f"{task} {label}").mkdir(parents=True)
        for n in range(10):
            picture(task, label, chance, side).save(folder / f"{task} {label}" / f"{n}.png")


class Changes:
    """A bundle with two tasks, and what can be done to it.

    Args:
        root: a folder of its own.
        photos: a folder for each task.
        method: of the bundle.
        head: whether tasks of `best` are heads alone.
    """

    def __init__(self, root: Path, photos: Path, method: str, head: bool) -> None:
        self.root, self.photos, self.method, self.head = root, photos, method, head
        for task in ("reds", "stripes"):
            require(child(lambda: self.learn(task, root / "before")) == 0, "the bundle could not be made")  # noqa: B023
        self.work: dict[str, Callable[[Path], object]] = {
            "learn": lambda path: self.learn("blues", path),
            "remove": lambda path: change(path, lambda change: change.remove_task("reds")),
            "undo": lambda path: go_back(Bundle.open(path)),
        }
        if method == "best":  # others move what tasks share, and none of their tasks can grow
            self.work["grow"] = self.grow
            self.work["remove class"] = lambda path: change(
                path, lambda opened: remove_class(opened, "stripes", "stripes 1")
            )
        self.before, self.after, self.calls = state(root / "before"), {}, {}
        for name, work in self.work.items():
            shutil.copytree(root / "before", root / name)
            counted = root / f"{name} calls"
            require(child(lambda: counting(lambda: work(root / name), counted)) == 0, name)  # noqa: B023
            self.after[name], self.calls[name] = state(root / name), int(counted.read_text())

    def learn(self, task: str, path: Path) -> None:
        """Teach the bundle a task, quickly."""
        torch.manual_seed(0)
        new = {"model": "test_byobnet", "weights": "none", "size": 32, "method": self.method}
        given = {} if Bundle.exists(path) else new
        lr = 0.03 if self.method == "best" else 0.02
        settings = LearnSettings(epochs=10, batch_size=4, lr=lr, min_steps=0, device="cpu", keep=4, **given)
        with patch.object(METHODS["best"], "settle", settling(self.head)):
            learn(self.photos / task, task, path, settings, cache_dir=self.root / "cache")

    def grow(self, path: Path) -> None:
        """Add two classes to a task."""
        torch.manual_seed(0)
        settings = LearnSettings(device="cpu", keep=4)
        grow(self.photos / "blues", "reds", path, settings, cache_dir=self.root / "cache")

    def kill_once(self, chance: random.Random) -> None:
        """One change that dies; what the bundle is then, and after the same change again."""
        name = chance.choice(["learn", *self.work])
        at, before = chance.randrange(self.calls[name]), chance.random() < 0.5
        path, work = self.root / "victim", self.work[name]
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self.root / "before", path)
        status = child(lambda: dying(lambda: work(path), at, before))
        require(os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"{name} was not killed at {at}")
        found = state(path)
        require(found in (self.before, self.after[name]), f"{name}, killed at call {at}, left neither state")
        if found == self.before:
            require(child(lambda: work(path)) == 0, f"{name} cannot be done again after a kill at {at}")
        else:
            require(child(lambda: change(path, lambda bundle: None)) == 0, f"nothing can follow {name}")
        require(state(path) == self.after[name], f"{name}, done again after a kill at {at}, ends otherwise")
        require(not examine(path).findings, f"{name}, killed at {at}, left {examine(path).findings}")
        print(f"{self.root.name}: {name} killed {'before' if before else 'after'} call {at + 1} of {self.calls[name]}")


def change(path: Path, work: Callable[[BundleChange], object]) -> None:
    with changing(Bundle.open(path)) as opened:
        work(opened)


def state(path: Path) -> Any:
    """All that a bundle says, but for times, and what it answers with and without a task."""
    bundle = Bundle.open(path)
    require(bundle.damage is None, f"{path} is damaged: {bundle.damage}")
    for task in bundle.tasks:  # each file is compared with its hash
        bundle.task_state(task)
        bundle.held_out(task)
        bundle.features(task)
    said = json.loads((path / "bundle.json").read_bytes())
    for of in (said, *said["tasks"].values()):
        for name in ("written", "learned", "checksum"):
            of.pop(name, None)
    pixels = torch.randint(0, 256, (3, 3, 224, 224), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    guesses = Predictor(bundle, device="cpu").predict(pixels, [None] * 3, top=9)
    logits = {task: rows.tolist() for task, rows in answers(path).items()}
    return list(said["tasks"]), said, logits, [guess.told(9) for guess in guesses]


def counting(work: Callable[[], object], into: Path) -> None:
    made = [0]
    _watch(lambda: made.__setitem__(0, made[0] + 1), lambda: None)
    work()
    count = made[0]
    into.write_text(str(count))


def dying(work: Callable[[], object], at: int, before: bool) -> None:
    made = [0]

    def die(now: bool) -> None:
        made[0] += now
        if made[0] == at + 1 and now == before:
            os.kill(os.getpid(), signal.SIGKILL)

    _watch(lambda: die(True), lambda: die(False))
    work()
    os.kill(os.getpid(), signal.SIGKILL)  # it did with fewer calls this time


def _watch(enter: Callable[[], object], leave: Callable[[], object]) -> None:
    """Call these around every call that touches the disk."""

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            enter()
            given = real(*arguments, **options)
            leave()
            return given

        return call

    for name in CALLS:
        setattr(os, name, watched(getattr(os, name)))


def require(true: bool, otherwise: str) -> None:
    if not true:
        sys.exit(otherwise)


if __name__ == "__main__":
    main()
