"""What is required of every case: a documented error or success, soon, in little memory, and nothing elsewhere."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

from confitune.errors import ConfituneError

SECONDS = 5.0  # of processor time: how busy the machine is must not matter
MEMORY = 2**30


class Watch:
    """Tries mutated files, and raises where one of them does what it should not.

    Args:
        home: a folder of its own; cases may write in `home / "at-hand"` and nowhere else.
        seed: None for the same cases every time.
        more: so many times as many cases.
    """

    def __init__(self, home: Path, seed: int | None = None, more: float = 1) -> None:
        self.home, self.seed, self.more = home, seed, more
        self.at_hand = home / "at-hand"
        self.at_hand.mkdir()
        (home / "canary").write_text("sings")
        self.cases = self.refused = 0
        self.slowest = 0.0
        self._elsewhere = self._listing()
        self._memory = peak_of_process()

    def try_many(
        self, mutated: SearchStrategy[Any], work: Callable[[Any], object], cases: int, found: Sequence[Any] = ()
    ) -> None:
        """Do `work` with `found`, what went wrong once, and with so many mutated inputs."""

        def check(value: Any) -> None:
            self._one(work, value)

        for value in found:
            check(value)
        test = given(mutated)(check)
        test = settings(
            max_examples=max(1, round(cases * self.more)),
            derandomize=self.seed is None,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )(test)
        (test if self.seed is None else hypothesis.seed(self.seed)(test))()

    def _one(self, work: Callable[[Any], object], value: Any) -> None:
        began = time.process_time()
        try:
            work(value)
        except ConfituneError as error:
            self.refused += 1
            str(error).encode()  # can be shown
            _require_no_memory_error(error)
        took = time.process_time() - began
        self.cases += 1
        self.slowest = max(self.slowest, took)
        assert took < SECONDS, f"it took {took:.1f} s"
        assert self.grown < MEMORY, f"memory grew by {self.grown / 2**20:.0f} MB"
        assert self._listing() == self._elsewhere, "files outside the folder at hand have changed"

    @property
    def grown(self) -> int:
        """How much more memory was used at once than before the first case."""
        return peak_of_process() - self._memory

    def _listing(self) -> list[tuple[str, int, int]]:
        """Everything around the folder at hand."""
        found = []
        for folder, folders, files in os.walk(self.home):
            if Path(folder) == self.home:
                folders.remove(self.at_hand.name)
            for name in [*folders, *files]:
                status = os.lstat(os.path.join(folder, name))
                found.append((os.path.join(folder, name), status.st_size, status.st_mtime_ns))
        return sorted(found)


def limit_memory() -> None:
    """Let reservations fail that are far beyond what is allowed; a case that met one is found by its error's cause."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + 3 * MEMORY, now + 3 * MEMORY))


def peak_of_process() -> int:
    """The most memory that this process has had at once."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _require_no_memory_error(error: BaseException | None) -> None:
    while error is not None:
        assert not isinstance(error, MemoryError), f"memory was asked for before the size was checked: {error}"
        assert "can't allocate memory" not in str(error), f"memory was asked for before the size was checked: {error}"
        error = error.__cause__ or error.__context__
