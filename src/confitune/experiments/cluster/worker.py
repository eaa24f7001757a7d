"""What a Ray worker does: a group of runs, just as a local process does them; and what it tells the driver meanwhile.

Messages go by way of a mailbox, a few times a second.
"""

from __future__ import annotations

import os
import pickle
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch

from confitune import __version__
from confitune.engine import EpochEnd, Listener, RunResult
from confitune.errors import ConfituneError
from confitune.experiments.job import Job, Loaded, TrainingError, side_by_side

_SEEN_WITHIN = 15.0  # seconds: a network file system may show a new file late
PLACED, DECODING = "placed", "decoding"  # beside the events of a `Listener`
_PAUSE = 0.4  # seconds between two letters of a run


@dataclass(frozen=True)
class Errand:
    """A group of runs, and what a worker must know to do them as the driver would.

    Attributes:
        threads: of torch.
        home: the driver's folder, where relative paths begin.
        token: a file that the driver has written into the experiment's folder.
        version: the driver's, of confitune.
    """

    jobs: tuple[Job, ...]
    threads: int
    home: Path
    token: Path
    version: str = __version__


def work(errand: Errand, mailbox: Any) -> list[RunResult | ConfituneError]:
    """What became of each run: a result, or the error that stopped the group. Only its worker's death is not told."""
    node, attempt = platform.node(), uuid4().hex

    def send(messages: list[Message], wait: bool) -> None:
        sent = mailbox.put.remote(pickle.dumps(messages))
        if wait:
            _wait_for(sent)

    reporters = {job.folder: Reporter(send, str(job.folder), attempt) for job in errand.jobs}
    for reporter in reporters.values():
        reporter.placed(node)

    def wait_for_other(job: Job) -> None:
        reporters[job.folder].note(
            f"{job.label} waits: another process is working in {job.folder}, an earlier try of this run or a stranger"
        )

    try:
        _settle_in(errand)
        torch.set_num_threads(errand.threads)
        first = errand.jobs[0]
        loaded = Loaded.of(first, reporters[first.folder].decoding)
        return [*side_by_side(errand.jobs, loaded, lambda job: closing(reporters[job.folder]), wait_for_other)]
    except TrainingError as error:
        return [error] * len(errand.jobs)
    except torch.OutOfMemoryError as error:
        message = f"out of GPU memory on {node}: give each run a larger share with --gpus-per-run ({error})"
        return [ConfituneError(message)] * len(errand.jobs)
    except (ConfituneError, OSError) as error:
        return [ConfituneError(f"on {node}: {error}")] * len(errand.jobs)


def _settle_in(errand: Errand) -> None:
    """Be where the driver is, or say why that cannot be."""
    if errand.version != __version__:
        raise ConfituneError(
            f"this node has confitune {__version__}, the command was given with {errand.version}: "
            "install the same version everywhere"
        )
    try:
        os.chdir(errand.home)
    except OSError as error:
        raise ConfituneError(_not_shared(errand.home)) from error
    until = time.monotonic() + _SEEN_WITHIN
    while not errand.token.exists():
        if time.monotonic() > until:
            raise ConfituneError(_not_shared(errand.token.parent))
        time.sleep(0.5)


def _not_shared(folder: Path) -> str:
    return (
        f"this node does not see {folder} as the machine does on which the command was given: on a cluster the folder "
        "it is given in and --out must be on a file system that all nodes share, under the same path"
    )


def _wait_for(delivery: Any) -> None:
    import ray

    with suppress(ray.exceptions.RayError):  # a lost message costs a line on a screen; the result is what counts
        ray.get(delivery, timeout=10)


class Message(NamedTuple):
    """One event of a run.

    Attributes:
        run: the run's folder.
        attempt: which of its tries: one whose node was taken for dead may still have something to say.
        event: `PLACED` with a node's name, `DECODING` with what, done and total, or the name of a `Listener`'s method.
    """

    run: str
    attempt: str
    event: str
    values: tuple[Any, ...]


def open_mailbox(ray: Any) -> Any:
    """A Ray actor that keeps letters, which are pickled messages, until the driver takes them.

    Its class is made here and letters are bytes, so that its process needs no more than Ray: importing torch would take
    it seconds. It is on the head node: a cluster without that is none.
    """

    class Mailbox:
        def __init__(self) -> None:
            self._letters: list[bytes] = []

        def put(self, letter: bytes) -> None:
            self._letters.append(letter)

        def take(self) -> list[bytes]:
            taken, self._letters = self._letters, []
            return taken

    where = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}, "max_restarts": -1}
    return ray.remote(**where)(Mailbox).remote()


def read_letters(letters: Iterable[bytes]) -> list[Message]:
    """All messages of letters from the mailbox."""
    return [message for letter in letters for message in pickle.loads(letter)]


class Reporter(Listener):
    """Sends on what a run tells.

    Args:
        send: takes messages; whether to wait until they are delivered.
        run: the run's folder.
        attempt: a name for this try.
    """

    def __init__(self, send: Callable[[list[Message], bool], None], run: str, attempt: str) -> None:
        self._send, self._run, self._attempt = send, run, attempt
        self._waiting: list[Message] = []
        self._sent = 0.0

    def placed(self, node: str) -> None:
        """A worker has taken the run on."""
        self._tell(PLACED, node, now=True)

    def decoding(self, what: str, done: int, total: int) -> None:
        """Images are prepared."""
        self._tell(DECODING, what, done, total)

    def run_started(self, name: str, tasks: Sequence[str], epochs: int, first_task: int) -> None:
        self._tell("run_started", name, list(tasks), epochs, first_task, now=True)

    def task_started(self, task: int, name: str, first_epoch: int) -> None:
        self._tell("task_started", task, name, first_epoch)

    def stage_started(self, stage: str) -> None:
        self._tell("stage_started", stage)

    def step_done(self, step: int, steps: int) -> None:
        self._tell("step_done", step, steps)

    def epoch_ended(self, end: EpochEnd) -> None:
        self._tell("epoch_ended", end)

    def task_ended(self, task: int, accuracies: Sequence[float]) -> None:
        self._tell("task_ended", task, list(accuracies), now=True)

    def note(self, message: str) -> None:
        self._tell("note", message, now=True)

    def close(self) -> None:
        """Deliver what is left."""
        self._send(self._waiting, True)
        self._waiting = []

    def _tell(self, event: str, *values: Any, now: bool = False) -> None:
        if self._waiting and self._waiting[-1].event == event in (DECODING, "step_done"):
            self._waiting.pop()  # the newest says it all
        self._waiting.append(Message(self._run, self._attempt, event, values))
        if now or time.monotonic() - self._sent > _PAUSE:
            self._send(self._waiting, False)
            self._waiting, self._sent = [], time.monotonic()
