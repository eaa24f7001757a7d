"""What the paper looks into beside accuracy: shift, transductive moments, storage, and its propositions."""

from confitune.analysis.shift import ShiftRecorder as ShiftRecorder
from confitune.analysis.storage import measure_storage as measure_storage
from confitune.analysis.theory import (
    check_proposition1 as check_proposition1,
    check_proposition2 as check_proposition2,
    check_proposition3 as check_proposition3,
)
from confitune.analysis.transductive import transductive_accuracy as transductive_accuracy
