"""Numbers stored: counted by hand for the tiny network, for ResNet18, and in what real runs leave behind."""

import pytest
import torch

from confitune.analysis import StorageResult, measure_storage
from confitune.engine import CHECKPOINT
from confitune.engine.checkpoint import values_of
from confitune.files import read_sealed
from confitune.methods import Method, create_method
from confitune.nn import ContinualNet

# The tiny network: convolutions 3 -> 6 with bias and 6 -> 8, batch norms of 6 and 8 channels.
CONVS = 3 * 6 * 9 + 6 + 6 * 8 * 9
WEIGHTS = CONVS + 2 * 14
NETWORK = WEIGHTS + 2 * 14  # running moments, too
WINDOWS = (3 + 6) * 9
PHASES = 3 * 4 + 6 * 1  # strides 2 and 1
PLANES = 3 * 8 * 8 + 6 * 4 * 4
CALIBRATIONS = 6 * 3 * 9 + 6 * 3 + 6 + 8 * 4 * 9 + 8 * 4 + 8  # groups of 3 and 4 channels
CALIBRATED = 4 * 14 + CALIBRATIONS
CHANGES = (3 * 9 + 6) + (6 * 9 + 8)  # rank 1

# method: what is kept, and the peak, after t tasks
EXPECTED = {
    "finetune": (lambda t: 0, lambda t: 0),
    "linear-probe": (lambda t: 0, lambda t: 0),
    "joint": (lambda t: 0, lambda t: 0),
    "task-bn": (lambda t: t * 56, lambda t: t * 56),
    # a finished task has no mean, one in training has it, and the slot holds tables and planes
    "confit": (
        lambda t: t * (3 * 14 + WINDOWS),
        lambda t: (t - 1) * (3 * 14 + WINDOWS) + 4 * 14 + WINDOWS + WINDOWS + PLANES,
    ),
    "single-task": (lambda t: t * NETWORK, lambda t: t * NETWORK),
    # once the batch norms that tasks start from; the live calibrations
    "ccll": (lambda t: t * CALIBRATED + 56, lambda t: t * CALIBRATED + 56 + CALIBRATIONS),
    # likewise once; the live changes
    "best": (lambda t: t * (56 + CHANGES) + 56, lambda t: t * (56 + CHANGES) + 56 + CHANGES),
    "ewc": (lambda t: 2 * WEIGHTS, lambda t: 3 * WEIGHTS),  # anchor, Fisher; the new Fisher
    "mas": (lambda t: 2 * WEIGHTS, lambda t: 3 * WEIGHTS),
    "si": (lambda t: 2 * WEIGHTS, lambda t: 6 * WEIGHTS),  # previous, gradient, start, path
    "rwalk": (lambda t: 4 * WEIGHTS, lambda t: 6 * WEIGHTS),
    "mas-cpr": (lambda t: 2 * WEIGHTS, lambda t: 3 * WEIGHTS),
    "mas-afec": (lambda t: 2 * WEIGHTS, lambda t: 5 * WEIGHTS + (NETWORK if t > 1 else 0)),  # the copy
    "ewc+task-bn": (lambda t: 2 * CONVS + t * 56, lambda t: 3 * CONVS + t * 56),
}


@pytest.fixture
def measured(make_backbone):
    def measure(*methods, **options):
        options = {"classes_per_task": 4, "tasks": 3, "image_size": 8, **options}
        return measure_storage(make_backbone, methods, **options)

    return measure


@pytest.mark.parametrize("method", EXPECTED)
def test_the_tiny_network_by_hand(measured, method):
    result = measured(method)
    kept, peak = EXPECTED[method]
    rows = result.of(method)
    assert [row.tasks for row in rows] == [1, 2, 3]
    assert [row.kept for row in rows] == [kept(t) for t in (1, 2, 3)]
    assert [row.peak for row in rows] == [peak(t) for t in (1, 2, 3)]
    # a joint head is one of all classes: the same numbers
    assert [row.heads for row in rows] == [t * (8 * 4 + 4) for t in (1, 2, 3)]
    assert result.pretrained == NETWORK


def test_phase_means_and_alternating_afec(measured):
    assert [row.kept for row in measured("confit", means="phase").rows] == [t * (42 + PHASES) for t in (1, 2, 3)]
    alternating = create_method("mas+afec", {"afec": {"form": "alternating"}})
    rows = measured(alternating).rows
    # The copy is never reset, so it is kept; AFEC counts its two batch counters, too.
    assert [row.kept for row in rows] == [2 * WEIGHTS + NETWORK + 2] * 3
    assert [row.peak for row in rows] == [5 * WEIGHTS + NETWORK] * 3


def test_a_method_can_be_measured_again(measured):
    method = create_method("ewc")
    assert measured(method) == measured(method)
    assert method.storage() == 0  # it was a copy that learned


def test_what_is_gone_at_the_end_of_a_task_is_in_the_peak(measured):
    class Passing(Method):
        def begin_task(self, context):
            self.held = {"scratch": [torch.zeros(1000), torch.zeros(7, dtype=torch.int64)]}

        def end_task(self, context):
            del self.held

    rows = measured(Passing()).rows
    assert [(row.kept, row.peak) for row in rows] == [(0, 1000)] * 3


def test_resnet18():
    methods = ["confit", "task-bn", "ewc", "single-task", "ccll"]
    window = measure_storage("resnet18", methods, classes_per_task=10, tasks=2, image_size=64)
    phase = measure_storage("resnet18", ["confit"], classes_per_task=10, tasks=2, image_size=64, means="phase")
    kept = {method: [row.kept for row in window.of(method)] for method in methods}
    assert kept == {
        "confit": [45_075, 90_150],
        "task-bn": [19_200, 38_400],
        "ewc": [22_353_024, 22_353_024],
        "single-task": [11_186_112, 22_372_224],
        "ccll": [235_200, 451_200],  # the pre-trained batch norms once: 19,200
    }
    assert [row.kept for row in phase.rows] == [19_148, 38_296]
    assert [row.heads for row in window.of("confit")] == [5_130, 10_260]


@pytest.mark.parametrize("method", ["finetune", "confit", "task-bn", "ccll", "best", "ewc", "mas-cpr"])
def test_what_a_run_really_saves(make_run, measured, tmp_path, method):
    make_run(method, folder=tmp_path).run()
    saved = values_of(read_sealed(tmp_path / CHECKPOINT))
    rows = saved["net"]["_extra_state"]["tasks"].values()
    heads = sum(len(entry["classes"]) * 9 for entry in rows)
    in_rows = sum(entry["row"].numel() for entry in rows) - heads
    of_hooks = sum(
        tensor.numel()
        for state in saved["hooks"]
        for key in ("anchor", "fisher", "omega")
        for tensor in state.get(key, {}).values()
    )
    pretrained = saved["net"].get("parts.norms.row", torch.empty(0)).numel()
    assert measured(method).of(method)[-1].kept == in_rows + of_hooks + pretrained


@pytest.mark.parametrize("method", ["confit", "task-bn"])
def test_what_a_network_says_of_itself(make_run, measured, method):
    net: ContinualNet = make_run(method).net
    make_run(method, net=net).run()
    said = sum(task.beside_head for task in net.storage().values())
    own = {name: net.task_state_dict(name).items() for name in net.tasks}
    floats = sum(
        t.numel() for state in own.values() for key, t in state if t.is_floating_point() and not key.startswith("head.")
    )
    assert measured(method).of(method)[-1].kept == said == floats


@pytest.mark.parametrize("method", ["ewc", "si", "rwalk", "mas-afec"])
def test_the_peak_of_a_real_run(make_run, measured, method):
    run = make_run(method)
    run.run()
    held = 0
    for hook in run.method.hooks:
        for value in vars(hook).values():
            if isinstance(value, ContinualNet):
                held += sum(t.numel() for t in value.backbone.state_dict().values() if t.is_floating_point())
            elif isinstance(value, dict):
                held += sum(tensor.numel() for tensor in value.values())
    assert measured(method).of(method)[-1].peak == held


def test_saved_and_loaded(measured, tmp_path):
    result = measured("confit", "ewc")
    result.save(tmp_path / "storage.json")
    assert StorageResult.load(tmp_path / "storage.json") == result
    assert [row.method for row in result.rows] == ["confit"] * 3 + ["ewc"] * 3
