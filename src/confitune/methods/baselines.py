"""The simple methods around ConFiT: what it must beat, and what bounds it."""

from confitune.methods.method import Method
from confitune.methods.schedule import head_and_norm, head_only, plain

FINETUNE = Method("finetune", plain, "shared", "fine-tune everything on task after task, shared BN")
LINEAR_PROBE = Method("linear-probe", head_only, "frozen", "pre-trained backbone frozen, heads only; forgets nothing")
SINGLE_TASK = Method(
    "single-task", plain, "shared", "a fresh copy of the pre-trained network per task; forgets nothing", separate=True
)
JOINT = Method("joint", plain, "shared", "all tasks' data at once: the upper bound", joint=True)
BN_ONLY = Method(
    "bn-only", head_and_norm, "task", "heads and task-specific BN, convolutions never move; forgets nothing"
)
TASK_BN = Method("task-bn", plain, "task", "fine-tuning with plain task-specific BN, no recovery")
