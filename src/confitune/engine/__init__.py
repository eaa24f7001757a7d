"""The loop: fit a task, evaluate, checkpoint, resume."""

from confitune.engine.checkpoint import CHECKPOINT, Checkpoint, require_same_config
from confitune.engine.evaluation import evaluate
from confitune.engine.events import EpochEnd, Listener
from confitune.engine.logs import CsvLog, TensorBoardLog
from confitune.engine.progress import LiveProgress
from confitune.engine.result import RunResult
from confitune.engine.run import SequenceRun, network_sha256
from confitune.engine.settings import TrainOptions, TrainSettings
from confitune.engine.training import TaskFit, fit

__all__ = [
    "CHECKPOINT",
    "Checkpoint",
    "CsvLog",
    "EpochEnd",
    "Listener",
    "LiveProgress",
    "RunResult",
    "SequenceRun",
    "TaskFit",
    "TensorBoardLog",
    "TrainOptions",
    "TrainSettings",
    "evaluate",
    "fit",
    "network_sha256",
    "require_same_config",
]
