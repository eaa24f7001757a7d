"""What a bundle is now and what it was before the last change, read from its heads and its index."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from confitune.deploy.contents import Contents
from confitune.deploy.files import TensorFiles
from confitune.deploy.format import (
    BACKBONES,
    BEFORE,
    EMPTY,
    HEAD,
    INDEX,
    BundleError,
    DamagedError,
    Head,
    chained,
    event_from_line,
    head_from_bytes,
    head_to_bytes,
)
from confitune.deploy.layout import file_name, is_bundle


@dataclass
class State:
    """A head and what the index tells up to where the head counts.

    Attributes:
        kept: names of files that only the state before the last change needs.
        untidy: what that state needs is not known, because its head is damaged.
    """

    head: Head
    contents: Contents
    kept: set[str] = field(default_factory=set)
    untidy: bool = False

    def needs(self, name: str) -> bool:
        """Whether the bundle needs the file of this name now."""
        return name == file_name(BACKBONES, self.head.backbone) or self.contents.needs(name)


def read_state(path: Path, backbones: TensorFiles) -> tuple[State, str | None]:
    """What the bundle in a folder is; where head, index or backbone are damaged, what it was before the last change.

    Returns:
        The state, and what is damaged: None where it is the newest.
    """
    if not is_bundle(path):
        raise BundleError(f"{path} holds no bundle: `confitune learn` makes one")
    while True:
        data = _bytes_of(path / HEAD)
        try:
            return _state_of(path, _head(path / HEAD, data), backbones, _head_before(path)), None
        except DamagedError as error:
            if isinstance(now := _bytes_of(path / HEAD), bytes) and now != data:
                continue  # it was changed twice meanwhile, and what the head named is gone
            try:
                return state_before(path, backbones), str(error)
            except BundleError:
                raise error from None


def state_before(path: Path, backbones: TensorFiles) -> State:
    """What the bundle was before the last change."""
    return _state_of(path, _head(path / BEFORE, _bytes_of(path / BEFORE)), backbones, None)


def is_newest(path: Path, head: Head) -> bool:
    """Whether this is still the head in the folder."""
    return _bytes_of(path / HEAD) == head_to_bytes(head)


def _state_of(path: Path, head: Head, backbones: TensorFiles, before: Head | DamagedError | None) -> State:
    start = before.index_bytes if isinstance(before, Head) else head.index_bytes
    contents, gone = _read_index(path / INDEX, head, start)
    backbones.check(head.backbone)
    state = State(head, contents, untidy=isinstance(before, DamagedError))
    if isinstance(before, Head):
        gone.append(file_name(BACKBONES, before.backbone))
    state.kept = {name for name in gone if not state.needs(name)}
    return state


def _read_index(path: Path, head: Head, start: int) -> tuple[Contents, list[str]]:
    """What the index tells, and the files of tasks that were removed from byte `start` on."""
    try:
        with path.open("rb") as handle:
            data = handle.read(min(head.index_bytes, os.fstat(handle.fileno()).st_size))
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error}; restore it from a copy") from error
    lines = data.splitlines(keepends=True)
    if len(data) != head.index_bytes or chained(EMPTY, lines) != head.index_chain:
        raise DamagedError(f"{path} is damaged: it is not what {HEAD} says; restore it from a copy")
    contents, gone, place = Contents(), list[str](), 0
    with _no_collection():
        for number, line in enumerate(lines, 1):
            where = f"{path}, line {number},"
            try:
                removed = contents.happened(event_from_line(line, where))
            except KeyError as error:
                raise DamagedError(f"{where} is damaged: there is no task {error}; restore it from a copy") from error
            except ValueError as error:
                raise DamagedError(f"{where} is damaged: {error}; restore it from a copy") from error
            gone += removed if place >= start else []
            place += len(line)
    return contents, gone


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


def _head(path: Path, data: bytes | OSError) -> Head:
    if isinstance(data, OSError):
        raise DamagedError(f"{path} cannot be read: {data}; restore it from a copy") from data
    return head_from_bytes(data, str(path))


def _head_before(path: Path) -> Head | DamagedError | None:
    data = _bytes_of(path / BEFORE)
    try:
        return None if isinstance(data, FileNotFoundError) else _head(path / BEFORE, data)
    except DamagedError as error:
        return error


def _bytes_of(path: Path) -> bytes | OSError:
    try:
        return path.read_bytes()
    except OSError as error:
        return error
