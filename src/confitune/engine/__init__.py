"""The loop: fit a task, evaluate, checkpoint, resume, capture."""

from confitune.engine.capture import Executor as Executor, library_switches as library_switches
from confitune.engine.context import epochs_of as epochs_of, steps_of as steps_of
from confitune.engine.evaluation import evaluate as evaluate
from confitune.engine.events import EpochEnd as EpochEnd, Listener as Listener
from confitune.engine.feed import batches as batches, place as place, place_task as place_task
from confitune.engine.label_space import require_scenario as require_scenario
from confitune.engine.logs import CsvLog as CsvLog, run_logs as run_logs
from confitune.engine.parallel import Turns as Turns
from confitune.engine.result import RunResult as RunResult, read_results as read_results
from confitune.engine.run import SequenceRun as SequenceRun, network_sha256 as network_sha256
from confitune.engine.training import DivergedError as DivergedError, TaskFit as TaskFit, fit as fit
from confitune.settings import TrainSettings as TrainSettings
