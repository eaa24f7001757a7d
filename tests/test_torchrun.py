"""`torchrun -m confitune run`: the whole program by two processes."""

import csv
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from confitune import cli
from confitune.engine import RunResult
from confitune.errors import ConfituneError, SaidElsewhereError
from confitune.experiments import make_recipe, open_place, run_recipe
from confitune.ranks import LostProcessError, Ranks, joined, refuse_several

HERE = Path(__file__).parent
SOURCE = HERE.parent / "src"


# Two tasks of two digits by ConFiT; a smooth network, in which rounding stays rounding.
TINY = "--dataset digits --tasks 2 --epochs 2 --batch-size 33 --model test_efficientnet --weights none --device cpu"
TINY = [*TINY.split(), "--method", "confit"]
ONE_IMAGE = 1.4  # of 72 or 73 test images, in percent


def torchrun(folder, *arguments):
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *map(str, arguments)]
    unset = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    environment |= {"CONFITUNE_CACHE": str(folder / "cache"), "CONFITUNE_DATA": str(folder / "data")}
    return subprocess.run(program, env=environment, cwd=folder, capture_output=True, text=True, timeout=500)


def alone(monkeypatch, folder, *arguments):
    monkeypatch.setenv("CONFITUNE_CACHE", str(folder / "cache"))
    monkeypatch.setattr(sys, "argv", ["confitune", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert not exit_.value.code


@pytest.fixture(scope="module")
def by_one(tmp_path_factory):
    """The folder of the same run by one process."""
    folder = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as patch:
        alone(patch, folder, "run", *TINY, "--out", folder / "out")
    return folder / "out"


def run_of(out):
    """Its result, and the loss of every epoch."""
    folder = out / "digits" / "confit" / "seed-0"
    rows = list(csv.DictReader((folder / "epochs.csv").open()))
    assert [(row["task"], row["epoch"]) for row in rows] == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    return RunResult.load(folder / "result.json"), [float(row["loss"]) for row in rows]


def assert_same(out, reference):
    (found, losses), (by_one, losses_by_one) = run_of(out), run_of(reference)
    assert found.config == by_one.config  # how many did it is no part of what was done
    assert found.tasks == by_one.tasks
    assert losses == pytest.approx(losses_by_one, rel=1e-4)
    for row, of_one in zip(found.accuracy_matrix, by_one.accuracy_matrix, strict=True):
        assert row == [None if a is None else pytest.approx(a, abs=ONE_IMAGE) for a in of_one]


def test_two_processes_do_what_one_does(tmp_path, by_one):
    done = torchrun(tmp_path, "-m", "confitune", "run", *TINY, "--out", "two")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same(tmp_path / "two", by_one)
    assert [run_of(out)[0].execution for out in (by_one, tmp_path / "two")] == [
        "fp32, eager",
        "fp32, eager, 2 processes",
    ]
    # Spoken once, and all is there that one process leaves.
    assert len(re.findall("confit: task 2 of 2", done.stdout)) == 1
    assert len(re.findall("Everything is in two", done.stdout)) == 1
    left = [{str(file.relative_to(out)) for file in out.rglob("*")} for out in (by_one, tmp_path / "two")]
    one, two = ({name for name in names if "events.out" not in name} for names in left)
    assert one == two
    assert len(left[0]) == len(left[1])  # one file of TensorBoard's


def test_a_killed_process_ends_all_and_one_goes_on(monkeypatch, tmp_path, by_one):
    step = 2 * (run_of(by_one)[0].tasks[0]["train_images"] // 33) + 11  # in the second task's second epoch
    arguments = ["run", *TINY, "--checkpoint-seconds", 0, "--out", "out"]
    done = torchrun(tmp_path, HERE / "one_rank_killed.py", step, tmp_path / "ranks", *arguments)
    assert done.returncode == 1
    assert "Signal 9 (SIGKILL)" in done.stderr
    assert list((tmp_path / "ranks/1").iterdir()) == []  # only the first one writes
    out = tmp_path / "ranks/0/out"
    assert not (out / "digits/confit/seed-0/result.json").exists()
    alone(monkeypatch, tmp_path, "run", *TINY, "--resume", "--out", out)
    assert_same(out, by_one)


# ---- without a second process ----------------------------------------------------------------------------------------


def test_without_torchrun_one_is_alone(monkeypatch):
    for name in ("LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with joined() as ranks:
        assert ranks == Ranks()
    monkeypatch.setenv("WORLD_SIZE", "4")  # of something else that starts processes
    with joined() as ranks:
        assert ranks == Ranks()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with joined() as ranks:
        assert not ranks.several


def test_the_first_to_fail_says_why(monkeypatch):
    """Whichever it is; the others end without a word."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    kept_by_torchrun = dist.HashStore()
    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda *given, **named: None)

    def fails(rank, error):
        monkeypatch.setattr("confitune.ranks.rendezvous", lambda url: iter([(kept_by_torchrun, rank, 2)]))
        with joined() as ranks:
            assert (ranks.rank, ranks.size, ranks.first) == (rank, 2, rank == 0)
            raise error

    with pytest.raises(ConfituneError, match="the disk is full") as first:
        fails(1, ConfituneError("the disk is full"))
    assert first.type is ConfituneError
    with pytest.raises(SaidElsewhereError):
        fails(0, LostProcessError("another process ended"))


def test_the_others_wait_until_the_first_has_the_data():
    store, log = dist.HashStore(), []

    def work(rank):
        with Ranks(rank, 2, store=store).first_goes_before("data"):
            log.append(rank)

    second = threading.Thread(target=work, args=(1,))
    second.start()
    second.join(0.2)
    assert log == []
    work(0)
    second.join()
    assert log == [0, 1]


def test_seeds_side_by_side_and_watching_need_one_process(tmp_path):
    recipe = make_recipe({"dataset": "digits", "seeds": 2})
    for options in ({"parallel_seeds": 2}, {"on": "ray"}):
        with (
            pytest.raises(ConfituneError, match="2 processes do one run at a time"),
            open_place(ranks=Ranks(0, 2), **options),
        ):
            pass
    with (
        open_place(ranks=Ranks(0, 2)) as place,
        pytest.raises(ConfituneError, match="measuring on the way needs one process, not 2"),
    ):
        run_recipe(recipe, tmp_path / "out", place=place, watch=lambda *given: ())


@pytest.mark.parametrize("rank", ["0", "1"])
def test_other_commands_are_refused_and_the_first_says_so(monkeypatch, capsys, rank):
    for name, value in {"LOCAL_RANK": rank, "RANK": rank, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["confitune", "tune", "ewc"])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert ("confitune tune cannot be shared by several processes: start it without torchrun" in said) is (rank == "0")
    with pytest.raises(ConfituneError if rank == "0" else SaidElsewhereError):
        refuse_several("this")
    monkeypatch.setenv("WORLD_SIZE", "1")
    refuse_several("this")


def test_the_page_s_example_runs_without_torchrun_too(monkeypatch, capsys):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    page = (HERE.parent / "docs" / "scaling.md").read_text(encoding="utf-8")
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "confitune.ranks" in code]
    small = code.replace('"tf_efficientnet_lite0"', '"test_efficientnet", "none"')
    exec(compile(small, "scaling.md", "exec"), {})
    assert 30 < float(capsys.readouterr().out) <= 100
