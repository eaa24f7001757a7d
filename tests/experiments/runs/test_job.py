"""Runs side by side in one process, and folders that another process works in."""

import io

import pytest
from PIL import Image
from rich.console import Console

from confitune.engine import SequenceRun
from confitune.errors import ConfituneError
from confitune.experiments.runs.identity import finished_runs
from confitune.experiments.runs.recipe import make_recipe
from confitune.experiments.runs.runner import Place, plan_recipe, run_recipe
from confitune.files import exclusive
from found import contents, folder_of, forget, run_of


class Killed(Exception):
    pass


def test_seeds_side_by_side_give_the_results_of_one_after_the_other(finished, values, tmp_path, started):
    recipe = make_recipe({**values, "methods": ["confit"], "seeds": 3})
    one_by_one = run_recipe(recipe, finished, resume=True)  # seeds 0 and 1 were run so before, seed 2 is now
    assert started == [("confit", 2)]
    started.clear()
    together = run_recipe(recipe, tmp_path / "together", place=Place(parallel_seeds=2))
    assert sorted(started) == [("confit", seed) for seed in range(3)]
    for seed, (mine, other) in enumerate(zip(together, one_by_one, strict=True)):
        saved = run_of(tmp_path / "together", "confit", seed)
        assert saved == mine
        assert saved.seed == other.seed == seed
        assert saved.accuracy_matrix == other.accuracy_matrix
        assert saved.final_sha256 == other.final_sha256
        assert saved.config == other.config
    assert len({result.final_sha256 for result in together}) == 3


def test_so_many_seeds_are_side_by_side_and_methods_never(values, tmp_path, monkeypatch):
    running, seen, run = set(), [], SequenceRun.run

    def spy(self):
        running.add((self.method.name, self.settings.seed))
        try:
            seen.append(sorted(running))
            return run(self)
        finally:
            running.discard((self.method.name, self.settings.seed))

    monkeypatch.setattr(SequenceRun, "run", spy)
    recipe = make_recipe({**values, "methods": ["linear-probe", "bn-only"], "tasks": 1, "seeds": 3})
    run_recipe(recipe, tmp_path, place=Place(parallel_seeds=2))
    expected = []
    for method in ("linear-probe", "bn-only"):
        expected += [[(method, 0)], [(method, 0), (method, 1)], [(method, 2)]]
    assert seen == expected


def test_resume_runs_only_the_seeds_that_are_left(finished, values, started):
    before = contents(folder_of(finished, "finetune", 0))
    expected = run_of(finished, "finetune", 1)
    forget(finished, "finetune", 1)
    (folder_of(finished, "finetune", 1) / "checkpoint.pt").unlink()
    recipe = make_recipe({**values, "methods": ["finetune"], "seeds": 3})
    results = run_recipe(recipe, finished, resume=True, place=Place(parallel_seeds=2))
    assert sorted(started) == [("finetune", 1), ("finetune", 2)]
    assert [result.seed for result in results] == [0, 1, 2]
    assert results[1].final_sha256 == expected.final_sha256
    assert contents(folder_of(finished, "finetune", 0)) == before


def test_an_error_in_one_seed_stops_those_beside_it(values, tmp_path, monkeypatch):
    run = SequenceRun.run

    def second_fails(self):
        if self.settings.seed == 1:
            raise Killed
        return run(self)

    monkeypatch.setattr(SequenceRun, "run", second_fails)
    with pytest.raises(Killed):
        run_recipe(
            make_recipe({**values, "methods": ["finetune"], "seeds": 3}), tmp_path, place=Place(parallel_seeds=3)
        )
    assert finished_runs(tmp_path) == {}


def test_a_folder_that_another_process_works_in_is_refused(values, tmp_path):
    out = tmp_path / "out"
    recipe = make_recipe({**values, "methods": ["linear-probe"], "tasks": 1})
    folder = plan_recipe(recipe, out, Place())[0].folder
    with (
        exclusive(folder / ".lock", lambda: pytest.fail("it is free")),
        pytest.raises(ConfituneError, match="another process is working in"),
    ):
        run_recipe(recipe, out)
    (result,) = run_recipe(recipe, out)  # a lock file that nobody holds blocks nobody
    assert result.method == "linear-probe"


def test_what_a_killed_process_left_half_written_is_gone_after_a_resume(values, tmp_path):
    recipe = make_recipe({**values, "methods": ["linear-probe"], "tasks": 1})
    folder = plan_recipe(recipe, tmp_path, Place())[0].folder
    folder.mkdir(parents=True)
    (folder / f"checkpoint.{'0' * 32}.partial").write_bytes(b"half")
    run_recipe(recipe, tmp_path, resume=True)
    assert list(folder.glob("*.partial")) == []


def test_photos_that_were_replaced_since_finished_runs_are_pointed_out(values, tmp_path):
    for label, colour in (("red", (200, 20, 20)), ("green", (20, 200, 20))):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for n in range(10):
            Image.new("RGB", (40, 40), (colour[0], colour[1], n)).save(tmp_path / "photos" / label / f"{n}.png")
    photos = {"dataset": f"folder:{tmp_path / 'photos'}", "methods": ["linear-probe"], "batch_size": 4, "tasks": None}

    def said(seeds):
        console = Console(file=io.StringIO(), force_terminal=False, width=300)
        recipe = make_recipe({**values, **photos, "seeds": seeds, "cache_dir": tmp_path / "cache"})
        run_recipe(recipe, tmp_path / "out", place=Place(console), resume=True)
        return console.file.getvalue()

    told = "are not those of the finished runs"
    assert told not in said(1)
    assert told not in said(2)
    Image.new("RGB", (40, 40), (0, 0, 255)).save(tmp_path / "photos/red/3.png")
    assert told in said(3)
