"""Runs on a Ray cluster give what they give here, whatever happens to its nodes."""

import csv
import io
import os
import re
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from confitune.engine.result import add_result
from confitune.errors import ConfituneError
from confitune.experiments.paper.plan import Scope
from confitune.experiments.paper.reproduce import reproduce
from confitune.experiments.runs import cluster as ray_cluster
from confitune.experiments.runs.cluster import Errand, share_of, work
from confitune.experiments.runs.identity import RUNS, finished_runs
from confitune.experiments.runs.job import LOCK, TrainingError
from confitune.experiments.runs.recipe import make_recipe
from confitune.experiments.runs.runner import Place, open_place, plan_recipe, run_recipe
from confitune.experiments.runs.tune import plan_search, run_search
from confitune.files import exclusive
from found import folder_of, run_of

HERE = Path(__file__).parent
STORE = 100 * 2**20


class TwoNodes:
    """A cluster on this machine: a head that does no runs, and two nodes of one CPU."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        self._cluster.add_node(num_cpus=0, object_store_memory=STORE, include_dashboard=False)
        self.address = self._cluster.address
        self._nodes = [self._add() for _ in range(2)]

    def kill(self, node_id):
        (node,) = [node for node in self._nodes if node.node_id == node_id]
        self._nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def mend(self):
        while len(self._nodes) < 2:
            self._nodes.append(self._add())

    def shutdown(self):
        self._cluster.shutdown()

    def _add(self):
        return self._cluster.add_node(num_cpus=1, object_store_memory=STORE)


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(HERE.parents[2] / "src"), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))  # of the workers
        patch.syspath_prepend(str(HERE.parent))
        nodes = TwoNodes()
        try:
            yield nodes
        finally:
            nodes.shutdown()


@pytest.fixture(scope="module")
def on_cluster(cluster):
    """Places on the cluster; they share a connection, so that workers that have imported torch serve several tests."""
    import ray

    @contextmanager
    def on_cluster(console=None, parallel_seeds=1, cpus=1):
        there = ray_cluster.RayPlace(ray, console or Console(quiet=True), parallel_seeds, None, cpus)
        try:
            yield there
        finally:
            there.close()

    with open_place(cluster.address):
        yield on_cluster


@pytest.fixture
def watches(cluster):
    import cluster_watch

    return cluster_watch


def said():
    return Console(file=io.StringIO(), force_terminal=False, width=200)


def lines(console):
    return console.file.getvalue().splitlines()


def rows(path):
    """What a log says, but for how long it took."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(path.open(newline=""))]


def wait_until(true, seconds=300):
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "this never happened"
        time.sleep(0.05)


# ---- on a cluster ----------------------------------------------------------------------------------------------------


def test_a_node_dies_and_all_runs_end_as_they_do_here(
    cluster, on_cluster, watches, finished, values, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "argv", ["confitune", "run", "--on", "a cluster"])
    out, console = tmp_path / "cluster", said()
    recipe = make_recipe({**values, "seeds": 2})

    def kill():
        wait_until((out / "paused").exists)
        cluster.kill((out / "paused").read_text())

    killer = threading.Thread(target=kill)
    killer.start()
    with on_cluster(console) as there:
        results = run_recipe(recipe, out, place=there, checkpoint_seconds=0, watch=watches.wait_in_second_task)
    killer.join()
    cluster.mend()

    assert [(r.method, r.seed) for r in results] == [("finetune", 0), ("finetune", 1), ("confit", 0), ("confit", 1)]
    begun = []
    for result in results:
        here = run_of(finished, result.method, result.seed)
        assert run_of(out, result.method, result.seed) == result
        mine, other = (folder_of(where, result.method, result.seed) for where in (out, finished))
        assert result.final_sha256 == here.final_sha256
        assert result.accuracy_matrix == here.accuracy_matrix
        assert (result.config, result.versions, result.execution) == (here.config, here.versions, here.execution)
        assert result.device.endswith("1 threads)")
        assert result.command == "confitune run --on 'a cluster'"
        for log in ("epochs.csv", "accuracy.csv"):
            assert rows(mine / log) == rows(other / log)
        begun.append((mine / "begun").read_text().split())
    assert sorted(begun) == [["0"], ["0"], ["0"], ["0", "1"]]  # one goes on after its first task
    assert {path.name for path in out.iterdir()} == {"README.md", "paused", "runs", "runs.jsonl", "table.md"}
    (note,) = [line for line in lines(console) if "died" in line]
    said_of_it = r"digits \w+ seed \d: accuracy [\d.]+%; its worker died 1 times, it went on from its checkpoint"
    assert re.fullmatch(said_of_it, note)
    told = {line.split(": accuracy")[0] for line in lines(console)}
    assert told == {f"digits {method} seed {seed}" for method in ("finetune", "confit") for seed in (0, 1)}


def test_what_diverges_is_named_and_the_others_end(on_cluster, values, tmp_path):
    given = {**values, "methods": ["ewc", "linear-probe"], "clip_norm": None, "pull_limit": None}
    recipe = make_recipe({**given, "options": {"ewc": {"strength": 1e30}}})
    with on_cluster() as there, pytest.raises(TrainingError) as caught:
        run_recipe(recipe, tmp_path, place=there)
    assert str(caught.value).startswith("the loss of task 'task2' became")
    assert [run.method for run in finished_runs(tmp_path).values()] == ["linear-probe"]


def test_a_run_whose_worker_dies_each_time_is_given_up(on_cluster, watches, values, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_cluster, "RETRIES", 0)
    recipe = make_recipe({**values, "methods": ["confit", "linear-probe"]})
    with on_cluster() as there, pytest.raises(ConfituneError) as caught:
        run_recipe(recipe, tmp_path, place=there, watch=watches.die_in_second_task)
    assert str(caught.value).startswith("its worker died 1 times")
    assert "--resume goes on from the checkpoint" in str(caught.value)
    assert [run.method for run in finished_runs(tmp_path).values()] == ["linear-probe"]


def test_a_search_runs_all_its_values_at_once(on_cluster, values, tmp_path):
    """Seeds share a process, values do not."""
    search = plan_search("ewc", {**values, "tasks": 2, "seeds": 2}, grid=["1", "100"])
    console = said()
    with on_cluster(console, parallel_seeds=2) as there:
        begun = []
        begin = there.begin
        there.begin = lambda jobs: (begun.append(len(jobs)), begin(jobs))
        points, retrained = run_search(search, tmp_path / "there", place=there, retrain=False)
    assert begun == [4]
    here, _ = run_search(search, tmp_path / "here", place=Place(parallel_seeds=2), retrain=False)
    assert retrained == []
    assert list(points) == list(here) == [1.0, 100.0]
    for value, runs in points.items():
        assert [r.final_sha256 for r in runs] == [r.final_sha256 for r in here[value]]
    assert all(
        re.match(r"digits ewc seed [01] \(ewc.strength=(1|100), [12] of 2\): acc", line) for line in lines(console)
    )


def test_what_is_measured_on_the_way_is_measured_on_workers(on_cluster, values, tmp_path):
    given = {key: values[key] for key in ("tasks", "batch_size", "model", "weights", "device")}
    outcomes = {}
    for name in ("there", "here"):
        with on_cluster() if name == "there" else nullcontext(Place()) as place:
            scope = Scope(tmp_path / name, ("digits",), ("confit",), quick=True, given=given, place=place)
            outcomes[name] = reproduce(["shift", "transductive"], scope)
    assert [outcome.data for outcome in outcomes["there"]] == [outcome.data for outcome in outcomes["here"]]
    assert outcomes["here"][0].data


def test_runs_that_are_not_done_are_stopped(on_cluster, watches, values, tmp_path):
    recipe = make_recipe({**values, "methods": ["linear-probe"]})
    with on_cluster() as there:
        (job,) = plan_recipe(recipe, tmp_path, there, checkpoint_seconds=0, watch=watches.wait_in_second_task)
        there.begin([job])
        wait_until((tmp_path / "paused").exists)
    with exclusive(job.folder / LOCK, lambda: None):  # comes back when the worker is gone
        assert not finished_runs(tmp_path)
    assert not list(tmp_path.glob(".shared-*"))
    (result,) = run_recipe(recipe, tmp_path, resume=True, watch=watches.wait_in_second_task)
    assert (job.folder / "begun").read_text().split() == ["0", "1"]
    assert result.method == "linear-probe"


def test_a_share_that_no_node_has_is_said(on_cluster, values, tmp_path):
    console = said()
    with on_cluster(console, cpus=7) as there:
        there.begin(plan_recipe(make_recipe(values), tmp_path, there))
    assert lines(console) == ["note: no node of the cluster has 7 CPUs: runs wait until one joins"]


# ---- without one -----------------------------------------------------------------------------------------------------


def test_without_ray_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    message = re.escape("--on ray needs Ray: pip install 'confitune[ray]'")
    with pytest.raises(ConfituneError, match=message), open_place("ray"):
        pass


def test_without_ray_an_unknown_place_is_still_called_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    message = "--on slurm: write local, ray, HOST:PORT or ray://HOST:PORT"
    with pytest.raises(ConfituneError, match=message), open_place("slurm"):
        pass


@pytest.mark.parametrize(
    ("on", "message"),
    [
        ("rey", "--on rey: write local, ray, HOST:PORT or ray://HOST:PORT"),
        ("ray://somewhere", "--on ray://somewhere: write local, ray"),
        ("127.0.0.1:1", r"no answer from 127.0.0.1:1 \(.*\): is a Ray cluster running there\?"),
    ],
)
def test_an_address_that_is_none_is_refused(on, message):
    with pytest.raises(ConfituneError, match=message), open_place(on):
        pass


def test_shares_are_for_clusters():
    with pytest.raises(ConfituneError, match="a run's share of a cluster: add --on ray"), open_place(cpus_per_run=1):
        pass


@pytest.mark.parametrize(
    ("nodes", "device", "asked", "share"),
    [
        ([{"CPU": 16, "GPU": 2}, {"CPU": 8, "GPU": 2}, {"CPU": 64}], "cuda", {}, (4, 1)),
        ([{"CPU": 16, "GPU": 2}], "auto", {"gpus": 0.1}, (1, 0.1)),
        ([{"CPU": 16, "GPU": 2}], "auto", {"gpus": 0.5, "cpus": 3}, (3, 0.5)),
        ([{"CPU": 16, "GPU": 2}], "cpu", {}, (4, 0)),
        ([{"CPU": 16, "GPU": 2}], "auto", {"gpus": 0}, (4, 0)),
        ([{}, {"CPU": 3}, {"CPU": 9}], "auto", {}, (3, 0)),  # a head that does no runs
        ([{}, {"CPU": 3}], "cpu", {"cpus": 8}, (8, 0)),
        ([{"CPU": 4}], "cuda", {}, (1, 1)),  # a GPU may join
        ([], "auto", {}, (4, 0)),
    ],
)
def test_shares(nodes, device, asked, share):
    assert share_of(nodes, device, **asked) == share


@pytest.mark.parametrize(
    ("device", "asked", "message"),
    [
        ("cuda:1", {}, "--device cuda:1 names one GPU, and Ray chooses which a run gets: use --device cuda"),
        ("cpu", {"gpus": 0.5}, "--gpus-per-run 0.5 and --device cpu contradict each other"),
        ("cuda", {"gpus": 0}, "--gpus-per-run 0 and --device cuda contradict each other"),
    ],
)
def test_shares_that_make_no_sense(device, asked, message):
    with pytest.raises(ConfituneError, match=message):
        share_of([{"CPU": 4, "GPU": 1}], device, **asked)


class FakeRay:
    """As much of Ray as a place asks for before anything has ended."""

    def __init__(self, *nodes):
        self._nodes = nodes

    def nodes(self):
        dead = {"Alive": False, "Resources": {"CPU": 1, "GPU": 8}}
        return [dead, *({"Alive": True, "Resources": node} for node in self._nodes)]


@pytest.mark.parametrize(
    ("node", "given", "settled"),
    [
        ({"CPU": 8, "GPU": 1}, {}, ("cuda", "bf16")),  # whether there is a GPU here does not matter
        ({"CPU": 8, "GPU": 1}, {"precision": "fp32"}, ("cuda", "fp32")),
        ({"CPU": 8, "GPU": 1}, {"device": "cpu"}, ("cpu", "fp32")),
        ({"CPU": 8}, {}, ("cpu", "fp32")),
        ({"CPU": 8}, {"precision": "bf16"}, ("cpu", "bf16")),
    ],
)
def test_device_and_precision_are_the_clusters(node, given, settled):
    there = ray_cluster.RayPlace(FakeRay(node), Console(quiet=True), 1, None, None)
    recipe = there.settled(make_recipe({"dataset": "digits", "methods": ["finetune"], **given}))
    assert (recipe.device, recipe.precision) == settled
    assert recipe.identity("finetune", 0, "abc")["precision"] == settled[1]


# ---- a worker's work, done here --------------------------------------------------------------------------------------


@pytest.fixture
def errand(values, tmp_path):
    jobs = plan_recipe(make_recipe({**values, "methods": ["linear-probe"], "tasks": 1}), tmp_path, Place())
    (tmp_path / "token").touch()
    return Errand(tuple(jobs), 1, Path.cwd(), tmp_path / "token", most_tries=3)


def changed(errand, **changes):
    return Errand(**{**vars(errand), **changes})


def test_a_run_waits_for_an_earlier_try_and_takes_its_result(errand, tmp_path):
    (job,) = errand.jobs
    (first,) = work(errand)
    (job.out / RUNS).unlink()
    given = []
    with exclusive(job.folder / LOCK, lambda: pytest.fail("it is free")):
        second = threading.Thread(target=lambda: given.extend(work(errand)))
        second.start()
        wait_until(lambda: errand.tries() == 2)
        add_result(job.out / RUNS, first)
    second.join()
    assert given == [first]


def test_a_run_that_ray_never_gives_up_on_is_given_up(errand, monkeypatch):
    """Ray tries a run that is killed for memory again for ever."""
    monkeypatch.setattr(ray_cluster, "side_by_side", lambda *_, **__: ["done"])
    assert [work(errand) for _ in range(3)] == [["done"]] * 3
    (error,) = work(errand)
    assert "its worker died 3 times; if that was for lack of memory" in str(error)


def test_a_folder_that_is_not_shared_is_said(errand, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_cluster, "_SEEN_WITHIN", 0.0)
    for other in ({"token": tmp_path / "else" / "token"}, {"home": tmp_path / "nowhere"}):
        (error,) = work(changed(errand, **other))
        assert "does not see" in str(error)
        assert "must be on a file system that all nodes share, under the same path" in str(error)
    assert not list(tmp_path.rglob(LOCK))


def test_another_version_is_refused(errand):
    (error,) = work(changed(errand, version="0.0.9"))
    assert re.search(r"on \S+: this node has confitune .*, the command was given with 0\.0\.9", str(error))


def test_other_weights_on_a_node_are_refused(errand, tmp_path):
    (job,) = errand.jobs
    state = torch.load(job.recipe.weights, weights_only=True)
    next(iter(state.values()))[0] += 1
    torch.save(state, tmp_path / "other.pth")
    other = job.recipe.model_copy(update={"weights": str(tmp_path / "other.pth")})
    (error,) = work(changed(errand, jobs=(replace(job, recipe=other),)))
    assert "the weights of test_byobnet (other.pth) are not those that this run was planned with" in str(error)


def test_a_worker_uses_the_threads_of_its_share(errand, monkeypatch):
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(ray_cluster, "side_by_side", lambda *_, **__: [])
    work(changed(errand, threads=3))
    assert threads == [3]


def test_gpu_memory_that_does_not_suffice_is_said(errand, monkeypatch):
    def too_much(*_, **__):
        raise torch.OutOfMemoryError("tried to allocate 1 TiB")

    monkeypatch.setattr(ray_cluster, "side_by_side", too_much)
    (error,) = work(errand)
    assert re.match(r"out of GPU memory on \S+: give each run a larger share with --gpus-per-run \(tried", str(error))
