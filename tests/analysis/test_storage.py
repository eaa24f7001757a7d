"""Numbers stored: counted by hand for the tiny network, for ResNet18, and in what real runs leave behind."""

import pytest

from confitune.analysis.storage import measure_storage
from confitune.engine.checkpoint import CHECKPOINT, values_of
from confitune.files import read_sealed
from confitune.methods import create_method
from confitune.nn import ContinualNet, without_memory

# The tiny network: convolutions 3 -> 6 with bias and 6 -> 8, batch norms of 6 and 8 channels.
CONVS = 3 * 6 * 9 + 6 + 6 * 8 * 9
WEIGHTS = CONVS + 2 * 14
NETWORK = WEIGHTS + 2 * 14  # running moments, too
WINDOWS = (3 + 6) * 9
PHASES = 3 * 4 + 6 * 1  # strides 2 and 1
CALIBRATED = 56 + 14 * (9 + 1 + 4)  # batch norms; 3x3, gate and its norm of each channel
CHANGES = 4 * ((3 + 9 + 6) + (6 + 9 + 8))  # rank 4

# method: what is kept for each task, and once
EXPECTED = {
    "finetune": (0, 0),
    "linear-probe": (0, 0),
    "joint": (0, 0),
    "task-bn": (56, 0),
    "confit": (3 * 14 + WINDOWS, 0),  # a finished task has no mean
    "single-task": (NETWORK, 0),
    "ccll": (CALIBRATED, 56),  # once the batch norms that tasks start from
    "best": (56 + CHANGES, 56),  # likewise
    "ewc": (0, 2 * WEIGHTS),  # anchor, Fisher
    "mas": (0, 2 * WEIGHTS),
    "si": (0, 2 * WEIGHTS),
    "rwalk": (0, 4 * WEIGHTS),
    "mas-cpr": (0, 2 * WEIGHTS),
    "mas-afec": (0, 2 * WEIGHTS),
    "ewc+task-bn": (56, 2 * CONVS),
}


@pytest.fixture
def measured(make_backbone):
    def measure(name, options=None):
        method = create_method(name, options or {})
        return measure_storage(method, method.network(make_backbone()))

    return measure


@pytest.mark.parametrize("method", EXPECTED)
def test_the_tiny_network_by_hand(measured, method):
    found = measured(method)
    assert (found.per_task, found.once) == EXPECTED[method]
    assert found.kept(3) == found.once + 3 * found.per_task


def test_phase_means(measured):
    assert measured("confit", {"confit": {"means": "phase"}}).per_task == 42 + PHASES


def test_resnet18():
    found = {}
    for name in ("confit", "task-bn", "ewc", "single-task", "ccll"):
        method = create_method(name)
        storage = measure_storage(method, method.network(without_memory("resnet18")))
        found[name] = [storage.kept(1), storage.kept(2)]
    assert found == {
        "confit": [45_523, 91_046],
        "task-bn": [19_200, 38_400],
        "ewc": [22_353_024, 22_353_024],
        "single-task": [11_186_112, 22_372_224],
        "ccll": [105_600, 192_000],  # the pre-trained batch norms once: 19,200
    }


@pytest.mark.parametrize("method", ["finetune", "confit", "task-bn", "ccll", "best", "ewc", "mas-cpr"])
def test_what_a_run_really_saves(make_run, measured, tmp_path, method):
    make_run(method, {"best": {"owns": "moments"}}, folder=tmp_path).run()
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
    kept = [f"parts.{part}.row" for part in ("norms", "moments", "calibrations")]
    pretrained = sum(saved["net"][key].numel() for key in kept if key in saved["net"])
    assert measured(method).kept(len(rows)) == in_rows + of_hooks + pretrained


@pytest.mark.parametrize("method", ["confit", "task-bn"])
def test_what_a_network_says_of_itself(make_run, measured, method):
    net: ContinualNet = make_run(method).net
    make_run(method, net=net).run()
    said = sum(task.beside_head for task in net.storage().values())
    own = {name: net.task_state_dict(name).items() for name in net.tasks}
    floats = sum(
        t.numel() for state in own.values() for key, t in state if t.is_floating_point() and not key.startswith("head.")
    )
    assert measured(method).kept(len(net.tasks)) == said == floats
