"""What a Ray worker does: a group of runs, just as a local process does them."""

from __future__ import annotations

import os
import platform
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from confitune import __version__
from confitune.engine import RunResult
from confitune.errors import ConfituneError
from confitune.experiments.cluster.messages import Message, Reporter, letter_of
from confitune.experiments.group import Loaded, side_by_side
from confitune.experiments.job import Job, TrainingError

_SEEN_WITHIN = 15.0  # seconds: a network file system may show a new file late


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
        sent = mailbox.put.remote(letter_of(messages))
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
