"""Kill a run at random moments with SIGKILL, resume it, and compare what it ends with to an undisturbed run.

    python tests/experiments/kills.py                 # 10 kills in each of four phases: five minutes on 2 cores
    python tests/experiments/kills.py --each 2 --seed 7

Every run is a child process of its own, forked from this one so that torch is imported once. A phase's n-th call kills
the process, before or after its work, n drawn at random among the calls that an undisturbed run makes.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import confitune.engine.checkpoint as checkpoints
import confitune.engine.evaluation as evaluation
import confitune.engine.step as steps
import confitune.files as files
import confitune.tasks.store as stores
from confitune.experiments.runs.identity import finished_runs
from confitune.experiments.runs.recipe import make_recipe
from confitune.experiments.runs.runner import run_recipe
from confitune.nn import create_backbone

# Phase -> where its work is done. Files are written in several calls, so that kills fall in between, too; the last of
# them may fall after the result, which is then taken as it is.
PHASES: dict[str, list[tuple[Any, str]]] = {
    "training": [(steps.TrainStep, "train")],
    "checkpoint": [(checkpoints.Checkpoint, "save"), (checkpoints, "write_sealed"), (files.os, "replace")],
    "evaluation": [(evaluation, "right_answers")],
    "image store": [(stores, "open_rgb"), (stores, "write_whole")],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=10, help="kills in each phase")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        equal = _all_kills(Path(scratch), options.each, chance)
    print(f"{equal} of {len(PHASES) * options.each} runs ended as the undisturbed one")
    sys.exit(equal != len(PHASES) * options.each)


def _all_kills(root: Path, each: int, chance: random.Random) -> int:
    _draw_photos(root / "photos")
    weights = root / "start.pth"
    child(lambda: _save_weights(weights))
    values = {
        "dataset": f"folder:{root / 'photos'}",
        "model": "test_byobnet",
        "weights": str(weights),
        "methods": ["confit"],
        "epochs": 4,
        "batch_size": 8,
        "momentum": 0.9,
        "device": "cpu",
        "seeds": 1,
    }
    calls = root / "calls"
    child(lambda: _run(values, root / "whole", root / "whole cache", counting=calls))
    (whole,) = finished_runs(root / "whole").values()
    made = dict(line.split(": ") for line in calls.read_text().splitlines())
    equal = 0
    for phase in PHASES:
        for number in range(each):
            at, before = chance.randrange(int(made[phase])), chance.random() < 0.5
            out, cache = root / f"{phase} {number}", root / f"{phase} {number} cache"
            status = child(lambda: _run(values, out, cache, killed=(phase, at, before)))  # noqa: B023
            assert os.WIFSIGNALED(status), f"{phase}, call {at}: the run was not killed"
            assert os.WTERMSIG(status) == signal.SIGKILL
            assert child(lambda: _run(values, out, cache)) == 0  # noqa: B023
            (again,) = finished_runs(out).values()
            same = again.final_sha256 == whole.final_sha256 and again.accuracy_matrix == whole.accuracy_matrix
            equal += same
            when = "before" if before else "after"
            print(
                f"{phase}: killed {when} call {at + 1} of {made[phase]}, {'equal' if same else 'NOT EQUAL'}", flush=True
            )
    return equal


def _run(
    values: dict[str, Any],
    out: Path,
    cache: Path,
    killed: tuple[str, int, bool] | None = None,
    counting: Path | None = None,
) -> None:
    counts = dict.fromkeys(PHASES, 0)
    for phase, places in PHASES.items():
        for owner, name in places:
            _watch(owner, name, phase, counts, killed)
    os.environ["CONFITUNE_CACHE"] = str(cache)
    run_recipe(make_recipe(values), out, resume=True, checkpoint_seconds=0)
    if counting is not None:
        counting.write_text("".join(f"{phase}: {count}\n" for phase, count in counts.items()))


def _watch(owner: Any, name: str, phase: str, counts: dict[str, int], killed: tuple[str, int, bool] | None) -> None:
    real = getattr(owner, name)

    def watched(*arguments: Any, **options: Any) -> Any:
        mine = killed is not None and killed[0] == phase and counts[phase] == killed[1]
        counts[phase] += 1
        if mine and killed is not None and killed[2]:
            os.kill(os.getpid(), signal.SIGKILL)
        given = real(*arguments, **options)
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)
        return given

    setattr(owner, name, watched)


def child(work: Callable[[], object]) -> int:
    """Do it in a process of its own; how that ended."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            work()
            code = 0
        except BaseException as error:  # nothing of the parent may run here
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def _save_weights(path: Path) -> None:
    torch.manual_seed(0)
    torch.save(create_backbone("test_byobnet", "none").module.state_dict(), path)


def _draw_photos(root: Path) -> None:
    chance = np.random.default_rng(0)
    for label in range(4):
        (root / f"class {label}").mkdir(parents=True)
        for number in range(15):
            pixels = chance.integers(0, 60, (48, 48, 3))
            pixels[..., label % 3] += 60 + 40 * (label // 3)
            Image.fromarray(pixels.astype(np.uint8)).save(root / f"class {label}" / f"{number}.png")


if __name__ == "__main__":
    main()
