"""Tables and figures of the paper: which runs they need, what stands beside the paper's, what is not done twice."""

import json
from pathlib import Path

import pytest
import yaml

from confitune.errors import ConfituneError
from confitune.experiments.paper import reproduce as session_module, tables
from confitune.experiments.paper.outcome import Outcome
from confitune.experiments.paper.plan import Part, Scope, read_scope
from confitune.experiments.paper.reproduce import WHATS, parts_of, reproduce
from confitune.experiments.runs.identity import filled, finished_runs
from found import of_two_tasks


def written(write, scope, runs):
    """What a table makes of these runs by method, on the one dataset."""
    (dataset,), outcome = scope.datasets, Outcome("x", "X")
    write(outcome, scope, {dataset: [Part(scope.recipe(dataset, method), found) for method, found in runs.items()]})
    return outcome


def test_runs_that_did_not_test_tasks_as_learned_are_named(tmp_path):
    runs = {
        "finetune": [of_two_tasks("finetune", 0, ((84.0, 70.0), 80.0), means=None)],
        "confit": [of_two_tasks("confit", 0, ((84.0, 82.0), 90.0), means="phase")],
        "finetune-xconv": [of_two_tasks("finetune-xconv", 0, ((84.0, 80.0), 90.0), [84.0, 90.0], means="phase")],
    }
    boxes, older = written(tables.table2, Scope(tmp_path, ("cub200",), given={"pipeline": "clean"}), runs).notes
    assert boxes.startswith("cub200: measured with the clean pipeline, whole images and not their bounding boxes")
    assert older.startswith("cub200: runs of confit did not test tasks before their means are recovered.")
    outcome = written(tables.table2, Scope(tmp_path), runs)
    assert [note.partition(":")[0] for note in outcome.notes] == ["flowers102"]  # the clean pipeline is not noted


def test_the_order_of_methods_is_compared_and_not_claimed(tmp_path):
    def claims(**acc):
        runs = {m.replace("_", "-"): [of_two_tasks(m, 0, ((a, a), a), means=None)] for m, a in acc.items()}
        order, _ = written(tables.table1, Scope(tmp_path), runs).claims
        return order.text, order.measured, order.holds

    text = "flowers102: the order of the methods"  # the paper: finetune 78.06, ewc 79.94, mas 80.90, confit 86.99
    assert claims(finetune=70.0, ewc=71.0, mas=72.0, confit=90.0) == (text, "the paper's", True)
    turned = "the other way round: finetune above ewc, mas above confit"
    assert claims(finetune=71.0, ewc=70.0, mas=92.0, confit=90.0) == (text, turned, False)
    assert claims(finetune=71.0) == (text, "-", None)


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
    runs = {
        m: of_two_tasks(m, 0, ((a, a), a), means=None) for m, a in (("finetune", 90.0), ("confit", 80.0), ("mas", 85.0))
    }
    monkeypatch.setattr(session_module, "_run_missing", lambda parts, scope: [])
    monkeypatch.setattr(Part, "found", lambda part, results: Part(part.recipe, [runs[part.method]]))
    verdicts = {}
    for seeds in (1, 2):
        scope = Scope(tmp_path, methods=tuple(runs), given={"seeds": seeds})
        (outcome,) = reproduce(["table1"], scope)
        verdicts[seeds] = outcome.claims[0].holds
        page = (tmp_path / "reproduction.md").read_text()
        assert ("Note: one run of each method is too little" in page) == (seeds == 1)
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
    page = (tiny.out / "reproduction.md").read_text()
    assert "\n\n## Ablation (table 2)\n\n| dataset | method |" in page
    assert page.index("## Ablation (table 2)") < page.index("## Representational shift")  # as before it was made again


def test_results_of_another_configuration_are_not_taken(tiny):
    few = Scope(tiny.out, tiny.datasets, ("finetune",), quick=True, given=tiny.given)
    (first,) = reproduce(["table1"], few)
    other = Scope(tiny.out, tiny.datasets, ("finetune",), quick=True, given={**tiny.given, "lr": 0.5})
    (second,) = reproduce(["table1"], other)
    assert len(finished_runs(tiny.out)) == 2
    assert [cell.seeds for cell in (*first.cells, *second.cells)] == [1] * 4
    assert reproduce(["table1"], few)[0].cells == first.cells != second.cells


def test_what_cannot_be_trained_is_noted_and_the_rest_is_made(tiny):
    scope = Scope(tiny.out, tiny.datasets, ("finetune", "confit"), quick=True, given={**tiny.given, "lr": 1e20})
    (outcome,) = reproduce(["table2"], scope)
    assert not outcome.cells
    assert len(outcome.notes) == 3  # with the one on single runs
    assert outcome.notes[1].startswith("digits, finetune: the loss of task 'task1' became")
    assert "Note: digits, confit" in (scope.out / "reproduction.md").read_text()
