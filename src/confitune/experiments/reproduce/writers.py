"""What can be reproduced, in the order of `all`: from a scope and finished runs to an outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from confitune.experiments.place import Place
from confitune.experiments.reproduce import figures, moments, propositions, tables
from confitune.experiments.reproduce.outcome import Outcome
from confitune.experiments.reproduce.plan import Part, Scope

Writer = Callable[[Scope, Sequence[Part], Place], Outcome]

WRITERS: dict[str, Writer] = {
    "datasets": tables.datasets,
    "theory": propositions.theory,
    "storage": figures.storage,
    "table2": tables.table2,
    "shift": moments.shift,
    "transductive": moments.transductive,
    "table1": tables.table1,
    "curves": figures.curves,
    "controls": tables.controls,
    "search": tables.search,
    "deeper": tables.deeper,
}
