"""Two processes with half of each batch give what one gives with the whole, and go on where one stopped."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from confitune.engine import Listener, TaskFit, TrainSettings
from confitune.errors import ConfituneError
from confitune.methods import METHODS
from confitune.ranks import Ranks

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
CPU = torch.device("cpu")

_spec = importlib.util.spec_from_file_location("rank_cases", HERE / "rank_cases.py")
cases = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cases)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where two processes went through all cases, once."""
    folder = tmp_path_factory.mktemp("ranks")
    assert cases.run(Ranks(), folder=folder / "by-one", stop=cases.STOP, **cases.RESUMED) is None
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(HERE / "rank_cases.py")]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*program, str(folder)], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def by_two(folder):
    """What each of them found."""
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


def assert_same(found, alone):
    for field in ("losses", "accuracies", "matrix", "rows", "state", "pretrained", "penalties", "one image"):
        if field == "matrix":
            found_matrix, matrix = (torch.tensor([[a or 0.0 for a in row] for row in f[field]]) for f in (found, alone))
            torch.testing.assert_close(found_matrix, matrix, msg=lambda text: f"matrix: {text}")
        else:
            torch.testing.assert_close(
                found[field], alone[field], rtol=1e-4, atol=2e-5, msg=lambda text, f=field: f"{f}: {text}"
            )


@pytest.mark.parametrize("name", cases.CASES)
def test_two_processes_give_what_one_gives(by_two, name):
    alone = cases.run(Ranks(), **cases.CASES[name])
    assert alone["execution"] == "fp32, eager"
    for found in (one[name] for one in by_two):
        assert_same(found, alone)
        assert found["execution"] == "fp32, eager, 2 processes"


@pytest.mark.parametrize("name", [*cases.CASES, "resumed"])
def test_both_hold_the_same_network_to_the_last_bit(by_two, name):
    assert by_two[0][name]["sha256"] == by_two[1][name]["sha256"]


def test_two_go_on_where_one_was_stopped(by_two):
    whole = cases.run(Ranks(), **cases.RESUMED)
    for found in (one["resumed"] for one in by_two):
        assert found["resumed"]
        assert len(found["losses"]) == 2  # the second task's fourth epoch, and its fifth
        assert_same({**found, "losses": [], "accuracies": []}, {**whole, "losses": [], "accuracies": []})
        assert found["losses"] == pytest.approx(whole["losses"][-2:], rel=1e-4)


def test_one_goes_on_where_two_were_stopped(folder):
    whole = cases.run(Ranks(), **cases.RESUMED)
    found = cases.run(Ranks(), folder=folder / "by-several", **cases.RESUMED)
    assert found["resumed"]
    assert len(found["losses"]) == 2
    assert_same({**found, "losses": [], "accuracies": []}, {**whole, "losses": [], "accuracies": []})


def test_all_see_that_numbers_went_bad(by_two):
    messages = {one["diverged"] for one in by_two}
    assert len(messages) == 1
    assert "the loss of task 'dark' became nan" in messages.pop()


def test_what_everything_is_made_of(by_two):
    for found in (one["primitives"] for one in by_two):
        floats, integers, scalar = found["added"]
        assert floats.tolist() == [[3.0, 3.0], [3.0, 3.0]]
        assert integers.tolist() == [3]
        assert scalar.item() == 11
        assert found["gathered"].tolist() == [[0, 7], [1, 7]]
        assert found["decided"] == [True, False]  # as the first one chose
        assert "processes 0 and 1 do not have the same number" in found["refused"]
    assert [one["primitives"]["share"].item() for one in by_two] == pytest.approx([3 / 7, 4 / 7])


# ---- what needs no second process ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "size"), [(8, 2), (9, 2), (7, 3), (3, 3), (2, 3)])
def test_parts_are_the_whole_and_differ_by_one_at_most(length, size):
    whole = torch.arange(length)
    parts = [Ranks(rank, size).part(whole) for rank in range(size)]
    assert torch.equal(torch.cat(parts), whole)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    table = whole.expand(4, length)
    assert torch.equal(torch.cat([Ranks(rank, size).part(table, dim=1) for rank in range(size)], 1), table)


def test_each_draws_its_own_dropout_and_the_first_what_one_alone_does():
    seeds = {Ranks(rank, 3).own("epoch", 0) for rank in range(3)}
    assert len(seeds) == 3
    assert Ranks(0, 3).own("epoch", 0) == Ranks().own("epoch", 0) == ("epoch", 0)


def test_every_process_needs_an_image(make_net, make_task):
    net = make_net("shared")
    net.ranks = Ranks(0, 5)
    settings = TrainSettings(batch_size=4, device="cpu")
    with pytest.raises(ConfituneError, match=r"batches of 4 images .* cannot be shared by 5 processes"):
        TaskFit(net, make_task("dark"), METHODS["finetune"], settings, Listener())


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    cuda = torch.device("cuda")
    for local in (0, 1):
        Ranks(local, 3, local).require_device(cuda)
    Ranks(2, 3, 2).require_device(CPU)
    Ranks().require_device(torch.device("cuda:1"))
    with pytest.raises(ConfituneError, match="2 GPUs here and more processes: start torchrun with --nproc-per-node 2"):
        Ranks(2, 3, 2).require_device(cuda)
    with pytest.raises(ConfituneError, match="2 processes take a GPU each, cuda:1 is one"):
        Ranks(0, 2).require_device(torch.device("cuda:1"))
