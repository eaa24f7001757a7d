"""Runs and their folders in what an experiment wrote."""

from pathlib import Path

from confitune.engine import RunResult, read_results
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


def forget(out: Path, method: str | None = None, seed: int | None = None) -> None:
    """Take the lines of these runs out of the experiment, or all."""
    path = out / "runs.jsonl"
    kept = [r for r in read_results(path) if method not in (None, r.method) or seed not in (None, r.seed)]
    path.write_bytes(b"".join(result.line() for result in kept))
