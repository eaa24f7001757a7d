"""What the paper looks into beside accuracy: shift, transductive moments, storage, and its propositions."""

from confitune.analysis.constant_maps import check_proposition1
from confitune.analysis.linear_model import check_proposition2, check_proposition3
from confitune.analysis.shift import ShiftRecorder, ShiftResult
from confitune.analysis.storage import measure_storage
from confitune.analysis.transductive import TransductiveResult, transductive_accuracy

__all__ = [
    "ShiftRecorder",
    "ShiftResult",
    "TransductiveResult",
    "check_proposition1",
    "check_proposition2",
    "check_proposition3",
    "measure_storage",
    "transductive_accuracy",
]
