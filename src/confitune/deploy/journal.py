"""How a bundle changes: one process at a time, all at once, and with what it was before kept."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

from torch import Tensor

from confitune.deploy.contents import Contents
from confitune.deploy.files import TensorFiles
from confitune.deploy.format import (
    BACKBONES,
    BEFORE,
    EMPTY,
    HEAD,
    HELD_OUT,
    INDEX,
    LOCK,
    TASKS,
    UNFINISHED,
    BundleError,
    DamagedError,
    Event,
    Head,
    Network,
    chained,
    event_to_line,
    head_to_bytes,
)
from confitune.deploy.layout import append_at, file_name, foreign_files, is_bundle, own_files
from confitune.deploy.state import State, is_newest, read_state, state_before
from confitune.engine import versions
from confitune.files import exclusive, sync_folder, write_whole

_log = logging.getLogger(__name__)


class Journal:
    """What a bundle was when it was read, and what this process has changed since.

    Attributes:
        state: None before the first task.
        damage: what is damaged where `state` is the one before the last change; None where it is the newest.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.backbones, self.tasks, self.held_out = (TensorFiles(path / name) for name in (BACKBONES, TASKS, HELD_OUT))
        self.state: State | None = None
        self.damage: str | None = None

    @property
    def contents(self) -> Contents:
        """What the bundle holds."""
        return Contents() if self.state is None else self.state.contents

    @property
    def head(self) -> Head:
        """The head that counts."""
        if self.state is None:
            raise BundleError(f"{self.path} has learned nothing yet")
        return self.state.head

    def read(self) -> None:
        """Take in what is on disk; damage that the state before makes up for is said as a warning."""
        self.state, self.damage = read_state(self.path, self.backbones)
        if self.damage is not None:
            _log.warning(
                "%s. %s is used as it was before its last change, on %s",
                self.damage,
                self.path,
                self.state.head.written,
            )

    @contextmanager
    def changing(self, network: Network) -> Iterator[None]:
        """Within, no other process changes it; what others changed before is seen, what a killed one left is gone."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BundleError(f"{self.path} cannot be made: {error}; choose another folder") from error
        if not is_bundle(self.path) and (foreign := foreign_files(self.path)):
            raise BundleError(f"{self.path} is no bundle but holds {', '.join(foreign[:3])}: choose an empty folder")
        with self._alone():
            if is_bundle(self.path):
                self._renew(network)
            elif len(list((self.path / TASKS).glob("*.safetensors"))) > 1:  # a first task that broke off leaves one
                raise BundleError(f"{self.path} holds tasks but no {HEAD}: restore it from a copy")
            if (self.path / UNFINISHED).exists() or (self.state is not None and self.state.untidy):
                self.sweep()
            yield
            (self.path / UNFINISHED).unlink(missing_ok=True)

    def begin(self) -> None:
        """Say on disk that files are about to be written which count only after the commit."""
        if not (self.path / UNFINISHED).exists():
            (self.path / UNFINISHED).touch()
            sync_folder(self.path)

    def commit(self, network: Network, events: Sequence[Event], shared: Mapping[str, Tensor] | None = None) -> None:
        """Make the events true; `shared` is the backbone where it has moved."""
        self.begin()
        old, lines = self.state, [event_to_line(event) for event in events]
        if shared is not None:
            backbone = self.backbones.store(shared, {"format": "confitune backbone 1"})
            before = network.weights_sha256 if old is None else old.head.lineage
            lineage = hashlib.sha256(f"{before} {backbone.sha256}".encode()).hexdigest()
        else:
            backbone, lineage = self.head.backbone, self.head.lineage
        start, chain = (0, EMPTY) if old is None else (old.head.index_bytes, old.head.index_chain)
        append_at(self.path / INDEX, start, b"".join(lines))
        head = Head(
            network=network,
            backbone=backbone,
            lineage=lineage,
            index_bytes=start + sum(map(len, lines)),
            index_chain=chained(chain, lines),
            versions=_versions(),
            written=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        write_whole(self.path / HEAD, lambda out: out.write(head_to_bytes(head)))
        self.state = new = State(head, self.contents)
        gone = [name for event in events for name in new.contents.happened(event)]
        if old is not None:
            gone.append(file_name(BACKBONES, old.head.backbone))
            new.kept = {name for name in gone if not new.needs(name)}
            self._keep_before(old, new)

    def _keep_before(self, old: State, new: State) -> None:
        try:
            write_whole(self.path / BEFORE, lambda out: out.write(head_to_bytes(old.head)))
        except OSError as error:  # the change itself has been made, so it must not be said to have failed
            new.kept |= old.kept
            _log.warning("%s cannot be written: %s. It stays what it was", self.path / BEFORE, error)
            return
        for name in old.kept - new.kept:
            if not new.needs(name):
                (self.path / name).unlink(missing_ok=True)

    def leftovers(self) -> list[Path]:
        """Files of a change that did not come to its commit, which nothing needs."""
        state = self.state
        return [
            self.path / name
            for name in own_files(self.path)
            if state is None or not (state.needs(name) or name in state.kept)
        ]

    def sweep(self) -> None:
        """Delete leftovers, and a state before the last change that is damaged, with what only that one needs."""
        if self.state is not None and self.damage_before() is not None:
            (self.path / BEFORE).unlink(missing_ok=True)
            self.state.kept, self.state.untidy = set(), False
        for path in self.leftovers():
            path.unlink()

    def damage_before(self) -> str | None:
        """What is damaged of that which only the state before the last change needs; None where nothing is."""
        if self.state is None or not (self.path / BEFORE).exists():
            return None
        try:
            for record in state_before(self.path, self.backbones).contents.tasks.values():
                if file_name(TASKS, record.file) in self.state.kept:
                    self.tasks.check(record.file)
                if record.held_out is not None and file_name(HELD_OUT, record.held_out) in self.state.kept:
                    self.held_out.check(record.held_out)
        except DamagedError as error:
            return str(error)
        return None

    def go_back(self) -> None:
        """Be for good what it was before the last change, if it still is damaged; what was made since is deleted."""
        with self._alone():
            self.state, self.damage = read_state(self.path, TensorFiles(self.path / BACKBONES))
            if self.damage is not None:
                data = head_to_bytes(self.state.head)
                write_whole(self.path / HEAD, lambda out: out.write(data))
                self.damage = None
                self.sweep()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        def busy() -> None:
            raise BundleError(f"another process is changing {self.path}; try again when it is done")

        with exclusive(self.path / LOCK, busy):
            yield

    def _renew(self, network: Network) -> None:
        """Become what is on disk now, unless it is damaged: a change would make the loss of its newest part final."""
        if self.state is not None and self.damage is None and is_newest(self.path, self.state.head):
            return
        state, damage = read_state(self.path, self.backbones)
        if state.head.network != network:
            raise BundleError(f"{self.path} was replaced by another bundle meanwhile; start again")
        if damage is not None:
            raise BundleError(
                f"{damage}. Nothing is changed while it is damaged; without a copy, `confitune doctor {self.path} "
                f"--repair` goes back to what it was before its last change, on {state.head.written}"
            )
        self.state, self.damage = state, None


@cache
def _versions() -> dict[str, str]:
    return versions()
