"""What a bundle is now and what it was before its last change: its heads, and its index, event by event.

The rename of a new head is the commit; see `format.py` for the files.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

from confitune.deploy.format import (
    BEFORE,
    EMPTY,
    FOLDERS,
    HEAD,
    INDEX,
    LOCK,
    UNFINISHED,
    Added,
    BundleError,
    DamagedError,
    Event,
    Head,
    Network,
    Removed,
    Renamed,
    Replaced,
    StoredFile,
    TaskRecord,
    TensorFiles,
    chained,
    event_from_line,
    event_to_line,
    file_name,
    files_of,
    files_of_head,
    head_from_bytes,
    head_to_bytes,
)
from confitune.engine import versions
from confitune.files import exclusive, open_plain, require_plain, write_whole

_log = logging.getLogger(__name__)
_versions = cache(versions)


@dataclass
class State:
    """Tasks, how good they are, which files they need.

    >>> state, record = State(), TaskRecord(classes=("a", "b"), file={"sha256": "0" * 64, "bytes": 1})
    >>> for event in (Added(task="a", record=record), Added(task="b", record=record), Renamed(task="a", to="one")):
    ...     _ = state.happened(event)
    >>> list(state.tasks)
    ['one', 'b']

    Attributes:
        head: None before the first task.
        tasks: by name, in the order in which they were added; one that is renamed keeps its place.
        accuracy: of each task on its held-out images when it was last checked, in percent.
        kept: names of files that only the state before the last change needs.
    """

    head: Head | None = None
    tasks: dict[str, TaskRecord] = field(default_factory=dict)
    accuracy: dict[str, float] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)

    def needed(self) -> set[str]:
        """Names of the files that the bundle needs now."""
        names = {file_name(*file) for record in self.tasks.values() for file in files_of(record)}
        return names if self.head is None else names | {file_name(*file) for file in files_of_head(self.head)}

    def happened(self, event: Event) -> list[str]:
        """Take an event in; gives the names of files that a task had before."""
        if isinstance(event, Added):
            self._require_new(event.task)
            self.tasks[event.task] = event.record
        elif isinstance(event, Replaced):
            old, self.tasks[event.task] = self.tasks[event.task], event.record
            return [file_name(*file) for file in files_of(old)]
        elif isinstance(event, Removed):
            gone = self.tasks.pop(event.task)
            self.accuracy.pop(event.task, None)
            return [file_name(*file) for file in files_of(gone)]
        elif isinstance(event, Renamed):
            self._require_new(event.to)
            record, names = self.tasks[event.task], list(self.tasks)
            names[names.index(event.task)] = event.to
            self.tasks = {name: self.tasks.get(name, record) for name in names}
            if event.task in self.accuracy:
                self.accuracy[event.to] = self.accuracy.pop(event.task)
        else:
            self.accuracy |= event.accuracy
        return []

    def _require_new(self, task: str) -> None:
        if task in self.tasks:
            raise ValueError(f"there is a task {task!r} already")


def is_bundle(path: Path) -> bool:
    """Whether a folder holds a bundle, be it a damaged one."""
    return (path / HEAD).is_file() or (path / BEFORE).is_file()


def require_own(path: Path) -> None:
    """Refuse a bundle of links and other things that are no files: a change would reach what is not its own."""
    try:
        for name in (HEAD, BEFORE, INDEX, LOCK, UNFINISHED, *FOLDERS):
            with suppress(FileNotFoundError):
                status = (path / name).lstat()
                if not (name in FOLDERS and stat.S_ISDIR(status.st_mode)):
                    require_plain(path / name, status)
    except OSError as error:
        raise BundleError(f"{path} cannot be used: {error}") from error


def read_head(path: Path) -> Head:
    """The head in a file."""
    try:
        with open_plain(path) as file:
            data = file.read()
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error}; restore it from a copy") from error
    return head_from_bytes(data, str(path))


def read_state(path: Path, files: TensorFiles) -> tuple[State, str | None]:
    """What the bundle in a folder is; where head, index or what all tasks share is damaged, what it was before.

    Returns:
        The state, and what is damaged: None where it is the newest.
    """
    if not is_bundle(path):
        raise BundleError(f"{path} holds no bundle: `confitune learn` makes one")
    require_own(path)
    while True:
        head = None
        try:
            head = read_head(path / HEAD)
            return _newest(path, files, head), None
        except DamagedError as error:
            with suppress(DamagedError):
                if read_head(path / HEAD) != head:
                    continue  # it was changed twice meanwhile, and what the head named is gone
            try:
                return _read(path, files, read_head(path / BEFORE)), str(error)
            except BundleError:
                raise error from None


def read_before(path: Path, files: TensorFiles) -> State:
    """What the bundle was before its last change."""
    head = read_head(path / BEFORE) if (path / BEFORE).exists() else None
    with suppress(DamagedError):
        head = None if head == read_head(path / HEAD) else head
    if head is None:
        raise BundleError(f"nothing of {path} can be undone: only its last change, once, and not its first task")
    return _read(path, files, head)


def _newest(path: Path, files: TensorFiles, head: Head) -> State:
    before = None
    if (path / BEFORE).exists():
        with suppress(DamagedError):
            before = read_head(path / BEFORE)
    return _read(path, files, head, before)


def _read(path: Path, files: TensorFiles, head: Head, before: Head | None = None) -> State:
    """What the index tells up to where the head counts; checks the files that all tasks share."""
    index = path / INDEX
    try:
        with open_plain(index) as handle:
            data = handle.read(min(head.index_bytes, os.fstat(handle.fileno()).st_size))
    except OSError as error:
        raise DamagedError(f"{index} cannot be read: {error}; restore it from a copy") from error
    lines = data.splitlines(keepends=True)
    if len(data) != head.index_bytes or chained(EMPTY, lines) != head.index_chain:
        raise DamagedError(f"{index} is damaged: it is not what {HEAD} says; restore it from a copy")
    state, gone, place = State(head), list[str](), 0
    start = head.index_bytes if before is None else before.index_bytes
    for number, line in enumerate(lines, 1):
        where = f"{index}, line {number},"
        try:
            removed = state.happened(event_from_line(line, where))
        except KeyError as error:
            raise DamagedError(f"{where} is damaged: there is no task {error}; restore it from a copy") from error
        except ValueError as error:
            raise DamagedError(f"{where} is damaged: {error}; restore it from a copy") from error
        gone += removed if place >= start else []
        place += len(line)
    for file in files_of_head(head):
        files.check(*file)
    if before is not None:
        gone += [file_name(*file) for file in files_of_head(before)]
    state.kept = set(gone) - state.needed()
    return state


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Within, no other process changes the bundle."""

    def busy() -> None:
        raise BundleError(f"another process is changing {path}; try again when it is done")

    require_own(path)
    with exclusive(path / LOCK, busy) as held:
        if not held:
            raise BundleError(f"{path} cannot be locked, so two changes could undo each other: use a local disk")
        yield


def commit(
    path: Path, state: State, events: Sequence[Event], *, network: Network, lineage: str, **files: StoredFile | None
) -> None:
    """Make the events true, on disk and in `state`, and keep what was before; `files` are those of the head."""
    old, lines = state.head, [event_to_line(event) for event in events]
    start, chain = (0, EMPTY) if old is None else (old.index_bytes, old.index_chain)
    append_at(path / INDEX, start, b"".join(lines))
    head = Head(
        network=network,
        lineage=lineage,
        **files,  # type: ignore[arg-type]
        index_bytes=start + sum(map(len, lines)),
        index_chain=chained(chain, lines),
        versions=_versions(),
        written=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    write_head(path / HEAD, head)
    state.head = head
    gone = [name for event in events for name in state.happened(event)]
    if old is None:
        return
    needed = state.needed()
    kept = {*gone, *(file_name(*file) for file in files_of_head(old))} - needed
    try:
        write_head(path / BEFORE, old)
    except OSError as error:  # the change itself has been made, so it must not be said to have failed
        state.kept |= kept
        _log.warning("%s cannot be written: %s. It stays what it was", path / BEFORE, error)
        return
    unneeded, state.kept = state.kept - kept - needed, kept
    for name in unneeded:
        (path / name).unlink(missing_ok=True)


def write_head(path: Path, head: Head) -> None:
    """The file is whole, or as it was."""
    write_whole(path, lambda out: out.write(head_to_bytes(head)))


def append_at(path: Path, start: int, data: bytes) -> None:
    """Write at `start`, over whatever a broken-off commit left there."""
    with path.open("r+b" if path.exists() else "xb") as out:
        out.truncate(start)
        out.seek(start)
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
