"""A lock that another process holds, and systems that have none."""

import errno
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

_HOLDS = (
    "import fcntl, sys\nfile = open(sys.argv[1])\nfcntl.flock(file, fcntl.LOCK_EX)\nprint('held', flush=True)\ninput()"
)


@contextmanager
def held_by_another(lock: Path) -> Iterator[subprocess.Popen]:
    """A process that has the lock, until it is killed."""
    other = subprocess.Popen(
        [sys.executable, "-S", "-c", _HOLDS, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        yield other


def no_locks(*_: object) -> None:
    """In place of `flock`."""
    raise OSError(errno.ENOLCK, "No locks available")


without_locks = pytest.mark.parametrize(
    "locks", [None, SimpleNamespace(flock=no_locks, LOCK_EX=2, LOCK_NB=4)], ids=["Windows", "NFS"]
)
