"""What a bundle holds, as its index tells it event by event; no event takes longer where there are more tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from confitune.deploy.format import Added, Checked, Event, Removed, Renamed, TaskRecord
from confitune.deploy.layout import names_of


class TaskTable(Mapping[str, TaskRecord]):
    """Records by name, in the order in which tasks were added; a task that is renamed keeps its place.

    >>> table, record = TaskTable(), TaskRecord(classes=("a", "b"), file={"sha256": "0" * 64, "bytes": 1})
    >>> for name in ("first", "second", "third"):
    ...     table.add(name, record)
    >>> table.rename("first", "one")
    >>> removed = table.remove("second")
    >>> list(table)
    ['one', 'third']
    """

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._rows: dict[int, tuple[str, TaskRecord]] = {}  # by place, in order
        self._next = 0

    def __getitem__(self, name: str) -> TaskRecord:
        return self._rows[self._places[name]][1]

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def last(self) -> str:
        """The task that was added last of those there are."""
        return self._rows[next(reversed(self._rows))][0]

    def add(self, name: str, record: TaskRecord) -> None:
        """Put a task at the end."""
        self._require_new(name)
        self._places[name], self._rows[self._next] = self._next, (name, record)
        self._next += 1

    def rename(self, name: str, to: str) -> None:
        """Call it something else."""
        self._require_new(to)
        place = self._places.pop(name)
        self._places[to], self._rows[place] = place, (to, self._rows[place][1])

    def _require_new(self, name: str) -> None:
        if name in self._places:
            raise ValueError(f"there is a task {name!r} already")

    def remove(self, name: str) -> TaskRecord:
        """Take it out."""
        return self._rows.pop(self._places.pop(name))[1]


@dataclass
class Contents:
    """Tasks, how good they are, which files they need.

    Attributes:
        accuracy: of each task on its held-out images when it was last checked, in percent.
        history: every check so far.
    """

    tasks: TaskTable = field(default_factory=TaskTable)
    accuracy: dict[str, float] = field(default_factory=dict)
    history: list[Checked] = field(default_factory=list)
    _needed: Counter[str] = field(default_factory=Counter)  # by how many tasks, by the file's name in the bundle

    def needs(self, name: str) -> bool:
        """Whether a task needs the file of this name."""
        return name in self._needed

    def happened(self, event: Event) -> list[str]:
        """Take an event in; gives the names of files that a removed task had."""
        gone: list[str] = []
        if isinstance(event, Added):
            self.tasks.add(event.task, event.record)
            self._needed.update(names_of(event.record))
        elif isinstance(event, Removed):
            gone = names_of(self.tasks.remove(event.task))
            self.accuracy.pop(event.task, None)
            for name in gone:
                self._needed[name] -= 1
                if not self._needed[name]:
                    del self._needed[name]
        elif isinstance(event, Renamed):
            self.tasks.rename(event.task, event.to)
            if event.task in self.accuracy:
                self.accuracy[event.to] = self.accuracy.pop(event.task)
        else:
            self.history.append(event)
            self.accuracy |= event.accuracy
        return gone
