"""One command per table and figure of the paper."""

from confitune.experiments.reproduce.outcome import Cell, Claim, Outcome
from confitune.experiments.reproduce.plan import Scope, read_scope
from confitune.experiments.reproduce.session import WHATS, reproduce

__all__ = ["WHATS", "Cell", "Claim", "Outcome", "Scope", "read_scope", "reproduce"]
