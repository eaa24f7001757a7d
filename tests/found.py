"""Runs and their folders in what an experiment wrote, and runs that are made up."""

from pathlib import Path

import numpy as np

from confitune.engine import RunResult, read_results
from confitune.engine.result import add_result, summary_of
from confitune.experiments.runs.identity import finished_runs


def run_of(out: Path, method: str, seed: int = 0, **config: object) -> RunResult:
    """The one finished run of a method and seed (with these values in its configuration)."""
    (result,) = (
        result
        for result in finished_runs(out).values()
        if (result.method, result.seed) == (method, seed)
        and all(result.config.get(name) == value for name, value in config.items())
    )
    return result


def folder_of(out: Path, method: str, seed: int = 0, dataset: str = "digits") -> Path:
    """Where its checkpoints and logs are."""
    (folder,) = (out / "runs" / dataset / method).glob(f"seed-{seed}-*")
    return folder


def contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """Bytes and time of every file below a folder."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.rglob("*")) if path.is_file()}


def forget(out: Path, method: str | None = None, seed: int | None = None) -> None:
    """Take the lines of these runs out of the experiment, or all."""
    path = out / "runs.jsonl"
    kept = [r for r in read_results(path) if method not in (None, r.method) or seed not in (None, r.seed)]
    path.write_bytes(b"".join(result.line() for result in kept))


ACCURACIES = ((90.0, 80.0), (np.nan, 95.0))


def made_up(method: str = "confit", seed: int = 0, matrix: object = ACCURACIES, **given: object) -> RunResult:
    """A result with this accuracy matrix; what is given are fields of it, or of its configuration."""
    accuracies = np.array(matrix, dtype=float)
    dataset = given.pop("dataset", "digits")
    images = {"classes": ["cat", "dog"], "train_images": 7, "test_images": 2}
    learned = range(1 if method == "joint" else len(accuracies))
    values = {
        "dataset": dataset,
        "method": method,
        "seed": seed,
        **summary_of(accuracies),
        "tasks": [{"name": f"t{i}", **images, "norm_numbers": 1000 + i, "head_numbers": 34} for i in learned],
        "versions": {"torch": "2.9"},
        "device": "cpu",
        "weights": "start.pth",
        "weights_sha256": "abc",
        "final_sha256": f"def{seed}",
        "seconds": 10.0 + seed,
        "images_per_second": 100.0,
        "command": "confitune run --seeds 3",
        **{name: value for name, value in given.items() if name in RunResult.model_fields},
    }
    config = {name: value for name, value in given.items() if name not in RunResult.model_fields}
    values.setdefault("config", {"model": "test_byobnet", "dataset": dataset, "method": method, "seed": seed, **config})
    return RunResult(**values)


def of_two_tasks(method: str, seed: int, matrix: tuple, as_learned: object = None, **config: object) -> RunResult:
    """Made up; `matrix` is what task 1 was when learned and at the end, and task 2 at the end."""
    first, last = matrix
    return made_up(method, seed, (first, (np.nan, last)), as_learned=as_learned, **config)


def saved(out: Path, *results: RunResult) -> Path:
    """A folder with these runs."""
    out.mkdir(parents=True, exist_ok=True)
    for result in results:
        add_result(out / "runs.jsonl", result)
    return out
