"""The driver's side of runs on a Ray cluster: hands them out with a share of a node, collects what they give."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from rich.console import Console

from confitune.engine import RunResult
from confitune.errors import ConfituneError
from confitune.experiments.cluster.display import Display
from confitune.experiments.cluster.worker import Errand, open_mailbox, read_letters, work
from confitune.experiments.job import Job, groups_of
from confitune.experiments.recipe import Recipe

RETRIES = 5  # of a run whose worker or node died; each goes on from the run's checkpoint
_STORE_BYTES = 100 * 2**20  # Ray's object store: results and messages are small
_LOOK_EVERY = 0.3  # seconds
# A small network's steps gain little from more threads, and a number that does not depend on the node keeps the
# last bits of a result the same on all of them.
THREADS = 4


@dataclass(frozen=True)
class Share:
    """CPUs and GPUs that a run takes from its node while it goes on; its torch gets as many threads as it has CPUs."""

    cpus: int
    gpus: float = 0

    def fits(self, node: Mapping[str, float]) -> bool:
        """Whether an empty node with these resources can take a run."""
        return node.get("CPU", 0) >= self.cpus and node.get("GPU", 0) >= self.gpus

    def __str__(self) -> str:
        cpus = f"{self.cpus} CPU{'s' * (self.cpus > 1)}"
        return f"{self.gpus:g} GPU and {cpus}" if self.gpus else cpus


def share_of(
    nodes: Sequence[Mapping[str, float]], device: str, gpus: float | None = None, cpus: int | None = None
) -> Share:
    """A run's share, as asked for or by default.

    By default a run that may use a GPU has one to itself where the cluster has any, and the CPUs that come with it
    when its node's are divided evenly; a run on CPUs has 4 of them, or the smallest node's where that is fewer.

    Args:
        nodes: what each node of the cluster has, as Ray names it.
        device: of the recipe: 'auto', 'cpu' or 'cuda'.

    >>> share_of([{"CPU": 32, "GPU": 4}], "auto")
    Share(cpus=8, gpus=1)
    >>> share_of([{"CPU": 32, "GPU": 4}], "auto", gpus=0.25)
    Share(cpus=2, gpus=0.25)
    >>> share_of([{"CPU": 32}, {"CPU": 2}], "auto")
    Share(cpus=2, gpus=0)
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfituneError(f"--device {device} names one GPU, and Ray chooses which a run gets: use --device cuda")
    if gpus is not None and not 0 <= gpus <= 1:
        raise ConfituneError(f"--gpus-per-run {gpus:g}: a run uses one GPU or a part of it, from 0 to 1")
    if gpus and device == "cpu":
        raise ConfituneError(f"--gpus-per-run {gpus:g} and --device cpu contradict each other: leave one of them out")
    if gpus == 0 and device == "cuda":
        raise ConfituneError("--gpus-per-run 0 and --device cuda contradict each other: leave one of them out")
    if gpus is None:
        gpus = 1 if device == "cuda" or (device == "auto" and any(node.get("GPU") for node in nodes)) else 0
    if cpus is None:
        if gpus:
            even = [node["CPU"] * gpus / node["GPU"] for node in nodes if node.get("GPU") and node.get("CPU")]
            cpus = max(1, int(min(even, default=1)))
        else:
            cpus = int(min([THREADS, *(node["CPU"] for node in nodes if node.get("CPU"))]))
    return Share(cpus, gpus)


@contextmanager
def ray_place(
    on: str, console: Console, parallel_seeds: int = 1, gpus: float | None = None, cpus: int | None = None
) -> Iterator[RayPlace]:
    """A Ray cluster as a place for runs; see `confitune.experiments.place.open_place`."""
    try:
        import ray
    except ImportError as error:
        raise ConfituneError(f"--on {on} needs Ray: pip install 'confitune[ray]'") from error
    _connect(ray, on)
    try:
        place = RayPlace(ray, console, parallel_seeds, gpus, cpus)
        try:
            yield place
        finally:
            place.close()
    finally:
        ray.shutdown()


def _connect(ray: Any, on: str) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = os.environ.get("RAY_ADDRESS", "") if on == "ray" else on
    if not address:
        options |= {"address": "local", "include_dashboard": False, "object_store_memory": _STORE_BYTES}
    else:
        options |= {"address": address}
        _require_answer(address, on)
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        where = f"the Ray cluster at {address} cannot be used" if address else "Ray cannot be started here"
        asked = "AuthToken" in f"{error} {error.__cause__}"
        hint = "; it asks for a token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to the file that holds it"
        raise ConfituneError(f"{where}: {error}{hint if asked else ''}") from error


def _require_answer(address: str, on: str) -> None:
    """Refuse an address at which nobody listens: Ray would end this process after a minute, without an exception."""
    if address == "auto":  # Ray finds the one that runs on this machine
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ConfituneError(f"--on {on}: write local, ray, HOST:PORT or ray://HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise ConfituneError(f"nobody answers at {address} ({error}): is a Ray cluster running there?") from error


class RayPlace:
    """A Ray cluster that this process is connected to."""

    at_once = None

    def __init__(self, ray: Any, console: Console, parallel_seeds: int, gpus: float | None, cpus: int | None) -> None:
        self.console = console
        self._ray, self._parallel_seeds, self._gpus, self._cpus = ray, parallel_seeds, gpus, cpus
        self._display = Display(console)
        self._tasks: dict[Any, list[Job]] = {}  # under way, by what Ray will put their results into
        self._outcomes: dict[Path, RunResult | ConfituneError] = {}  # that nobody has asked for yet, by folder
        self._tokens: dict[Path, Path] = {}  # by experiment
        self._mailbox = open_mailbox(ray)
        self._news = self._mailbox.take.remote()

    def settled(self, recipe: Recipe) -> Recipe:
        """With the device and the precision that its runs will have on the cluster, whatever this machine has."""
        cuda = self._share(recipe).gpus > 0
        precision = ("bf16" if cuda else "fp32") if recipe.precision == "auto" else recipe.precision
        return recipe.model_copy(update={"device": "cuda" if cuda else "cpu", "precision": precision})

    def begin(self, jobs: Sequence[Job]) -> None:
        """Hand out all of them; Ray starts as many at a time as there is room for."""
        self._display.expect(jobs)
        remotes: dict[Share, Any] = {}
        for group in groups_of(jobs, self._parallel_seeds):
            share = self._share(group[0].recipe)
            if share not in remotes:
                self._say_if_nowhere(share)
                resources = {"num_cpus": share.cpus, "num_gpus": share.gpus}
                remotes[share] = self._ray.remote(**resources, max_retries=RETRIES)(work)
            errand = Errand(tuple(group), share.cpus, Path.cwd(), self._token(group[0].out))
            self._tasks[remotes[share].options(name=group[0].label).remote(errand, self._mailbox)] = group

    def results(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, RunResult | ConfituneError]]:
        """What became of jobs that were begun, in the order in which they end."""
        waiting = {job.folder: job for job in jobs}
        while waiting:
            there = [folder for folder in waiting if folder in self._outcomes]
            yield from ((waiting.pop(folder), self._outcomes.pop(folder)) for folder in there)
            if waiting:
                self._collect()

    def close(self) -> None:
        """Stop what is under way; checkpoints stay for a later command to go on from."""
        self._display.close()
        for task in self._tasks:
            self._ray.cancel(task, force=True)
        for token in self._tokens.values():
            token.unlink(missing_ok=True)

    def _collect(self) -> None:
        ended, _ = self._ray.wait(list(self._tasks), num_returns=len(self._tasks), timeout=_LOOK_EVERY)
        self._show_news(0)
        if ended:  # twice: what they told last may have come after the mailbox was last asked
            self._show_news(10)
            self._show_news(10)
        for task in ended:
            group = self._tasks.pop(task)
            for job, outcome in zip(group, self._outcomes_of(task, group), strict=True):
                self._outcomes[job.folder] = outcome
                self._display.ended(job)
        for task, group in self._tasks.items():
            if self._display.attempts(group[0]) > RETRIES + 1:  # Ray itself never gives up on one killed for memory
                self._ray.cancel(task, force=True)

    def _outcomes_of(self, task: Any, group: list[Job]) -> list[RunResult | ConfituneError]:
        exceptions = self._ray.exceptions
        try:
            found: list[RunResult | ConfituneError] = self._ray.get(task)
            return found
        except exceptions.RayTaskError as error:  # nothing that a run raises on purpose
            hint = " (every node needs confitune and what it imports)" if "No module named" in str(error) else ""
            told = ConfituneError(f"failed on the cluster{hint}:\n{error}")
        except exceptions.RayError as error:
            tries = self._display.attempts(group[0])
            told = ConfituneError(
                f"its worker died {tries} times; if that was for lack of memory, fewer runs at a time on a node help "
                f"(--cpus-per-run, --gpus-per-run), and --resume goes on from the checkpoint ({error})"
            )
        return [told] * len(group)

    def _show_news(self, seconds: float) -> None:
        """Show what the mailbox gave when it was last asked, and ask again; an answer that takes long is not lost."""
        if self._ray.wait([self._news], timeout=seconds)[0]:
            with suppress(self._ray.exceptions.RayError):  # runs go on, seen or not
                self._display.show(read_letters(self._ray.get(self._news)))
            self._news = self._mailbox.take.remote()

    def _share(self, recipe: Recipe) -> Share:
        return share_of(self._nodes(), recipe.device, self._gpus, self._cpus)

    def _nodes(self) -> list[dict[str, float]]:
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def _say_if_nowhere(self, share: Share) -> None:
        if not any(share.fits(node) for node in self._nodes()):
            text = f"note: no node of the cluster has {share}: runs wait until one joins"
            self.console.print(text, style="yellow", markup=False, highlight=False)

    def _token(self, out: Path) -> Path:
        """A file by which workers see whether they share this folder."""
        if out not in self._tokens:
            out.mkdir(parents=True, exist_ok=True)
            self._tokens[out] = out / f".shared-{uuid4().hex}"
            self._tokens[out].touch()
        return self._tokens[out]
