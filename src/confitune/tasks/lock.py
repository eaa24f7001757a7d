"""One process at a time for work that many may want done: building a store, downloading a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextmanager
def exclusive(path: Path, waiting: Callable[[], None]) -> Iterator[bool]:
    """Hold the lock file `path`; `waiting` is called once if another process has it.

    The operating system drops the lock when its process ends, however it ends, so a killed process blocks nobody;
    the empty file stays. Yields False where the system or the file system has no such lock: then the work may be
    done twice, and must be safe to do twice.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        held = fcntl is not None
        if held:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(handle, fcntl.LOCK_EX)
            except OSError:  # e.g. a network file system without locks
                held = False
        yield held


def is_free(path: Path) -> bool:
    """Whether no living process holds the lock file; the file alone says nothing, it stays when its process ends."""
    if fcntl is None or not path.exists():
        return True
    with path.open("rb") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given back with the handle
        except BlockingIOError:
            return False
        except OSError:  # e.g. a network file system without locks
            return True
    return True
