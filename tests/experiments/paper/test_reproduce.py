"""Tables and figures of the paper: which runs they need, what stands beside the paper's, what is not done twice."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from confitune.engine import RunResult, summary_of
from confitune.errors import ConfituneError
from confitune.experiments.paper import reproduce as session_module
from confitune.experiments.paper import tables
from confitune.experiments.paper.numbers import reported
from confitune.experiments.paper.outcome import Claim, Outcome, cells_of, verdict
from confitune.experiments.paper.plan import TABLE1, Part, Scope, read_scope
from confitune.experiments.paper.reproduce import WHATS, parts_of, reproduce
from confitune.experiments.runs.identity import filled, finished_runs

ELEVEN = {
    *("finetune", "ewc", "si", "rwalk", "mas", "mas-cpr", "mas-afec", "confit", "ccll", "linear-probe", "single-task"),
}


@pytest.mark.parametrize(
    ("measured", "paper", "interval", "said"),
    [
        (86.9, 86.99, 0.25, "inside"),
        (87.24, 86.99, 0.25, "inside"),
        (87.25, 86.99, 0.25, "higher"),
        (86.73, 86.99, 0.25, "lower"),
        (64.5, 64.13, None, "inside"),  # a single run of the paper's: half a point
        (64.7, 64.13, None, "higher"),
        (50.0, None, None, "not reported"),
    ],
)
def test_the_verdict_is_where_the_mean_lies(measured, paper, interval, said):
    assert verdict(measured, paper, interval) == said


def result(method, seed, matrix, as_learned=None, **config):
    """Of two tasks; `matrix` is what task 1 was when learned and at the end, and task 2 at the end."""
    (learned, end), last = matrix
    rows = [[learned, end], [None, last]]
    summary = summary_of(np.array(rows, dtype=float))
    return RunResult.model_construct(method=method, seed=seed, **summary, as_learned=as_learned, config=config)


def test_cells_stand_beside_the_papers():
    confit = [result("confit", 0, ((84.0, 82.0), 90.0)), result("confit", 1, ((87.0, 86.0), 90.0))]
    acc, fgt = cells_of("flowers102", "confit", confit, reported("table1")["confit"]["flowers102"])
    (joint,) = cells_of("flowers102", "joint", [result("joint", 0, ((None, 88.0), 92.0))], {})
    assert (acc.method, acc.metric, acc.measured, acc.seeds, acc.paper, acc.paper_interval) == (
        *("confit", "ACC", 87.0, 2, 86.99, 0.25),
    )
    assert acc.interval is None  # Student's t of two values would be 12.7
    assert (fgt.metric, fgt.measured, fgt.paper) == ("FGT", 1.5, 1.79)
    assert (joint.method, joint.metric, joint.interval, joint.verdict) == ("joint", "ACC", None, "not reported")
    lines = Outcome(what="x", title="X", cells=[acc, joint]).markdown().splitlines()
    assert lines[4] == "| flowers102 | confit | ACC | 87.00 | 2 | 86.99 ± 0.25 | +0.01 | inside | - |"
    assert lines[5] == "| flowers102 | joint | ACC | 90.00 | 1 | - | - | not reported | - |"


def test_a_task_just_learned_is_measured_as_the_published_code_does_with_ours_beside_it():
    runs = [result("confit", 0, ((84.0, 82.0), 90.0), as_learned=[85.0, 88.0])]
    acc, fgt = cells_of("flowers102", "confit", runs, reported("table1")["confit"]["flowers102"])
    assert (acc.measured, acc.recovered) == (85.0, 86.0)  # 82 and 88, 82 and 90
    assert (fgt.measured, fgt.recovered) == (3.0, 2.0)
    assert fgt.row()[3:] == ["3.00", "1", "1.79 ± 0.49", "+1.21", "higher", "2.00"]


def written(write, scope, runs):
    """What a table makes of these runs by method, on the one dataset."""
    (dataset,), outcome = scope.datasets, Outcome("x", "X")
    write(outcome, scope, {dataset: [Part(scope.recipe(dataset, method), found) for method, found in runs.items()]})
    return outcome


def test_runs_that_did_not_test_tasks_as_learned_are_named(tmp_path):
    runs = {
        "finetune": [result("finetune", 0, ((84.0, 70.0), 80.0), means=None)],
        "confit": [result("confit", 0, ((84.0, 82.0), 90.0), means="phase")],
        "finetune-xconv": [result("finetune-xconv", 0, ((84.0, 80.0), 90.0), [84.0, 90.0], means="phase")],
    }
    boxes, older = written(tables.table2, Scope(tmp_path, ("cub200",), given={"pipeline": "clean"}), runs).notes
    assert boxes.startswith("cub200: measured with the clean pipeline, whole images and not their bounding boxes")
    assert older.startswith("cub200: runs of confit did not test tasks before their means are recovered.")
    outcome = written(tables.table2, Scope(tmp_path), runs)
    assert [note.partition(":")[0] for note in outcome.notes] == ["flowers102"]  # the clean pipeline is not noted


def test_the_order_of_methods_is_compared_and_not_claimed(tmp_path):
    def claims(**acc):
        runs = {m.replace("_", "-"): [result(m, 0, ((a, a), a), means=None)] for m, a in acc.items()}
        order, _ = written(tables.table1, Scope(tmp_path), runs).claims
        return order.text, order.measured, order.holds

    text = "flowers102: the order of the methods"  # the paper: finetune 78.06, ewc 79.94, mas 80.90, confit 86.99
    assert claims(finetune=70.0, ewc=71.0, mas=72.0, confit=90.0) == (text, "the paper's", True)
    turned = "the other way round: finetune above ewc, mas above confit"
    assert claims(finetune=71.0, ewc=70.0, mas=92.0, confit=90.0) == (text, turned, False)
    assert claims(finetune=71.0) == (text, "-", None)


def test_claims_are_told_apart():
    claims = [Claim(text=t, measured="1", holds=h) for t, h in (("a", True), ("b", False), ("c", None))]
    page = Outcome(what="x", title="X", claims=claims).markdown()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")]
    assert [row[2].strip() for row in rows] == ["verdict", "holds", "does not hold", "not measured"]


def test_table1_has_the_papers_eleven_rows(tmp_path):
    parts = parts_of("table1", Scope(tmp_path, ("flowers102", "cifar100")))
    assert set(TABLE1) == ELEVEN
    assert {(part.recipe.dataset, part.method) for part in parts} == {
        (d, m) for d in ("flowers102", "cifar100") for m in ELEVEN
    }
    for part in parts:
        recipe = part.recipe
        assert (recipe.model, recipe.means, recipe.statistics) == ("resnet18.tv_in1k", "phase", "running")
        assert recipe.pipeline == "published"
        assert recipe.seeds == (1 if part.method == "ccll" else 5)


def test_experiments_share_runs(tmp_path):
    scope = Scope(tmp_path, ("flowers102",))
    whats = ("table1", "table2", "shift", "curves")
    of = {what: [part.recipe for part in parts_of(what, scope)] for what in whats}
    assert of["shift"] == of["table2"]
    assert of["curves"] == of["table1"]
    assert {recipe.methods[0] for recipe in of["table1"] if recipe in of["table2"]} == {"finetune", "confit"}


def test_forms_of_confit_and_deeper_networks_are_runs_of_their_own(tmp_path):
    confit = [part.recipe for part in parts_of("controls", Scope(tmp_path)) if part.method == "confit"]
    forms = {(recipe.means, recipe.statistics) for recipe in confit}
    assert forms == {("phase", "running"), ("phase", "pass"), ("window", "running"), ("window", "pass")}
    deeper = parts_of("deeper", Scope(tmp_path))
    assert {(p.recipe.model, p.method, p.recipe.epochs) for p in deeper} == {
        (model, method, 50) for model in ("resnet34.bt_in1k", "resnet50.ram_in1k") for method in ("finetune", "confit")
    }


def test_deeper_networks_start_from_their_own_weights(tmp_path):
    for what, networks in (
        ("deeper", ("resnet34.bt_in1k", "resnet50.ram_in1k")),
        ("deeper-lite", ("tf_efficientnet_lite0", "tf_efficientnet_lite1", "tf_efficientnet_lite2")),
    ):
        parts = parts_of(what, Scope(tmp_path, given={"weights": "resnet18.safetensors"}))
        asked = [(n, m) for n in networks for m in ("finetune", "confit")]
        assert [(part.recipe.model, part.method) for part in parts] == asked
        assert {(part.recipe.weights, part.recipe.epochs) for part in parts} == {(None, 50)}


def test_a_search_ends_with_what_the_winner_gives_on_all_training_images(tiny):
    scope = Scope(tiny.out, tiny.datasets, ("ewc",), quick=True, given={**tiny.given, "epochs": 1})
    (outcome,) = reproduce(["search"], scope)
    found = outcome.data["digits/ewc"]
    folder = tiny.out / "search/digits/ewc"
    assert found["tried"] == ["300", "1000"]
    runs = finished_runs(folder).values()
    (retrained,) = (run for run in runs if "held_out" not in run.config)
    assert filled(retrained.config)["options"]["ewc"]["strength"] == found["chosen"]
    assert (found["acc"], found["fgt"]) == (retrained.acc, retrained.fgt)
    held_out = {
        f"{filled(run.config)['options']['ewc']['strength']:g}": run.acc for run in runs if "held_out" in run.config
    }
    assert found["held_out_acc"] == held_out
    row = f"| {found['chosen']:g} | - | {max(held_out.values()):.2f} | {retrained.acc:.2f} | {retrained.fgt:.2f} |"
    assert outcome.tables["What was chosen"].endswith(row)


def test_methods_can_be_left_out(tmp_path):
    scope = Scope(tmp_path, methods=("confit", "ewc"))
    assert [part.method for part in parts_of("table1", scope)] == ["ewc", "confit"]
    with pytest.raises(ConfituneError, match="none of the methods asked for is part of table2"):
        parts_of("table2", Scope(tmp_path, methods=("ewc",)))


def test_moments_are_looked_at_where_the_ablation_is(tmp_path):
    for what in ("shift", "transductive"):
        parts = {part.method: part.form for part in parts_of(what, Scope(tmp_path))}
        assert set(parts) == {"finetune", "hierarchical", "finetune-xconv", "confit"}
        assert (parts["finetune"], parts["confit"]) == ("", "phase means, running statistics")
    window = Scope(tmp_path, methods=("confit",), given={"means": "window", "statistics": "pass"})
    (part,) = parts_of("shift", window)
    assert part.form == "window means, pass statistics"


def test_storage_stands_beside_what_the_paper_says_of_a_task(tmp_path):
    scope = Scope(tmp_path, methods=("confit", "ccll"), given={"tasks": 2})
    (outcome,) = reproduce(["storage"], scope)
    assert [(claim.measured, claim.holds) for claim in outcome.claims] == [("19,148", True), ("86,400", False)]
    (table,) = outcome.tables.values()
    assert "| confit | 19,148 | 0 | 38,296 |" in table
    assert "| ccll | 86,400 | 19,200 | 192,000 |" in table  # with the pre-trained batch norms, once
    assert (tmp_path / "storage-flowers102.png").exists()


def test_a_file_names_what_to_do_and_options_win(tmp_path):
    path = tmp_path / "some.yaml"
    path.write_text("what: [table1, curves]\ndatasets: [cifar100, flowers102]\nseeds: 3\nmodel: resnet34\n")
    scope, whats = read_scope([str(path), "theory"], tmp_path, datasets=["photos,digits"], changes=["lr=0.3"])
    assert whats == ["table1", "curves", "theory"]
    assert (scope.datasets, scope.methods) == (("photos", "digits"), None)
    assert scope.given == {"seeds": 3, "model": "resnet34", "lr": 0.3}


def test_a_file_can_train_some_rows_otherwise(tmp_path):
    path = tmp_path / "some.yaml"
    rows = "rows: {mas-afec: {validation: 0.1, options: {mas: {strength: 60}, afec: {form: alternating}}}}"
    path.write_text(f"what: table1\nmethods: [mas, mas-afec]\n{rows}\n")
    scope, _ = read_scope([str(path)], tmp_path)
    mas, afec = parts_of("table1", scope)
    assert (mas.recipe.validation, afec.recipe.validation) == (0.0, 0.1)
    assert mas.recipe.method("mas").options.strength == 30
    with_mas, with_afec = afec.recipe.method("mas-afec").hooks
    assert (with_mas.options.strength, with_mas.options.mode) == (60, "train")
    assert (with_afec.options.strength, with_afec.options.form, with_afec.options.mode) == (10, "alternating", "train")


def test_every_recipe_of_an_experiment_is_sound(tmp_path):
    named = set()
    for path in sorted((Path(__file__).parents[3] / "src/confitune/recipes").glob("*.yaml")):
        if "what" in yaml.safe_load(path.read_text()):
            scope, whats = read_scope([str(path)], tmp_path)
            named |= set(whats)
            for what in whats:
                assert what in WHATS
                parts_of(what, scope)
    assert named == set(WHATS)


def test_one_run_of_each_method_does_not_judge_the_paper(tmp_path, monkeypatch):
    """Whatever it measured: with several seeds the same numbers are judged."""
    runs = {m: result(m, 0, ((a, a), a), means=None) for m, a in (("finetune", 90.0), ("confit", 80.0), ("mas", 85.0))}
    monkeypatch.setattr(session_module, "_run_missing", lambda parts, scope: [])
    monkeypatch.setattr(Part, "found", lambda part, results: Part(part.recipe, [runs[part.method]]))
    verdicts = {}
    for seeds in (1, 2):
        scope = Scope(tmp_path, methods=tuple(runs), given={"seeds": seeds})
        (outcome,) = reproduce(["table1"], scope)
        verdicts[seeds] = outcome.claims[0].holds
        assert ("Note: one run of each method is too little" in (tmp_path / "table1.md").read_text()) == (seeds == 1)
    assert verdicts == {1: None, 2: False}


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(ConfituneError, match="nothing to reproduce called table3: there are datasets, "):
        reproduce(["table3"], Scope(tmp_path))


@pytest.fixture
def tiny(values, tmp_path):
    """The smallest reproduction: two tasks of two digits, one epoch, one seed."""
    given = {key: values[key] for key in ("tasks", "batch_size", "model", "weights", "device")}
    return Scope(tmp_path / "out", ("digits",), quick=True, given=given)


def test_tables_and_figures_are_made_and_runs_not_repeated(tiny, monkeypatch):
    ran = []
    real = session_module.plan_recipe

    def counted(recipe, folder, place, **options):
        ran.append(recipe.methods)
        return real(recipe, folder, place, **options)

    monkeypatch.setattr(session_module, "plan_recipe", counted)
    ablation, _ = reproduce(["table2", "shift"], tiny)
    assert sorted(m for (m,) in ran) == ["confit", "finetune", "finetune-xconv", "hierarchical"]
    assert {c.method for c in ablation.cells} == {m for (m,) in ran}
    ran.clear()
    (again,) = reproduce(["table2"], tiny)
    assert not ran
    assert again == ablation
    record = json.loads((tiny.out / "outcomes.json").read_text())["table2"]
    assert record["cells"][0]["verdict"] == "not reported"
    assert record["versions"]["torch"]
    page = (tiny.out / "table2.md").read_text()
    assert page.startswith("# Ablation (table 2)\n\n| dataset | method |")


def test_results_of_another_configuration_are_not_taken(tiny):
    few = Scope(tiny.out, tiny.datasets, ("finetune",), quick=True, given=tiny.given)
    (first,) = reproduce(["table1"], few)
    other = Scope(tiny.out, tiny.datasets, ("finetune",), quick=True, given={**tiny.given, "lr": 0.5})
    (second,) = reproduce(["table1"], other)
    assert len(finished_runs(tiny.out)) == 2
    assert [cell.seeds for cell in (*first.cells, *second.cells)] == [1] * 4
    assert reproduce(["table1"], few)[0].cells == first.cells != second.cells


def test_runs_are_found_whatever_device_did_them(tmp_path):
    recipe = Scope(tmp_path, ("digits",), given={"seeds": 2}).recipe("digits", "confit")
    configs = [recipe.identity("confit", seed, "abc") for seed in (0, 1)]
    one = result("confit", 0, ((84.0, 82.0), 90.0))
    runs = [one.model_copy(update={"config": {**config, "precision": "bf16"}}) for config in configs]
    assert Part(recipe).found(runs).results == runs
    assert Part(recipe.model_copy(update={"precision": "fp32"})).found(runs).results == []
    assert Part(Scope(tmp_path, given={"seeds": 2, "lr": 0.3}).recipe("digits", "confit")).found(runs).results == []


def test_quick_fills_in_only_what_is_not_asked_for(tmp_path):
    scope = Scope(tmp_path, ("digits",), quick=True, given={"tasks": 4, "seeds": 3})
    recipe = scope.recipe("digits", "confit", epochs=50)
    assert (recipe.seeds, recipe.tasks, recipe.epochs) == (3, 4, 5)


def test_what_cannot_be_trained_is_noted_and_the_rest_is_made(tiny):
    scope = Scope(tiny.out, tiny.datasets, ("finetune", "confit"), quick=True, given={**tiny.given, "lr": 1e20})
    (outcome,) = reproduce(["table2"], scope)
    assert not outcome.cells
    assert len(outcome.notes) == 3  # with the one on single runs
    assert outcome.notes[1].startswith("digits, finetune: the loss of task 'task1' became")
    assert "Note: digits, confit" in (scope.out / "table2.md").read_text()


def test_a_page_shows_everything():
    outcome = Outcome(
        what="x",
        title="X",
        cells=cells_of("d", "m", [result("m", 0, ((84.0, 82.0), 90.0))], {}),
        claims=[Claim(text="c", measured="2", holds=True)],
        tables={"T": "| a |"},
        pictures=["p.png"],
        notes=["n"],
    )
    page = outcome.markdown()
    texts = ("# X", "| d | m |", "## T\n\n| a |", "![X](p.png)", "| c | 2 | holds |", "Note: n")
    places = [page.index(text) for text in texts]
    assert places == sorted(places)


def test_reported_numbers_are_complete():
    table = reported("table1")
    assert set(table) == ELEVEN
    assert all(set(row) == {"cifar100", "cub200", "caltech101", "flowers102"} for row in table.values())
    assert table["confit"]["caltech101"] == {"acc": 88.73, "acc_interval": 0.34, "fgt": 0.67, "fgt_interval": 0.27}
    assert reported("table2")["hierarchical"]["flowers102"] == {"acc": 83.39, "acc_interval": 0.43}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("what: 5", "what must be names, with commas or as a list: got 5"),
        ("what: [table1, 5]", "what must be names"),
        ("what: table1\ndatasets: {a: b}", "datasets must be names"),
        ("what: table1\nmethods: 3", "methods must be names"),
        ("what: table1\nrows: {ewc: 3}", "rows must be recipe values by method"),
        ("what: table1\nrows: {ewc: {lrr: 3}}", "no option 'lrr'"),
        (
            "what: table1\ndatasets: digits\npipeline: publisht",
            "pipeline='publisht': Input should be 'clean' or 'published'",
        ),
        ("what: table1\ndatasets: digits\nseeds: 0", "seeds=0"),
    ],
)
def test_a_file_that_asks_for_what_there_is_not(tmp_path, text, message):
    (tmp_path / "mine.yaml").write_text(text)

    def asked():
        scope, whats = read_scope([str(tmp_path / "mine.yaml")], tmp_path)
        return [parts_of(what, scope) for what in whats]

    with pytest.raises(ConfituneError, match=message):
        asked()
