"""Runs on a Ray cluster: every run is a Ray task, which goes on from its checkpoint when its node dies.

A worker does a run just as a local process does, and logs to the shared folder.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from rich.console import Console

from confitune import __version__
from confitune.engine import Listener, RunResult
from confitune.engine.progress import progress_board
from confitune.errors import ConfituneError
from confitune.experiments.runs.job import Job, TrainingError, groups_of, load, side_by_side
from confitune.experiments.runs.recipe import Recipe
from confitune.experiments.runs.runner import Outcomes, Place

RETRIES = 5  # of a run whose worker or node died; each goes on from the run's checkpoint
_STORE_BYTES = 100 * 2**20  # Ray's object store: results are small
_LOOK_EVERY = 1.0  # seconds
_SEEN_WITHIN = 15.0  # seconds: a network file system may show a new file late
# A small network's steps gain little from more threads, and a number that does not depend on the node keeps the
# last bits of a result the same on all of them.
THREADS = 4

Share = tuple[int, float]  # of a node, while a run goes on: CPUs, which are its torch's threads, too, and GPUs


def share_of(
    nodes: Sequence[Mapping[str, float]], device: str, gpus: float | None = None, cpus: int | None = None
) -> Share:
    """A run's share, as asked for or by default.

    By default a run that may use a GPU has one to itself where the cluster has any, and the CPUs that come with it
    when its node's are divided evenly; a run on CPUs has 4 of them, or the smallest node's where that is fewer.

    >>> share_of([{"CPU": 32, "GPU": 4}], "auto"), share_of([{"CPU": 32, "GPU": 4}], "auto", gpus=0.25)
    ((8, 1), (2, 0.25))
    >>> share_of([{"CPU": 32}, {"CPU": 2}], "auto")
    (2, 0)
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfituneError(f"--device {device} names one GPU, and Ray chooses which a run gets: use --device cuda")
    if gpus is not None and device == ("cpu" if gpus else "cuda"):
        both = f"--gpus-per-run {gpus:g} and --device {device}"
        raise ConfituneError(f"{both} contradict each other: leave one of them out")
    if gpus is None:
        gpus = 1 if device == "cuda" or (device == "auto" and any(node.get("GPU") for node in nodes)) else 0
    if cpus is None and gpus:
        even = [node["CPU"] * gpus / node["GPU"] for node in nodes if node.get("GPU") and node.get("CPU")]
        cpus = max(1, int(min(even, default=1)))
    return cpus or int(min([THREADS, *(node["CPU"] for node in nodes if node.get("CPU"))])), gpus


def connect(on: str) -> Any:
    """Ray, connected to the cluster that `--on` names; see `confitune.experiments.runs.runner.open_place`."""
    address = os.environ.get("RAY_ADDRESS", "") if on == "ray" else on
    listener = _listener(address, on)
    try:
        import ray
    except ImportError as error:
        raise ConfituneError(f"--on {on} needs Ray: pip install 'confitune[ray]'") from error
    if listener:
        _require_answer(listener, address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    here = {"address": "local", "include_dashboard": False, "object_store_memory": _STORE_BYTES}
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **({"address": address} if address else here))
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        where = f"the Ray cluster at {address} cannot be used" if address else "Ray cannot be started here"
        raise ConfituneError(f"{where}: {error}") from error
    return ray


def _listener(address: str, on: str) -> tuple[str, int] | None:
    """Host and port of an address; None where Ray finds or starts the cluster on this machine."""
    if address in ("", "auto"):
        return None
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ConfituneError(f"--on {on}: write local, ray, HOST:PORT or ray://HOST:PORT")
    return host.strip("[]"), int(port)


def _require_answer(listener: tuple[str, int], address: str) -> None:
    """Refuse an address at which nobody listens: Ray would end this process after a minute, without an exception."""
    try:
        socket.create_connection(listener, timeout=10).close()
    except OSError as error:
        raise ConfituneError(f"no answer from {address} ({error}): is a Ray cluster running there?") from error


class RayPlace(Place):
    """A Ray cluster that this process is connected to."""

    def __init__(
        self, ray: Any, console: Console | None, parallel_seeds: int, gpus: float | None, cpus: int | None
    ) -> None:
        super().__init__(console, parallel_seeds)
        self._ray = ray
        self._gpus = gpus
        self._cpus = cpus
        self._errands: dict[Any, Errand] = {}  # under way, by what Ray will put their results into

    def settled(self, recipe: Recipe) -> Recipe:
        """With the device and the precision that its runs will have on the cluster, whatever this machine has."""
        _, gpus = self._share(recipe)
        precision = ("bf16" if gpus else "fp32") if recipe.precision == "auto" else recipe.precision
        return recipe.model_copy(update={"device": "cuda" if gpus else "cpu", "precision": precision})

    def results(self, jobs: Sequence[Job]) -> Outcomes:
        """Hand out all jobs, of which Ray starts as many at a time as there is room for; each outcome as it comes."""
        self.begin(jobs)
        board = progress_board(self.console)
        bar = board.add_task("all runs", total=len(jobs), status="", left=None)
        with board if self.console.is_terminal else nullcontext():
            while self._errands:
                ended, _ = self._ray.wait(list(self._errands), num_returns=len(self._errands), timeout=_LOOK_EVERY)
                for task in ended:
                    errand = self._errands.pop(task)
                    died = max(errand.tries() - 1, 0)
                    again = f"; its worker died {died} times, it went on from its checkpoint" if died else ""
                    for job, outcome in zip(errand.jobs, self._outcomes_of(task, errand), strict=True):
                        board.advance(bar)
                        if isinstance(outcome, RunResult):
                            self.say(f"{job.label}: accuracy {outcome.acc:.1f}%{again}")
                        yield job, outcome
                    errand.token.unlink(missing_ok=True)

    def begin(self, jobs: Sequence[Job]) -> None:
        """Hand out jobs."""
        for group in groups_of(jobs, self.parallel_seeds):
            cpus, gpus = self._share(group[0].recipe)
            errand = Errand(tuple(group), cpus, Path.cwd(), group[0].out / f".shared-{uuid4().hex}", RETRIES + 1)
            errand.token.parent.mkdir(parents=True, exist_ok=True)
            errand.token.touch()
            remote = self._ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=RETRIES, name=group[0].label)(work)
            self._errands[remote.remote(errand)] = errand
        for cpus, gpus in {self._share(job.recipe) for job in jobs}:
            if not any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in self._nodes()):
                what = f"{cpus} CPUs" + (f" and {gpus:g} GPU" if gpus else "")
                self.say(f"note: no node of the cluster has {what}: runs wait until one joins", "yellow")

    def close(self) -> None:
        """Stop what is under way; checkpoints stay for a later command to go on from."""
        for task, errand in self._errands.items():
            self._ray.cancel(task, force=True)
            errand.token.unlink(missing_ok=True)

    def _outcomes_of(self, task: Any, errand: Errand) -> list[RunResult | ConfituneError]:
        try:
            return list(self._ray.get(task))
        except self._ray.exceptions.RayTaskError as error:  # nothing that a run raises on purpose
            told = f"failed on the cluster (every node needs confitune and what it imports):\n{error}"
        except self._ray.exceptions.RayError as error:
            told = f"{_died(errand.tries())} ({error})"
        return [ConfituneError(told)] * len(errand.jobs)

    def _share(self, recipe: Recipe) -> Share:
        return share_of(self._nodes(), recipe.device, self._gpus, self._cpus)

    def _nodes(self) -> list[dict[str, float]]:
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]


@dataclass(frozen=True)
class Errand:
    """A group of runs, and what a worker must know to do them as the driver would."""

    jobs: tuple[Job, ...]
    threads: int  # of torch
    home: Path  # the driver's folder, where relative paths begin
    token: Path  # a file that the driver has written into the experiment's folder; each worker adds a line
    most_tries: int  # Ray itself never gives up on a run that is killed for memory
    version: str = __version__  # the driver's

    def tries(self) -> int:
        """How many workers have taken the runs on so far."""
        return len(self.token.read_text().splitlines())


def work(errand: Errand) -> list[RunResult | ConfituneError]:
    """What became of each run: a result, or the error that stopped the group. Only its worker's death is not told."""
    node = platform.node()
    try:
        _settle_in(errand, node)
        torch.set_num_threads(errand.threads)
        loaded = load(errand.jobs[0])
        # Where an earlier try of a run is still alive, it is waited for.
        return [*side_by_side(errand.jobs, *loaded, [Listener()] * len(errand.jobs), wait=True)]
    except TrainingError as error:
        told: ConfituneError = error
    except torch.OutOfMemoryError as error:
        told = ConfituneError(
            f"out of GPU memory on {node}: give each run a larger share with --gpus-per-run ({error})"
        )
    except (ConfituneError, OSError) as error:
        told = ConfituneError(f"on {node}: {error}")
    return [told] * len(errand.jobs)


def _settle_in(errand: Errand, node: str) -> None:
    """Be where the driver is, or say why that cannot be."""
    if errand.version != __version__:
        raise ConfituneError(
            f"this node has confitune {__version__}, the command was given with {errand.version}: "
            "install the same version everywhere"
        )
    until = time.monotonic() + _SEEN_WITHIN
    while not (errand.home.is_dir() and (errand.home / errand.token).exists()):
        if time.monotonic() > until:
            missing = errand.token.parent if errand.home.is_dir() else errand.home
            raise ConfituneError(
                f"this node does not see {missing} as the machine does on which the command was given: on a cluster "
                "the folder it is given in and --out must be on a file system that all nodes share, under the same path"
            )
        time.sleep(0.5)
    os.chdir(errand.home)
    if (tried := errand.tries()) >= errand.most_tries:
        raise ConfituneError(_died(tried))
    with errand.token.open("a") as file:
        file.write(f"{node}\n")


def _died(times: int) -> str:
    return (
        f"its worker died {times} times; if that was for lack of memory, fewer runs at a time on a node help "
        "(--cpus-per-run, --gpus-per-run), and --resume goes on from the checkpoint"
    )
