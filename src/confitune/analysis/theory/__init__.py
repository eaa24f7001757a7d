"""The paper's propositions 1 to 3 as numerical checks."""

from confitune.analysis.theory.constant_maps import BorderError, Proposition1, check_proposition1
from confitune.analysis.theory.head_alignment import FeatureLevel, Proposition2, check_proposition2
from confitune.analysis.theory.linear_probing import Proposition3, check_proposition3

__all__ = [
    "BorderError",
    "FeatureLevel",
    "Proposition1",
    "Proposition2",
    "Proposition3",
    "check_proposition1",
    "check_proposition2",
    "check_proposition3",
]
