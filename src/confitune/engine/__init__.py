"""The loop: fit a task, evaluate, checkpoint, resume, capture."""

from confitune.engine.capture import Executor, library_switches
from confitune.engine.checkpoint import BEFORE, CHECKPOINT, Checkpoint, differences
from confitune.engine.evaluation import evaluate
from confitune.engine.events import EpochEnd, Listener
from confitune.engine.feed import batches, place, place_task
from confitune.engine.label_space import require_scenario
from confitune.engine.logs import CsvLog, run_logs
from confitune.engine.parallel import Turns
from confitune.engine.progress import LiveProgress, decoding_bar, progress_board
from confitune.engine.result import RunResult, add_result, command_line, read_results, summary_of, versions
from confitune.engine.run import SequenceRun, network_sha256
from confitune.engine.training import DivergedError, TaskFit, epochs_of, fit, steps_of
from confitune.settings import TrainSettings
