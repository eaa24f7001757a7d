"""What a bundle is now and what it was before its last change: its heads, and its index, event by event.

The rename of a new head is the commit; see `format.py` for the files.
"""

from __future__ import annotations

import gc
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from types import MappingProxyType

from confitune.deploy.files import TensorFiles
from confitune.deploy.format import (
    BACKBONES,
    BEFORE,
    EMPTY,
    HEAD,
    INDEX,
    LOCK,
    Added,
    BundleError,
    Checked,
    DamagedError,
    Event,
    Head,
    Network,
    Removed,
    Renamed,
    StoredFile,
    TaskRecord,
    chained,
    event_from_line,
    event_to_line,
    file_name,
    files_of,
    head_from_bytes,
    head_to_bytes,
)
from confitune.engine import versions
from confitune.files import exclusive, write_whole

_log = logging.getLogger(__name__)
_versions = cache(versions)


@dataclass
class State:
    """Tasks, how good they are, which files they need. No event takes longer where there are more tasks.

    >>> state, record = State(), TaskRecord(classes=("a", "b"), file={"sha256": "0" * 64, "bytes": 1})
    >>> for event in (Added(task="a", record=record), Added(task="b", record=record), Renamed(task="a", to="one")):
    ...     _ = state.happened(event)
    >>> list(state.tasks)
    ['one', 'b']

    Attributes:
        head: None before the first task.
        accuracy: of each task on its held-out images when it was last checked, in percent.
        history: every check so far.
        kept: names of files that only the state before the last change needs.
        untidy: what that state needs is not known, because its head is damaged.
    """

    head: Head | None = None
    accuracy: dict[str, float] = field(default_factory=dict)
    history: list[Checked] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)
    untidy: bool = False
    _tasks: dict[str, TaskRecord] = field(default_factory=dict)
    _places: dict[str, int] = field(default_factory=dict)  # which one it was of all that were ever added
    _added: int = 0
    _in_order: bool = True
    _needed: Counter[str] = field(default_factory=Counter)  # by how many tasks, by the file's name in the bundle

    @property
    def tasks(self) -> MappingProxyType[str, TaskRecord]:
        """By name, in the order in which they were added; one that is renamed keeps its place."""
        if not self._in_order:  # sorted here, once, and not for every event
            self._tasks = {task: self._tasks[task] for task in sorted(self._tasks, key=self._places.__getitem__)}
            self._in_order = True
        return MappingProxyType(self._tasks)

    def needs(self, name: str) -> bool:
        """Whether the bundle needs the file of this name now."""
        return name in self._needed or (self.head is not None and name == file_name(BACKBONES, self.head.backbone))

    def happened(self, event: Event) -> list[str]:
        """Take an event in; gives the names of files that a removed task had."""
        gone: list[str] = []
        if isinstance(event, Added):
            self._require_new(event.task)
            self._tasks[event.task] = event.record
            self._places[event.task] = self._added = self._added + 1
            self._needed.update(file_name(*file) for file in files_of(event.record))
        elif isinstance(event, Removed):
            gone = [file_name(*file) for file in files_of(self._tasks.pop(event.task))]
            del self._places[event.task]
            self.accuracy.pop(event.task, None)
            for name in gone:
                self._needed[name] -= 1
                if not self._needed[name]:
                    del self._needed[name]
        elif isinstance(event, Renamed):
            self._require_new(event.to)
            self._tasks[event.to] = self._tasks.pop(event.task)
            self._places[event.to] = self._places.pop(event.task)
            self._in_order = False
            if event.task in self.accuracy:
                self.accuracy[event.to] = self.accuracy.pop(event.task)
        else:
            self.history.append(event)
            self.accuracy |= event.accuracy
        return gone

    def _require_new(self, task: str) -> None:
        if task in self._tasks:
            raise ValueError(f"there is a task {task!r} already")


def is_bundle(path: Path) -> bool:
    """Whether a folder holds a bundle, be it a damaged one."""
    return (path / HEAD).is_file() or (path / BEFORE).is_file()


def read_head(path: Path) -> Head:
    """The head in a file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error}; restore it from a copy") from error
    return head_from_bytes(data, str(path))


def read_state(path: Path, files: TensorFiles) -> tuple[State, str | None]:
    """What the bundle in a folder is; where head, index or backbone are damaged, what it was before the last change.

    Returns:
        The state, and what is damaged: None where it is the newest.
    """
    if not is_bundle(path):
        raise BundleError(f"{path} holds no bundle: `confitune learn` makes one")
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
                return state_before(path, files), str(error)
            except BundleError:
                raise error from None


def state_before(path: Path, files: TensorFiles) -> State:
    """What the bundle was before the last change."""
    return _read(path, files, read_head(path / BEFORE))


def _newest(path: Path, files: TensorFiles, head: Head) -> State:
    before, untidy = None, False
    if (path / BEFORE).exists():
        try:
            before = read_head(path / BEFORE)
        except DamagedError:
            untidy = True
    state = _read(path, files, head, before)
    state.untidy = untidy
    return state


def _read(path: Path, files: TensorFiles, head: Head, before: Head | None = None) -> State:
    """What the index tells up to where the head counts; checks the backbone."""
    index = path / INDEX
    try:
        with index.open("rb") as handle:
            data = handle.read(min(head.index_bytes, os.fstat(handle.fileno()).st_size))
    except OSError as error:
        raise DamagedError(f"{index} cannot be read: {error}; restore it from a copy") from error
    lines = data.splitlines(keepends=True)
    if len(data) != head.index_bytes or chained(EMPTY, lines) != head.index_chain:
        raise DamagedError(f"{index} is damaged: it is not what {HEAD} says; restore it from a copy")
    state, gone, place = State(head), list[str](), 0
    start = head.index_bytes if before is None else before.index_bytes
    with _no_collection():
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
    files.check(BACKBONES, head.backbone)
    if before is not None:
        gone.append(file_name(BACKBONES, before.backbone))
    state.kept = {name for name in gone if not state.needs(name)}
    return state


@contextmanager
def _no_collection() -> Iterator[None]:
    """Half of the time that ten thousand tasks take would go into looking for garbage, of which there is none."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def damage_before(path: Path, files: TensorFiles, state: State) -> str | None:
    """What is damaged of that which only the state before the last change needs; None where nothing is."""
    if state.head is None or not (path / BEFORE).exists():
        return None
    try:
        for record in state_before(path, files).tasks.values():
            for folder, stored in files_of(record):
                if file_name(folder, stored) in state.kept:
                    files.check(folder, stored)
    except DamagedError as error:
        return str(error)
    return None


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Within, no other process changes the bundle."""

    def busy() -> None:
        raise BundleError(f"another process is changing {path}; try again when it is done")

    with exclusive(path / LOCK, busy):
        yield


def commit(
    path: Path, state: State, events: Sequence[Event], *, network: Network, backbone: StoredFile, lineage: str
) -> None:
    """Make the events true, on disk and in `state`, and keep what was before."""
    old, lines = state.head, [event_to_line(event) for event in events]
    start, chain = (0, EMPTY) if old is None else (old.index_bytes, old.index_chain)
    append_at(path / INDEX, start, b"".join(lines))
    head = Head(
        network=network,
        backbone=backbone,
        lineage=lineage,
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
    kept = {name for name in (*gone, file_name(BACKBONES, old.backbone)) if not state.needs(name)}
    try:
        write_head(path / BEFORE, old)
    except OSError as error:  # the change itself has been made, so it must not be said to have failed
        state.kept |= kept
        _log.warning("%s cannot be written: %s. It stays what it was", path / BEFORE, error)
        return
    unneeded, state.kept = state.kept - kept, kept
    for name in unneeded:
        if not state.needs(name):
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
