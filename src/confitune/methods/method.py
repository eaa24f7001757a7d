"""A method is a composition: a schedule, a kind of batch norm, and any number of penalties."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel

from confitune.errors import ConfituneError
from confitune.methods.penalty import Penalty
from confitune.methods.schedule import Schedule, Stage
from confitune.nn import Norm


@dataclass(frozen=True)
class Method:
    """How tasks are learned.

    Attributes:
        separate: every task gets a fresh copy of the pre-trained network (single-task learning).
        joint: all tasks are learned at once (the upper bound).
        first_schedule: of the first task, where it differs.
        penalties: that it consists of; further ones are added by name.
        net_options: its own part of `network`.
        settings: what its paper trains with, where a run does not say otherwise: fields of `TrainSettings`.
        configure: makes the method with options of its own, for those that have any.
        options: what `configure` takes.
        chosen: the options it was made with.
        reference: the paper.
    """

    name: str
    schedule: Schedule
    norm: Norm
    summary: str
    penalties: tuple[Penalty, ...] = ()
    separate: bool = False
    joint: bool = False
    first_schedule: Schedule | None = None
    net_options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    configure: Callable[..., Method] | None = None
    options: type[BaseModel] | None = None
    chosen: Mapping[str, Any] = field(default_factory=dict)
    reference: str = ""

    def __post_init__(self) -> None:
        if self.penalties and (self.separate or self.joint):
            raise ConfituneError(f"{self.name}: a penalty on earlier tasks makes no sense where there are none")
        if self.penalties and self.norm in ("frozen", "calibrated"):
            raise ConfituneError(f"{self.name}: a penalty has nothing to hold where the backbone never moves")
        needing = [part.name for part in self.penalties if part.network and self.norm != "xconv"]
        if needing:
            raise ConfituneError(f"{self.name}: {needing[0]} is for networks with Xconv BN: confit+{needing[0]}")

    @property
    def network(self) -> dict[str, Any]:
        """Further arguments of `ContinualNet`, where a run does not say otherwise: its own and those of its parts."""
        return {name: value for part in self.penalties for name, value in part.network.items()} | dict(self.net_options)

    def stages(self, epochs: int, index: int) -> tuple[Stage, ...]:
        """Of the task with this index (from 0)."""
        schedule = self.first_schedule if index == 0 and self.first_schedule is not None else self.schedule
        return schedule(epochs)


Makers = Mapping[str, Callable[..., Penalty]]
MethodOptions = Mapping[str, Mapping[str, Any]]  # by the name of the part: {"ewc": {"strength": 1e4}}


def compose(
    name: str, bases: Mapping[str, Method], penalties: Makers, default: str, options: MethodOptions | None = None
) -> Method:
    """The method that a name such as 'confit' or 'mas+confit' stands for.

    Parts are joined by '+': at most one base method (default: `default`, or 'confit' for a part that needs Xconv BN)
    and penalties. The paper's names 'mas-cpr' and 'mas-afec' stand for 'mas+cpr' and 'mas+afec'.
    """
    options = options or {}
    parts = [part for joined in name.split("+") for part in _PAPER_NAMES.get(joined, joined).split("+")]
    unknown = [part for part in parts if part not in bases and part not in penalties]
    if unknown:
        known = [*bases, *penalties]
        near = difflib.get_close_matches(unknown[0].lower(), known, 1, 0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfituneError(f"no method {unknown[0]!r}: {hint}There are {', '.join(known)}.")
    if len(set(parts)) != len(parts):
        raise ConfituneError(f"{name!r} names a part twice")
    found = [_configured(bases[part], options.get(part)) for part in parts if part in bases]
    added = [penalties[part](**options.get(part, {})) for part in parts if part not in bases]
    if len(found) > 1:
        raise ConfituneError(f"{name!r} names {len(found)} base methods ({', '.join(m.name for m in found)}); give one")
    base = found[0] if found else bases["confit" if any(part.network for part in added) else default]
    # Anew, too: a part may keep something of the network that it serves.
    own = [type(part)(**{**part.options.model_dump(), **options.get(part.name, {})}) for part in base.penalties]
    twice = {part.name for part in own} & {part.name for part in added}
    if twice:
        raise ConfituneError(f"{name!r}: {base.name} has {', '.join(sorted(twice))} already")
    return replace(base, name=name, penalties=(*own, *added))


_PAPER_NAMES = {"mas-cpr": "mas+cpr", "mas-afec": "mas+afec"}


def _configured(base: Method, options: Mapping[str, Any] | None) -> Method:
    if not options:
        return base
    if base.configure is None:
        raise ConfituneError(f"{base.name} has no options, got {', '.join(options)}")
    return base.configure(**options)
