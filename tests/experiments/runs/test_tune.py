"""The hyperparameter search: what is tried, what is held out, who wins, what goes on and what is refused."""

import io
import math
import shutil

import numpy as np
import pytest
import yaml
from rich.console import Console

from confitune.engine import SequenceRun, read_results
from confitune.errors import ConfituneError
from confitune.experiments.runs.identity import filled, finished_runs
from confitune.experiments.runs.job import TrainingError, load_backbone
from confitune.experiments.runs.recipe import make_recipe, read_recipe
from confitune.experiments.runs.runner import Place, plan_recipe, run_recipe
from confitune.experiments.runs.tune import edge_note, plan_search, run_search, winner
from confitune.nn import create_backbone
from confitune.tasks import load_tasks
from found import made_up

ROUNDED = (75.7, 80.1, 91.2, 70.3, 66.6)  # their mean depends on their order, in its last bits


def outcome(acc, forgotten, seed=0):
    """A run with this average accuracy and forgetting."""
    final = acc - forgotten / 2  # of the first task; the last one makes up for it
    matrix = np.array([[final + forgotten, final], [math.nan, 2 * acc - final]])
    return made_up("ewc", seed, matrix)


def point(*measured):
    return [outcome(acc, fgt, seed) for seed, (acc, fgt) in enumerate(measured)]


def mean(runs):
    return float(np.mean([run.acc for run in runs]))


class Told(Place):
    """Runs that are told what to give: by (value of the option, whether images are held out) -> results or an error.

    `asked` says which runs were asked for together, `begun` of which values, in order.
    """

    def __init__(self, console=None, parallel_seeds=1):
        super().__init__(console, parallel_seeds)
        self.give, self.asked, self.begun = {}, [], []

    def results(self, jobs):
        self.asked.append([(*self._point(job), job.seed) for job in jobs])
        for job in jobs:
            point = self._point(job)
            if point not in self.begun:
                self.begun.append(point)
            self.say(job.label)
            given = self.give[point]
            job.out.mkdir(parents=True, exist_ok=True)
            if isinstance(given, TrainingError):
                yield job, given
            elif isinstance(given, Exception):
                raise given
            else:
                yield job, given[job.seed]

    def _point(self, job):
        (options,) = job.recipe.options.values()
        return options["strength"], job.recipe.held_out is not None


@pytest.fixture
def told():
    return Told()


def planned(values, grid=("1", "10", "100"), **more):
    return plan_search("ewc", {**values, **more}, grid=grid)


# ---- what is tried ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "place", "grid"),
    [
        ("ewc", "ewc.strength", (300, 1000, 3000, 10000, 30000, 100000, 300000)),
        ("si", "si.strength", (1, 2, 5, 10, 20, 50)),
        ("rwalk", "rwalk.strength", (5, 10, 20, 50, 100, 200)),
        ("mas", "mas.strength", (1, 3, 10, 30, 100, 300)),
        ("mas-cpr", "cpr.beta", (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)),
        ("mas-afec", "afec.strength", (0.001, 0.01, 0.1, 1, 10, 100, 1000, 10000)),
        ("mas+cpr", "cpr.beta", (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)),
        ("ewc+confit", "ewc.strength", (300, 1000, 3000, 10000, 30000, 100000, 300000)),
    ],
)
def test_the_papers_option_and_grid_are_the_default(method, place, grid):
    search = plan_search(method, {"dataset": "flowers102"})
    assert (search.recipe.methods, search.option, search.grid, search.held_out) == ((method,), place, grid, 0.1)


def test_the_other_parts_keep_what_the_paper_chose_or_the_recipe_says():
    for given, strength in (({}, 30), ({"options": {"mas": {"strength": 7}}}, 7)):
        search = plan_search("mas-cpr", {"dataset": "flowers102", **given})
        for value in search.grid:
            mas, cpr = search.validation(value).method("mas-cpr").hooks
            assert (mas.options.strength, cpr.options.beta) == (strength, value)


def test_every_value_is_trained_as_the_methods_strengths_ask_for():
    search = plan_search("ewc", {"dataset": "flowers102"}, grid=["1e4", "3e4", "1e5", "3e5"])
    assert search.grid == (1e4, 3e4, 1e5, 3e5)
    for value in search.grid:
        for recipe in (search.validation(value), search.retraining(value)):
            assert recipe.train_settings(0, "ewc").clip_norm == 100
            assert recipe.method("ewc").options.mode == "train"


def test_another_option_takes_its_own_grid():
    search = plan_search("mas-cpr", {"dataset": "flowers102"}, "mas.strength")
    assert search.grid == (1, 3, 10, 30, 100, 300)
    mas, cpr = search.retraining(3).method("mas-cpr").hooks
    assert (mas.options.strength, cpr.options.beta) == (3, 0.1)  # the paper's beta for flowers102


def test_values_are_read_as_the_option_takes_them():
    assert plan_search("ewc", {}, grid=["1e4", "300", "300.0", "0"]).grid == (0.0, 300.0, 10000.0)  # once each, rising
    assert plan_search("ewc", {}, "ewc.mode", ["train", "eval"]).grid == ("train", "eval")
    assert plan_search("si", {}, "si.positive", ["true", "no"]).grid == (False, True)
    assert plan_search("ccll", {}, "ccll.start", ["random", "identity"]).grid == ("random", "identity")
    assert plan_search("ccll", {}, "ccll.start", ["random", "identity"]).retraining("identity").options == {
        "ccll": {"start": "identity"}
    }


@pytest.mark.parametrize(
    ("method", "option", "grid", "message"),
    [
        ("confit", None, (), "confit has no options to search: `confitune run --method confit`"),
        ("finetune", "lr", ("1", "2"), "finetune has no options to search"),
        ("ewcc", None, (), "no method 'ewcc': did you mean 'ewc'?"),
        ("cpr", None, (), "the paper searched no option of cpr; choose one with --option: cpr.beta"),
        ("ccll", None, (), "choose one with --option: ccll.start, ccll.group, ccll.frozen"),
        ("ewc", "ewc.lambda", (), "ewc has no option 'ewc.lambda'; there are ewc.strength, ewc.mode"),
        ("ewc", "strength", (), "ewc has no option 'strength'"),
        ("ewc", "mas.strength", (), "ewc has no option 'mas.strength'"),
        ("ewc", "ewc.mode", (), "the paper has no grid for ewc.mode: give its values with --grid"),
        ("ewc", None, ("300",), "two or more values to choose from, got 300: add --grid"),
        ("ewc", None, ("300", "300.0"), "two or more values"),
        ("ewc", None, ("300", "-1"), "options of ewc: strength: Input should be greater than or equal to 0"),
        ("ewc", None, ("300", "many"), "options of ewc: strength: Input should be a valid number"),
        ("ewc", "ewc.mode", ("train", "trian"), "options of ewc: mode: Input should be"),
    ],
)
def test_what_cannot_be_searched_is_explained(method, option, grid, message):
    with pytest.raises(ConfituneError) as caught:
        plan_search(method, {}, option, grid)
    assert message in str(caught.value)


# ---- what is held out ------------------------------------------------------------------------------------------------


def rows(recipe):
    backbone = load_backbone(recipe)
    sequence = recipe.load_tasks(backbone.mean, backbone.std)
    return [(task.train.rows.tolist(), task.test.rows.tolist()) for task in sequence]


def test_a_tenth_of_every_class_is_held_out_and_the_test_images_are_left_alone(values):
    recipe = planned(values).validation(10.0)
    backbone = create_backbone(recipe.model, recipe.weights)
    whole = load_tasks("digits", mean=backbone.mean, std=backbone.std, tasks=2)
    split = recipe.load_tasks(backbone.mean, backbone.std)
    for before, after in zip(whole, split, strict=True):
        kept, held = set(after.train.rows.tolist()), set(after.test.rows.tolist())
        assert not kept & held
        assert kept | held == set(before.train.rows.tolist())
        assert not held & set(before.test.rows.tolist())
        for label in (0, 1):
            count = int((before.train.labels == label).sum())
            assert int((after.test.labels == label).sum()) == math.floor(count / 10 + 0.5)


def test_the_split_is_the_same_for_every_value_and_method_and_another_with_another_order(values):
    first = rows(planned(values).validation(1.0))
    assert rows(planned(values).validation(100.0)) == first
    assert rows(plan_search("mas", {**values, "seeds": 3}).validation(1.0)) == first
    assert rows(planned(values).retraining(1.0)) != first
    other = planned(values, order_seed=1).validation(1.0)
    backbone = load_backbone(other)
    tasks = load_tasks("digits", mean=backbone.mean, std=backbone.std, tasks=2, order_seed=1)
    same, drawn = ([task.test.rows.tolist() for task in tasks.validating(0.1, seed)] for seed in (0, 1))
    assert [test for _, test in rows(other)] == drawn != same


def test_a_recipe_may_hold_out_another_share(values):
    search = planned(values, held_out=0.3)
    assert search.validation(1.0).held_out == 0.3
    assert search.retraining(1.0).held_out is None


def test_a_validation_is_another_run_than_a_full_one(values):
    search = planned(values)
    full = search.retraining(10.0).identity("ewc", 0, "abc")
    validated = search.validation(10.0).identity("ewc", 0, "abc")
    assert validated == {**full, "held_out": 0.1}


# ---- who wins --------------------------------------------------------------------------------------------------------


def test_the_highest_mean_accuracy_wins():
    points = {1.0: point((80, 1), (82, 1)), 10.0: point((70, 0), (95, 0)), 100.0: point((82, 0), (82, 0))}
    assert winner(points) == 10.0  # 81, 82.5, 82
    del points[10.0]
    assert winner(points) == 100.0


def test_of_equal_ones_the_one_that_forgets_less_then_the_first():
    assert winner({1.0: point((80, 3)), 10.0: point((80, 2)), 100.0: point((80, 2))}) == 10.0
    assert winner({"exact": point((80, 2)), "batch": point((80, 2))}) == "exact"  # the first of words
    better, same = point(*((a, 1) for a in ROUNDED)), point(*((a, 1) for a in ROUNDED[::-1]))
    assert 0 < mean(better) - mean(same) < 1e-12  # the same accuracies in another order
    assert winner({1.0: same, 10.0: better}) == 1.0


def test_a_winner_at_the_edge_is_pointed_out(values):
    search = planned(values)
    for best, said in ((1.0, "the smallest value tried"), (100.0, "the largest value tried"), (10.0, "")):
        note = edge_note(search, {value: point((90 if value == best else 80, 1)) for value in search.grid})
        assert said in note
        assert bool(note) == bool(said)


# ---- a search with runs that are told what to give -------------------------------------------------------------------


def give(told, accs, retrained=70.0):
    for value, acc in accs.items():
        failed = isinstance(acc, Exception)
        told.give[value, True] = acc if failed else [outcome(acc + d, 2.0, s) for s, d in enumerate((-1, 1))]
        told.give[value, False] = [outcome(retrained + d, 3.0, s) for s, d in enumerate((-1, 1))]


def test_every_value_is_run_and_the_winner_again_on_everything(told, values, tmp_path):
    give(told, {1.0: 80, 10.0: 90, 100.0: 85})
    points, retrained = run_search(planned(values, seeds=2), tmp_path, place=told)
    assert told.asked == [  # the whole grid at once
        [(v, True, seed) for v in (1.0, 10.0, 100.0) for seed in (0, 1)],
        [(10.0, False, seed) for seed in (0, 1)],
    ]
    assert {value: mean(runs) for value, runs in points.items()} == {1.0: 80, 10.0: 90, 100.0: 85}
    assert mean(retrained) == 70


def test_without_retraining_nothing_is_tested(told, values, tmp_path):
    give(told, {1.0: 80, 10.0: 90, 100.0: 85})
    _, retrained = run_search(planned(values), tmp_path, place=told, retrain=False)
    assert retrained == []
    assert {held_out for _, held_out in told.begun} == {True}
    assert read_recipe(tmp_path / "winner.yaml")["options"] == {"ewc": {"strength": 10.0}}


def test_a_search_that_is_broken_off_has_no_winner_yet(told, values, tmp_path):
    give(told, {1.0: 80, 10.0: 90})
    told.give[100.0, True] = ValueError("killed")
    with pytest.raises(ValueError, match="killed"):
        run_search(planned(values), tmp_path, place=told)
    assert not (tmp_path / "winner.yaml").exists()


def test_a_failed_value_is_said_and_the_search_goes_on(told, values, tmp_path):
    give(told, {1.0: 80, 10.0: TrainingError("the loss [of] task1 became nan"), 100.0: 85})
    told.console = Console(file=io.StringIO(), width=160)
    points, retrained = run_search(planned(values, seeds=2), tmp_path, place=told)
    assert {value: mean(runs) for value, runs in points.items()} == {1.0: 80, 100.0: 85}
    assert mean(retrained) == 70
    said = "digits ewc seed 0 (ewc.strength=10, 2 of 3) failed: the loss [of] task1 became nan\n"
    assert said in told.console.file.getvalue()


def test_where_all_fail_that_is_said(told, values, tmp_path):
    give(told, dict.fromkeys((1.0, 10.0, 100.0), TrainingError("the loss became nan")))
    with pytest.raises(ConfituneError, match=r"no value of ewc.strength could be trained; .* the loss became nan"):
        run_search(planned(values), tmp_path, place=told)
    assert [value for value, _ in told.begun] == [1.0, 10.0, 100.0]


def test_an_error_before_training_is_no_failure_of_the_value(told, values, tmp_path):
    give(told, {1.0: ConfituneError("no weights file"), 10.0: 80, 100.0: 80})
    with pytest.raises(ConfituneError, match="no weights file"):
        run_search(planned(values), tmp_path, place=told)
    assert len(told.begun) == 1


def test_progress_says_which_of_how_many(told, values, tmp_path):
    give(told, {1.0: 80, 10.0: 79, 100.0: 79})
    told.console = Console(file=io.StringIO(), width=150)
    run_search(planned(values), tmp_path, place=told)
    assert told.console.file.getvalue().splitlines() == [
        "digits ewc (ewc.strength=1, 1 of 3)",
        "digits ewc (ewc.strength=10, 2 of 3)",
        "digits ewc (ewc.strength=100, 3 of 3)",
        "retraining ewc with ewc.strength=1 on all training images",
        "digits ewc",
    ]


# ---- real runs -------------------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch):
    """(strength, seed, held out) of every run that is started."""
    runs, run = [], SequenceRun.run

    def spy(self):
        runs.append((self.method.options.strength, self.settings.seed, self.state.config.get("held_out")))
        return run(self)

    monkeypatch.setattr(SequenceRun, "run", spy)
    return runs


DIVERGING = {"seeds": 2, "clip_norm": None, "pull_limit": None}  # at the largest strength


@pytest.fixture(scope="session")
def searched_once(values, tmp_path_factory):
    """A finished search over three values, the last of which cannot be trained, with its retraining."""
    out = tmp_path_factory.mktemp("searched") / "out"
    points, retrained = run_search(planned(values, grid=("1", "1000", "1e30"), **DIVERGING), out)
    return out, points, retrained


@pytest.fixture
def done(searched_once, tmp_path):
    """A copy of it."""
    return shutil.copytree(searched_once[0], tmp_path / "done")


def again(values, out, grid=("1", "1000", "1e30"), **more):
    return run_search(planned(values, grid=grid, **{**DIVERGING, **more}), out, resume=True)


def test_a_real_search_measures_on_the_held_out_images(searched_once, values):
    out, points, retrained = searched_once
    assert list(points) == [1.0, 1000.0]  # what failed is left out
    for value, runs in points.items():
        assert [(r.seed, r.config.get("held_out"), filled(r.config)["options"]["ewc"]["strength"]) for r in runs] == [
            (seed, 0.1, value) for seed in (0, 1)
        ]
    full, held = retrained[0].tasks, points[1.0][0].tasks
    for whole, part in zip(full, held, strict=True):
        assert part["train_images"] + part["test_images"] == whole["train_images"]
        assert part["test_images"] == pytest.approx(whole["train_images"] / 10, abs=1)
    best = winner(points)
    assert [(r.config.get("held_out"), filled(r.config)["options"]["ewc"]["strength"]) for r in retrained] == [
        (None, best)
    ] * 2
    held_out, full = (out / "table.md").read_text().split("\n**")
    assert "tested on 10% of the training images" in held_out
    assert "| ewc (ewc.strength=1) |" in held_out
    assert f"| ewc (ewc.strength={best:g}) |" in full


def test_the_winners_recipe_runs_and_gives_the_same_network(searched_once, values, tmp_path):
    out, points, retrained = searched_once
    best = winner(points)
    given = read_recipe(out / "winner.yaml")
    assert given == {**values, **DIVERGING, "methods": ["ewc"], "options": {"ewc": {"strength": best}}}
    assert (out / "winner.yaml").read_text().startswith(f"# ewc.strength={best:g}: the best of 1, 1000, 1e+30\n")
    (result,) = run_recipe(make_recipe({**given, "seeds": 1}), tmp_path / "run")
    assert result.final_sha256 == retrained[0].final_sha256
    assert (result.acc, result.config) == (retrained[0].acc, retrained[0].config)


def test_a_finished_search_is_read_again_and_only_what_failed_is_tried(searched_once, values, done, started):
    points, retrained = again(values, done)
    assert {strength for strength, _, _ in started} == {1e30}  # it fails again
    assert points == searched_once[1]
    assert retrained == searched_once[2]


def test_resume_does_only_what_is_missing(searched_once, values, done, started):
    missing = {searched_once[1][1.0][1].final_sha256, *(r.final_sha256 for r in searched_once[2])}
    kept = [r for r in read_results(done / "runs.jsonl") if r.final_sha256 not in missing]
    (done / "runs.jsonl").write_bytes(b"".join(r.line() for r in kept))
    shutil.rmtree(done / "runs")
    points, retrained = again(values, done)
    best = winner(points)
    assert [run for run in started if run[0] != 1e30] == [(1.0, 1, 0.1), (best, 0, None), (best, 1, None)]
    for value, runs in points.items():
        assert [r.final_sha256 for r in runs] == [r.final_sha256 for r in searched_once[1][value]]
    assert [r.final_sha256 for r in retrained] == [r.final_sha256 for r in searched_once[2]]


def test_one_more_value_is_run_alone(values, done, started):
    again(values, done, grid=("1", "1000", "30", "1e30"))
    assert [run for run in started if run[2] and run[0] != 1e30] == [(30.0, 0, 0.1), (30.0, 1, 0.1)]


def test_what_is_there_is_refused_without_resume(values, done, started):
    with pytest.raises(
        ConfituneError, match=r"holds a finished run of digits ewc seed 0 \(ewc.strength=1000, 2 of 2\): add --resume"
    ):
        run_search(planned(values, grid=("7", "1000"), **DIVERGING), done)  # said before 7 is trained
    assert started == []


@pytest.mark.parametrize("other", [{"lr": 0.5}, {"order_seed": 1}, {"held_out": 0.2}])
def test_other_settings_are_other_runs(values, done, other):
    search = planned(values, grid=("1", "1000"), **{**DIVERGING, **other})
    plans = [plan_recipe(search.validation(value), done, Place(), resume=True) for value in search.grid]
    assert [[job.seed for job in jobs] for jobs in plans] == [[0, 1], [0, 1]]
    assert not {job.key for jobs in plans for job in jobs} & finished_runs(done).keys()


def test_runs_of_other_settings_are_added(values, done, started):
    before = finished_runs(done)
    again(values, done, lr=0.5)
    assert {(strength, seed) for strength, seed, held_out in started if held_out and strength != 1e30} == {
        (1.0, 0),
        (1.0, 1),
        (1000.0, 0),
        (1000.0, 1),
    }
    assert before.items() <= finished_runs(done).items()


def test_a_full_run_is_never_taken_for_a_validation_nor_the_other_way_round(searched_once, values, done, started):
    best = winner(searched_once[1])
    full = planned(values, **DIVERGING).retraining(best)
    assert tuple(run_recipe(full, done, resume=True)) == tuple(searched_once[2])
    assert started == []
    kept = [r for r in read_results(done / "runs.jsonl") if r.config.get("held_out")]
    (done / "runs.jsonl").write_bytes(b"".join(r.line() for r in kept))
    shutil.rmtree(done / "runs")
    run_recipe(full, done, resume=True)
    assert started == [(best, 0, None), (best, 1, None)]


def test_the_retraining_of_another_winner_goes_beside(told, values, tmp_path):
    give(told, {1.0: 80, 10.0: 90, 100.0: 85, 1000.0: 95})
    run_search(planned(values), tmp_path, place=told)
    run_search(planned(values, grid=("1", "10", "100", "1000")), tmp_path, place=told, resume=True)
    assert [value for value, held_out in told.begun if not held_out] == [10.0, 1000.0]
    assert yaml.safe_load((tmp_path / "winner.yaml").read_text())["options"] == {"ewc": {"strength": 1000.0}}
