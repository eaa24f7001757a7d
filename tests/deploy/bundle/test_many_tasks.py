"""Many tasks in one bundle: what is done for one task does not depend on how many others there are."""

import hashlib
import importlib
import os
import sys
from collections import Counter

import pytest
import torch

from confitune.deploy import Bundle, BundleError, Predictor, changing
from confitune.engine import TaskFit
from deploy.shared import NETWORK, add, backbone_of, checked

checks, store = (importlib.import_module(f"confitune.deploy.{name}") for name in ("checks", "bundle.store"))
FEW, MANY = 10, 120


@pytest.fixture(scope="module")
def bundles(real, backbone, tmp_path_factory):
    """By their number, bundles of so many tasks 't0', 't1', ..."""
    root, sync, found = tmp_path_factory.mktemp("many"), os.fsync, {}
    os.fsync = lambda handle: None
    try:
        for count in (FEW, MANY):
            found[count] = root / str(count)
            bundle = Bundle(found[count], NETWORK)
            with changing(bundle) as change:
                for n in range(count):
                    add(change, f"t{n}", real, n, **({} if n else {"shared": backbone}))
    finally:
        os.fsync = sync
    return found


_counting: list[Counter] = []


def _hook(event, arguments):
    if _counting and event in ("open", "os.listdir", "os.scandir", "os.remove", "os.rename", "os.mkdir"):
        _counting[0][event] += not (event == "open" and isinstance(arguments[0], int))  # an open file


sys.addaudithook(_hook)  # stays, and counts nothing unless it is asked to


@pytest.fixture
def counted(monkeypatch):
    """Runs something and gives what it asked of the file system."""

    def counted(work):
        found, stat = Counter(), os.stat
        monkeypatch.setattr(os, "stat", lambda *a, **k: (found.update(["stat"]), stat(*a, **k))[1])
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


def test_opening_reads_the_manifest_and_no_task(counted, bundles):
    few, many = (counted(lambda path=path: Bundle.open(path)) for path in bundles.values())
    assert few == many
    assert few["open"] == 2  # the manifest, the backbone


def test_adding_renaming_and_removing_ask_for_the_same_with_many_tasks(counted, bundles, real):
    def change(bundle, name):
        with changing(bundle) as change:
            add(change, f"more {name}", real, 7)
        with changing(bundle) as change:
            change.rename_task(f"more {name}", f"less {name}")
            change.remove_task(f"less {name}")

    few, many = of_both(counted, bundles, Bundle.open, change)
    assert few == many
    assert few["os.rename"] > 5
    assert few["os.scandir"] <= 2 * 5  # each of two changes lists the folder and the four in it once
    for path in bundles.values():
        assert Bundle.open(path).leftovers() == []


def test_predicting_asks_for_the_same_with_many_tasks(counted, bundles):
    pixels = torch.zeros(1, 3, 224, 224, dtype=torch.uint8)
    few, many = of_both(
        counted,
        bundles,
        lambda path: Predictor.from_bundle(path, device="cpu", ready=4),
        lambda predictor, name: predictor.predict(pixels, [name]),
    )
    assert few == many
    assert few["open"] == 1  # its own file


# ---- few in memory ---------------------------------------------------------------------------------------------------


def test_what_is_ready_is_bounded_and_answers_as_if_all_were(bundles):
    pixels = torch.randint(0, 256, (1, 3, 224, 224), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    bundle = Bundle.open(bundles[MANY])
    few, all_of_them = (Predictor(bundle, device="cpu", ready=ready) for ready in (3, MANY))
    order = torch.randperm(MANY, generator=torch.Generator().manual_seed(2))[:40].tolist()
    for n in [*order, *order[-2:], *order[:5]]:
        (found,), (expected,) = few.logits(pixels, [f"t{n}"]), all_of_them.logits(pixels, [f"t{n}"])
        assert torch.allclose(found, expected, atol=1e-5)
        assert len(few._tasks._heads) == len(few._tasks.net.tasks) <= 3
        assert len(few._tasks.net.head.linears) == len({len(entry.classes) for entry in few._tasks.net.tasks.values()})
    assert len(all_of_them._tasks.net.tasks) == 40


def test_a_file_is_hashed_once(bundles, monkeypatch):
    hashed, real = [], hashlib.sha256
    monkeypatch.setattr(store.hashlib, "sha256", lambda data=b"": (hashed.append(len(data)), real(data))[1])
    predictor = Predictor.from_bundle(bundles[FEW], device="cpu", ready=1)
    pixels = torch.zeros(1, 3, 224, 224, dtype=torch.uint8)
    for task in ("t1", "t2", "t1", "t2", "t1"):
        predictor.predict(pixels, [task])
    of = predictor.bundle.tasks
    files = [backbone_of(bundles[FEW]).stat().st_size, of["t1"].file.bytes, of["t2"].file.bytes]
    assert [size for size in hashed if size in files] == files


def test_a_file_that_lost_its_end_is_noticed_though_it_was_hashed(backbone, real, tmp_path):
    bundle = Bundle(tmp_path / "model", NETWORK)
    with changing(bundle) as change:
        add(change, "a", real, 1, shared=backbone)
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
    path, loaded, held, fit, test = taught(5), loads(monkeypatch), [], TaskFit.fit, checks.evaluate
    monkeypatch.setattr(TaskFit, "fit", lambda self: (held.append((self.index, [*self.net.tasks])), fit(self))[1])
    monkeypatch.setattr(checks, "evaluate", lambda net, *a: (held.append(len(net.tasks)), test(net, *a))[1])
    report = teach("yellows", path, check=4, epochs=1)
    assert held[0] == (5, ["blues", "yellows"])  # the sixth task: seeds and schedule depend on that
    assert len(held) == 5
    assert max(held[1:]) == 3
    assert loaded[0] == "blues"
    tested = [change.task for change in report.changes]
    assert set(loaded[1:]) == {*tested} - {"blues"}
    assert (len(tested), report.earlier) == (4, 5)
    assert {change.task: change.after for change in report.changes}.items() <= checked(path).items()


def test_what_is_tested_does_not_change_what_is_learned(taught, teach, taught_once):
    path, before = taught(2), checked(taught_once[2])
    report = teach("greens", path, check=0)
    assert (report.changes, report.earlier) == ((), 2)
    assert Bundle.open(path).manifest.lineage == Bundle.open(taught_once[3]).manifest.lineage
    assert Bundle.open(path).record("greens").file == Bundle.open(taught_once[3]).record("greens").file
    assert {**checked(path), **before} == checked(path)


def test_the_tested_tasks_are_others_every_time(taught_once):
    bundle = Bundle.open(taught_once[6])
    net = bundle.load_network()
    chosen = [[change.task for change in checks.check_earlier(bundle, net, 3, seed)] for seed in range(6)]
    assert all(len(set(some)) == 3 and some == sorted(some, key=[*bundle.tasks].index) for some in chosen)
    assert chosen[0] == [change.task for change in checks.check_earlier(bundle, net, 3, 0)]
    assert len({tuple(some) for some in chosen}) > 2
    assert checks.check_earlier(bundle, net, 0, 0) == ()
