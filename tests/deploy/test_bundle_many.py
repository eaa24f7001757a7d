"""Many tasks in one bundle: what is done for one task does not depend on how many others there are."""

import hashlib
import importlib
import json
import os
import sys
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from confitune.deploy import Bundle, BundleError, Predictor, TaskRecord, check_tasks
from confitune.deploy.files import mapped_tensors
from confitune.deploy.format import Added, Checked, Network, Removed, Renamed, StoredFile, file_name, files_of
from confitune.deploy.held_out import some_of
from confitune.deploy.journal import State
from confitune.engine import TaskFit

files, held_out, journal, predicting = (
    importlib.import_module(f"confitune.deploy.{name}") for name in ("files", "held_out", "journal", "predictor")
)
NETWORK = Network(
    model="test_byobnet",
    means="window",
    mean=(0.5, 0.4, 0.3),
    std=(0.2, 0.25, 0.3),
    size=32,
    weights="none",
    weights_sha256=hashlib.sha256(b"start").hexdigest(),
)
FEW, MANY = 10, 120


def perturbed(real, seed, classes):
    chance = torch.Generator().manual_seed(seed)
    moved = {
        key: tensor * (1 + 0.05 * torch.randn(tensor.shape, generator=chance)) if tensor.is_floating_point() else tensor
        for key, tensor in real.items()
    }
    moved["head.weight"] = torch.randn(classes, real["head.weight"].shape[1], generator=chance)
    moved["head.bias"] = torch.randn(classes, generator=chance)
    return moved


def add(bundle, name, real, seed, **more):
    classes = tuple(f"{name} {n}" for n in range(2 + seed % 3))
    stored = bundle.store_task(perturbed(real, seed, len(classes)), classes)
    bundle.add_task(name, TaskRecord(classes=classes, file=stored), checked={name: 50.0}, **more)


@pytest.fixture(scope="module")
def real(taught_once):
    """A task's state, of a network as `NETWORK`."""
    return {key: tensor.clone() for key, tensor in Bundle.open(taught_once[1]).task_state("reds").items()}


@pytest.fixture(scope="module")
def bundles(real, taught_once, tmp_path_factory):
    """By their number, bundles of so many tasks 't0', 't1', ..."""
    root, sync = tmp_path_factory.mktemp("many"), os.fsync
    shared, found = Bundle.open(taught_once[1]).load_network().shared_state_dict(), {}
    os.fsync = lambda handle: None
    try:
        for count in (FEW, MANY):
            found[count] = root / str(count)
            bundle = Bundle(found[count], NETWORK)
            with bundle.changing():
                for n in range(count):
                    add(bundle, f"t{n}", real, n, **({} if n else {"shared": shared}))
    finally:
        os.fsync = sync
    return found


_counting: list[Counter] = []


def _hook(event, arguments):
    if _counting and event in ("open", "os.listdir", "os.scandir", "os.remove", "os.rename", "os.mkdir"):
        _counting[0][event] += 1


sys.addaudithook(_hook)  # stays, and counts nothing unless it is asked to


@pytest.fixture
def counted(monkeypatch):
    """Runs something and gives what it asked of the file system, and how many lines of the index were read."""

    def counted(work):
        found, stat, line = Counter(), os.stat, journal.event_from_line
        monkeypatch.setattr(os, "stat", lambda *a, **k: (found.update(["stat"]), stat(*a, **k))[1])
        monkeypatch.setattr(journal, "event_from_line", lambda *a: (found.update(["line"]), line(*a))[1])
        _counting.append(found)
        try:
            work()
        finally:
            _counting.clear()
            monkeypatch.undo()
        return found

    return counted


def of_both(counted, bundles, prepare, work):
    """What `work` asks of the file system with few tasks and with many."""
    asked = []
    for path in bundles.values():
        prepared = prepare(path)
        work(prepared, "t3")  # whatever is asked for once
        asked.append(counted(lambda prepared=prepared: work(prepared, "t7")))
    return asked


# ---- nothing depends on how many there are ---------------------------------------------------------------------------


def test_opening_reads_the_index_and_no_task(counted, bundles):
    few, many = (counted(lambda path=path: Bundle.open(path)) for path in bundles.values())
    assert (few.pop("line"), many.pop("line")) == (2 * FEW, 2 * MANY)
    assert few == many
    assert few["open"] == 4  # two heads, the index, the backbone


def test_adding_renaming_and_removing_ask_for_the_same_with_many_tasks(counted, bundles, real):
    def change(bundle, name):
        with bundle.changing():
            add(bundle, f"more {name}", real, 7)
        with bundle.changing():
            bundle.rename_task(f"more {name}", f"less {name}")
            bundle.remove_task(f"less {name}")

    few, many = of_both(counted, bundles, Bundle.open, change)
    assert few == many
    assert few["line"] == few["os.scandir"] == few["os.listdir"] == 0
    assert few["os.rename"] > 5
    for path in bundles.values():
        assert Bundle.open(path).leftovers() in ([], [path / name for name in Bundle.open(path)._state.kept])


def test_predicting_asks_for_the_same_with_many_tasks(counted, bundles):
    pixels = torch.zeros(1, 3, 224, 224, dtype=torch.uint8)
    few, many = of_both(
        counted,
        bundles,
        lambda path: Predictor.from_bundle(path, device="cpu", ready=4),
        lambda predictor, name: predictor.predict(pixels, [name]),
    )
    assert few == many
    assert few["open"] == 2  # its own file: hashed, then mapped


def test_a_broken_change_is_looked_for_once(counted, bundles):
    path = bundles[MANY]
    (path / ".unfinished").touch()
    left = path / "tasks" / f"{'ab' * 32}.safetensors"
    left.write_bytes(b"left")
    bundle = Bundle.open(path)

    def nothing():
        with bundle.changing():
            pass

    first, second = counted(nothing), counted(nothing)
    assert first["os.scandir"] + first["os.listdir"] > 0
    assert second["os.scandir"] + second["os.listdir"] == 0
    assert not left.exists()
    assert not (path / ".unfinished").exists()


# ---- few in memory ---------------------------------------------------------------------------------------------------


def test_what_is_ready_is_bounded_and_answers_as_if_all_were(bundles):
    pixels = torch.randint(0, 256, (1, 3, 224, 224), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    bundle = Bundle.open(bundles[MANY])
    few, all_of_them = (Predictor(bundle, device="cpu", ready=ready) for ready in (3, MANY))
    order = torch.randperm(MANY, generator=torch.Generator().manual_seed(2))[:40].tolist()
    for n in [*order, *order[-2:], *order[:5]]:
        (found,), (expected,) = few.logits(pixels, [f"t{n}"]), all_of_them.logits(pixels, [f"t{n}"])
        assert torch.allclose(found, expected, atol=1e-5)
        assert len(few._loaded) == len(few._net.tasks) <= 3
        assert len(few._net.heads) == len({len(entry.classes) for entry in few._net.tasks.values()})
    assert len(all_of_them._net.tasks) == 40


def test_a_file_is_hashed_once(bundles, monkeypatch):
    hashed, real = [], files._hash
    monkeypatch.setattr(files, "_hash", lambda path: (hashed.append(path), real(path))[1])
    predictor = Predictor.from_bundle(bundles[FEW], device="cpu", ready=1)
    pixels = torch.zeros(1, 3, 224, 224, dtype=torch.uint8)
    for task in ("t1", "t2", "t1", "t2", "t1"):
        predictor.predict(pixels, [task])
    assert [path.parent.name for path in hashed] == ["backbones", "tasks", "tasks"]


def test_a_file_that_lost_its_end_is_noticed_though_it_was_hashed(bundles, real, tmp_path):
    bundle = Bundle(tmp_path / "model", NETWORK)
    with bundle.changing():
        add(bundle, "a", real, 1, shared=Bundle.open(bundles[FEW]).load_network().shared_state_dict())
    bundle.task_state("a")
    file = next((tmp_path / "model" / "tasks").iterdir())
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(BundleError, match="is damaged"):
        bundle.task_state("a")


# ---- learning --------------------------------------------------------------------------------------------------------


def loads(monkeypatch):
    """The tasks whose state is put into a network from now on."""
    found, real = [], Bundle.load_task
    monkeypatch.setattr(Bundle, "load_task", lambda self, net, task: (found.append(task), real(self, net, task))[1])
    return found


def test_learning_reads_the_last_task_and_those_it_tests(taught, teach, monkeypatch):
    path, loaded, held, run, test = taught(5), loads(monkeypatch), [], TaskFit.run, held_out.accuracy_on
    monkeypatch.setattr(TaskFit, "run", lambda self: (held.append((self.index, [*self.net.tasks])), run(self))[1])
    monkeypatch.setattr(held_out, "accuracy_on", lambda net, *a: (held.append(len(net.tasks)), test(net, *a))[1])
    report = teach("yellows", path, check=4, epochs=1)
    assert held[0] == (5, ["blues", "yellows"])  # the sixth task: seeds and schedule depend on that
    assert len(held) == 5
    assert max(held[1:]) == 3
    assert loaded[0] == "blues"
    tested = [change.task for change in report.changes]
    assert set(loaded[1:]) == {*tested} - {"blues"}
    assert (len(tested), report.earlier) == (4, 5)
    bundle = Bundle.open(path)
    assert set(bundle.history[-1].accuracy) == {*tested, "yellows"}
    assert {change.task: change.after for change in report.changes}.items() <= dict(bundle.accuracy).items()


def test_what_is_tested_does_not_change_what_is_learned(taught, teach, taught_once):
    path = taught(2)
    report = teach("greens", path, check=0)
    assert (report.changes, report.earlier) == ((), 2)
    assert Bundle.open(path).lineage == Bundle.open(taught_once[3]).lineage
    assert Bundle.open(path).record("greens").file == Bundle.open(taught_once[3]).record("greens").file
    assert [*Bundle.open(path).history[-1].accuracy] == ["greens"]


def test_the_tested_tasks_are_others_every_time():
    tasks = [f"t{n}" for n in range(100)]
    chosen = [some_of(tasks, 20, 0, number) for number in range(100, 140)]
    assert all(len(set(some)) == 20 and some == sorted(some, key=tasks.index) for some in chosen)
    assert chosen[0] == some_of(tasks, 20, 0, 100)
    assert len({tuple(some) for some in chosen}) == 40
    assert {task for some in chosen for task in some} == set(tasks)
    assert some_of(tasks, 0, 0, 1) == []


# ---- guessing --------------------------------------------------------------------------------------------------------


def test_a_guess_among_some_tasks_reads_only_those(taught_once, monkeypatch):
    path, loaded = taught_once[6], loads(monkeypatch)
    predictor = Predictor.from_bundle(path, device="cpu", unknown_above=float("inf"))
    pixels = torch.randint(0, 256, (2, 3, 224, 224), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    found = predictor.guess(pixels, ["reds", "checks", "reds"])
    assert loaded == ["reds", "checks"]
    assert {task for task, _ in found} <= {"reds", "checks"}
    assert all(0.5 <= share <= 1 for _, share in found)
    assert [answer.task for answer in predictor.predict(pixels, [None, None], among=["blues"])] == ["blues", "blues"]
    with pytest.raises(BundleError, match="no task 'birds'"):
        predictor.guess(pixels, ["reds", "birds"])
    with pytest.raises(BundleError, match="among no tasks"):
        predictor.guess(pixels, [])


def test_a_guess_among_too_many_is_refused(taught_once, monkeypatch):
    monkeypatch.setattr(predicting, "MOST_GUESSED", 2)
    predictor = Predictor.from_bundle(taught_once[3], device="cpu")
    pixels = torch.zeros(1, 3, 224, 224, dtype=torch.uint8)
    with pytest.raises(BundleError, match=r"a guess among 3 tasks .*, more than 2: name the task, or fewer"):
        predictor.predict(pixels, [None])
    assert len(predictor.guess(pixels, ["reds", "greens"])) == 1
    assert predictor.predict(pixels, ["reds"])[0].task == "reds"


def test_guesses_of_many_tasks_are_not_measured(taught_once, monkeypatch):
    monkeypatch.setattr(held_out, "MOST_CHECKED", 1)
    bundle, said = Bundle.open(taught_once[2]), []
    checks = check_tasks(bundle, "cpu", lambda *given: said.append(given))
    assert checks.accuracy == pytest.approx(dict(bundle.accuracy))
    assert checks.guessed is None
    assert said == [("testing tasks", 1, 2), ("testing tasks", 2, 2)]


# ---- files of others -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "tensor", "message"),
    [
        ("head.weight", torch.zeros(2, 7), r"head\.weight must have shape \(2, \d+\) and is of shape \(2, 7\)"),
        ("head.weight", torch.zeros(5000, 64), "2 class names for a head of 5000 classes"),
        ("head.bias", None, r"head\.bias must have shape \(2,\) and is missing"),
        ("finished", torch.ones(1000, dtype=torch.bool), "it does not say that its task was finished"),
        ("finished", torch.tensor(False), "it does not say that its task was finished"),
        ("finished", None, "it does not say that its task was finished"),
        (
            "image_size",
            torch.tensor([10**9, 10**9]),
            r"learned from images of \[1000000000, 1000000000\] pixels, not 32",
        ),
        ("image_size", torch.zeros(9), "learned from images of very many pixels, not 32"),
        ("some.input_size", torch.tensor([10**9, 4, 1]), "planes which no image of 32 pixels leads to"),
        ("some.input_size", torch.tensor([-4, 4, 1]), "planes which no image of 32 pixels leads to"),
    ],
)
def test_a_file_that_declares_other_tensors_is_refused_before_any_is_copied(
    bundles, real, tmp_path, monkeypatch, key, tensor, message
):
    hostile = {**perturbed(real, 1, 2), key: tensor}
    if tensor is None:
        del hostile[key]
    bundle = Bundle(tmp_path / "model", NETWORK)
    with bundle.changing():
        add(bundle, "good", real, 1, shared=Bundle.open(bundles[FEW]).load_network().shared_state_dict())
        bundle.add_task("bad", TaskRecord(classes=("a", "b"), file=bundle.store_task(hostile, ["a", "b"])))
    net = bundle.load_network(["good"])
    monkeypatch.setattr(torch, "cat", lambda *_: pytest.fail("memory was taken"))
    with pytest.raises(BundleError, match=rf"{bundle.record('bad').file.sha256}\.safetensors: .*{message}"):
        bundle.load_task(net, "bad")
    assert list(net.tasks) == ["good"]


def test_a_backbone_of_another_network_is_refused(real, tmp_path):
    bundle = Bundle(tmp_path / "model", NETWORK)
    with bundle.changing():
        add(bundle, "a", real, 1, shared={"stem.weight": torch.zeros(200_000)})
    with pytest.raises(BundleError, match=r"\.safetensors: the shared weights are those of another network"):
        bundle.load_network()


def test_a_network_that_the_file_cannot_hold_is_not_built(real, tmp_path, monkeypatch):
    bundle = Bundle(tmp_path / "model", NETWORK)
    with bundle.changing():
        add(bundle, "a", real, 1, shared={"stem.weight": torch.zeros(3)})
    monkeypatch.setattr("confitune.deploy.loading.build_model", lambda name: pytest.fail("memory was taken"))
    with pytest.raises(BundleError, match=r"\.safetensors: 156 bytes cannot be the weights of test_byobnet"):
        bundle.load_network()


def test_mapped_tensors_are_those_that_safetensors_reads(tmp_path, real):
    kinds = {
        **real,
        "half": torch.randn(3, 2).half(),
        "brain": torch.randn(3).bfloat16(),
        "double": torch.randn(2, 1, 2).double(),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "int": torch.tensor([-3, 4], dtype=torch.int32),
        "none": torch.zeros(0, 4),
        "one": torch.tensor(True),
    }
    save_file(kinds, tmp_path / "a.safetensors", {"some": "words"})
    before = (tmp_path / "a.safetensors").read_bytes()
    found, expected = mapped_tensors(tmp_path / "a.safetensors"), load_file(tmp_path / "a.safetensors")
    assert found.keys() == expected.keys() == kinds.keys()
    for key in kinds:
        assert found[key].dtype == expected[key].dtype
        assert torch.equal(found[key], expected[key])
    found["half"].zero_()
    assert (tmp_path / "a.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},  # past the end
        {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]},
        {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 7]},
        {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 8]},
        {"dtype": "X9", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], "more": 1},
        [],
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, entry):
    header = json.dumps({"a": entry}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(8)
    stored = StoredFile(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
    (tmp_path / "tasks").mkdir()
    (tmp_path / file_name("tasks", stored)).write_bytes(data)
    with pytest.raises(BundleError, match="holds no tensors"):
        files.TensorFiles(tmp_path).read("tasks", stored)


# ---- the index -------------------------------------------------------------------------------------------------------

NAMES = st.sampled_from("abcdefg")
FILES = st.sampled_from("0123")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "rename", "remove", "check"]), NAMES, NAMES, FILES), max_size=30))
def test_the_state_is_that_of_a_plain_list(steps):
    state, plain, accuracy = State(), [], {}
    for kind, name, other, file in steps:
        known = [task for task, _ in plain]
        stored = StoredFile(sha256=file * 64, bytes=1)
        if kind == "add" and name not in known:
            record = TaskRecord(classes=("a", "b"), file=stored, held_out=stored if file < "2" else None)
            assert state.happened(Added(task=name, record=record)) == []
            plain.append((name, record))
        elif kind == "rename" and name in known and other not in known:
            state.happened(Renamed(task=name, to=other))
            plain = [(other if task == name else task, record) for task, record in plain]
            accuracy = {other if task == name else task: value for task, value in accuracy.items()}
        elif kind == "remove" and name in known:
            gone = dict(plain)[name]
            assert state.happened(Removed(task=name)) == [file_name(*file) for file in files_of(gone)]
            plain = [(task, record) for task, record in plain if task != name]
            accuracy.pop(name, None)
        elif kind == "check" and name in known:
            state.happened(Checked(after=name, accuracy={name: len(plain)}))
            accuracy[name] = len(plain)
    assert list(state.tasks.items()) == plain
    assert len(state.tasks) == len(plain)
    assert state.accuracy == accuracy
    assert not plain or next(reversed(state.tasks)) == plain[-1][0]
    needed = {name for _, record in plain for name in (file_name(*file) for file in files_of(record))}
    possible = {f"{folder}/{file * 64}.safetensors" for folder in ("tasks", "held-out") for file in "0123"}
    assert {name for name in possible if state.needs(name)} == needed


def test_an_index_that_speaks_of_no_task_is_damaged(tmp_path, real, bundles):
    bundle = Bundle(tmp_path / "model", NETWORK)
    with bundle.changing():
        add(bundle, "a", real, 1, shared=Bundle.open(bundles[FEW]).load_network().shared_state_dict())
        add(bundle, "b", real, 2)
        bundle._state.happened(Renamed(task="b", to="c"))  # so that an event is written that cannot have been
        bundle._commit([Removed(task="c")])
    (tmp_path / "model" / "bundle.before.json").unlink()
    with pytest.raises(BundleError, match=r"line 5, is damaged: there is no task 'c'"):
        Bundle.open(tmp_path / "model")
