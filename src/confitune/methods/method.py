"""A method is a composition: a schedule, a kind of batch norm, and any number of penalties."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from confitune.errors import ConfituneError
from confitune.methods.penalty import Penalty
from confitune.methods.schedule import Schedule
from confitune.nn import Norm


@dataclass(frozen=True)
class Method:
    """How tasks are learned.

    Attributes:
        separate: every task gets a fresh copy of the pre-trained network (single-task learning).
        joint: all tasks are learned at once (the upper bound).
    """

    name: str
    schedule: Schedule
    norm: Norm
    summary: str
    penalties: tuple[Penalty, ...] = ()
    separate: bool = False
    joint: bool = False

    def __post_init__(self) -> None:
        if self.penalties and (self.separate or self.joint):
            raise ConfituneError(f"{self.name}: a penalty on earlier tasks makes no sense where there are none")


Makers = Mapping[str, Callable[[], Penalty]]


def compose(name: str, bases: Mapping[str, Method], penalties: Makers, default: str) -> Method:
    """The method that a name such as 'confit' or 'mas+confit' stands for.

    Parts are joined by '+': at most one base method (default: `default`), and penalties.
    """
    parts = name.split("+")
    found = [bases[part] for part in parts if part in bases]
    added = [penalties[part]() for part in parts if part not in bases and part in penalties]
    unknown = [part for part in parts if part not in bases and part not in penalties]
    if unknown:
        known = [*bases, *penalties]
        near = difflib.get_close_matches(unknown[0].lower(), known, 1, 0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfituneError(f"no method {unknown[0]!r}: {hint}There are {', '.join(known)}.")
    if len(found) > 1:
        raise ConfituneError(f"{name!r} names {len(found)} base methods ({', '.join(m.name for m in found)}); give one")
    base = found[0] if found else bases[default]
    return replace(base, name=name, penalties=tuple(added))
