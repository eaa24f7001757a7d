"""What `confitune methods` and `confitune models` say, against networks and methods themselves."""

import io

import pytest
import torch
from rich.console import Console

from confitune.errors import ConfituneError
from confitune.experiments.catalog import (
    MOST,
    NETWORK,
    WELL_KNOWN,
    matching_models,
    method_options,
    method_page,
    method_row,
    methods_table,
    model_row,
)
from confitune.experiments.paper.numbers import searched
from confitune.experiments.runs.recipe import make_recipe, merge_settings
from confitune.experiments.runs.tune import plan_search
from confitune.methods import METHODS, create_method
from confitune.nn import build_model, model_names

SHARED = 11_176_512  # weights of ResNet18 without its head
HEAD = 10 * (512 + 1)
CONVOLUTIONS = SHARED - 2 * 4800  # less the affine parameters of its batch norms
ADDED = [name for name, kind in METHODS.items() if not kind.is_base()]


class Report:
    """A row of the table, cell by cell."""

    def __init__(self, name):
        self.name, does, self.shares, per_task, once, self.in_addition = method_row(name, {})
        self.summary, _, self.reference = does.partition("\n")
        self.numbers_per_task, self.numbers_once = (int(cell.replace(",", "")) for cell in (per_task, once))


@pytest.fixture(scope="module")
def reports():
    return {name: Report(name) for name in METHODS}


def test_every_method_is_there_with_all_that_is_said_of_it(reports):
    assert list(reports) == list(METHODS)
    for name, report in reports.items():
        assert (report.summary, report.reference) == (METHODS[name].summary, METHODS[name].reference)
        assert report.summary
        assert report.shares
        assert report.in_addition
    assert reports["confit"].reference == "Jie et al., CVPR Workshops 2022"
    assert ADDED == ["ewc", "si", "rwalk", "mas", "cpr", "afec"]
    assert all(reports[name].reference for name in ADDED)


@pytest.mark.parametrize("name", ["finetune", "linear-probe", "task-bn", "confit", "best", "ccll"])
def test_numbers_a_task_are_those_a_real_network_stores(reports, name):
    net = create_method(name).network(build_model(NETWORK))
    net.add_task("one", 10)
    with torch.no_grad():
        net.train()(torch.zeros(2, 3, 32, 32))
    net.finish_task()
    assert reports[name].numbers_per_task == sum(net.storage()["one"].parts.values())


def test_the_numbers_that_are_known(reports):
    found = {name: report.numbers_per_task - HEAD for name, report in reports.items()}
    assert (found["confit"], found["task-bn"], found["finetune"], found["joint"]) == (45_523, 19_200, 0, 0)
    # A change of rank 1 has outputs, inputs and windows; heads read 256 features more, those of the stage before.
    assert found["best"] == 19_200 + 4 * 8_839 + 10 * 256
    assert found["single-task"] == SHARED + 2 * 4800  # a network for every task, with its running moments
    assert found["ccll"] - found["task-bn"] == (9 + 1 + 4) * 4_800  # its 3x3 convolutions, gates and their norms


def test_two_methods_keep_the_pretrained_batch_norms_once_and_lda_second_moments(reports):
    kept = {name: report.numbers_once for name, report in reports.items() if name not in ADDED and report.numbers_once}
    assert kept == {"best": 4 * 4_800, "ccll": 4 * 4_800, "lda": 768**2}


@pytest.mark.parametrize(
    ("name", "per_weight"), [("ewc", 2), ("si", 2), ("mas", 2), ("rwalk", 4), ("cpr", 0), ("afec", 0)]
)
def test_methods_that_are_added_keep_so_many_numbers_per_shared_weight_once(reports, name, per_weight):
    report = reports[name]
    assert (report.numbers_per_task, report.numbers_once) == (HEAD, per_weight * SHARED)


def test_a_composed_method_has_what_its_parts_have():
    report = Report("mas+rwalk+confit")
    assert report.numbers_per_task == 45_523 + HEAD
    assert report.numbers_once == 6 * CONVOLUTIONS  # batch norms are each task's own
    for part in ("confit", "mas", "rwalk"):
        assert METHODS[part].summary in report.summary
    assert {option.name.split(".")[0] for option in method_options("mas+rwalk+confit")} == {"mas", "rwalk"}


def test_what_tasks_share(reports):
    assert {name: report.shares for name, report in reports.items() if name not in ADDED} == {
        "finetune": "the backbone",
        "best": "convolutions, frozen",
        "confit": "convolutions",
        "hierarchical": "the backbone",
        "finetune-xconv": "convolutions",
        "task-bn": "convolutions",
        "bn-only": "convolutions, frozen",
        "first-session": "convolutions",
        "lora": "convolutions, frozen",
        "linear-probe": "the backbone, frozen",
        "lda": "the backbone, frozen",
        "single-task": "nothing",
        "joint": "the backbone",
        "ccll": "convolutions",
    }


def test_options_come_with_defaults_descriptions_and_the_papers_values():
    options = {option.name: option for option in method_options("mas-cpr")}
    assert list(options) == ["mas.strength", "mas.mode", "cpr.beta"]
    assert (options["mas.strength"].default, options["mas.strength"].description) == (30.0, "penalty strength lambda")
    assert options["cpr.beta"].paper == {"cifar100": 0.2, "cub200": 0.02, "caltech101": 0.01, "flowers102": 0.1}
    assert options["mas.mode"].paper == {}
    for row in searched():
        (option,) = (o for o in method_options(row.method) if o.name == f"{row.part}.{row.option}")
        assert option.paper == row.chosen


@pytest.mark.parametrize("name", [*METHODS, "mas-cpr", "ewc+confit"])
def test_the_examples_are_commands_that_are_understood(name):
    run, *tune = [line.strip() for line in printed(method_page(name)).splitlines() if line.startswith("confitune ")]
    words = run.split()
    assert words[:4] == ["confitune", "run", "--method", name]
    make_recipe(merge_settings({"methods": [name]}, [words[5]] if len(words) > 4 else []))
    for command in tune:
        assert command == f"confitune tune {name}"
        assert len(plan_search(name, {}).grid) > 1
    assert bool(tune) == (name in {"ewc", "si", "rwalk", "mas", "mas-cpr", "ewc+confit"})


def test_an_unknown_method_is_answered_with_the_nearest():
    with pytest.raises(ConfituneError, match=r"no method 'ewcc': did you mean 'ewc'\?"):
        Report("ewcc")


def printed(what, width=150):
    console = Console(file=io.StringIO(), width=width)
    console.print(what)
    return console.file.getvalue()


def rows(text):
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line[:1] == "│"]


def test_the_table_has_a_row_for_every_method():
    text = printed(methods_table())
    found = {row[0]: row for row in rows(text) if row[0]}
    assert list(found) == list(METHODS)
    assert (found["confit"][3], found["confit"][4]) == ("50,653", "0")
    assert (found["ewc"][3], found["ewc"][4]) == ("5,130", "22,353,024")
    assert "Kirkpatrick et al., PNAS" in text


def test_the_table_fits_eighty_columns():
    text = printed(methods_table(), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert {"finetune-xconv", "50,653", "22,353,024"} <= {cell for row in rows(text) for cell in row}


def test_the_page_of_a_method_shows_its_options_and_how_to_call_it():
    text = printed(method_page("ewc"))
    (strength,) = [row for row in rows(text) if row[0] == "ewc.strength"]
    assert strength == ["ewc.strength", "300", "1000", "3000", "30000", "100000", "penalty strength lambda"]
    assert "confitune run --method ewc --set ewc.strength=300" in text
    assert "confitune tune ewc" in text
    assert "settings of the network" not in text
    assert "settings of the network that matter to it: means, statistics\n" in printed(method_page("confit"))


# ---- networks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "norms", "phase", "window"),
    [
        ("resnet18", 20, 19_148 + HEAD, 45_523 + HEAD),
        ("torchvision:resnet18", 20, 19_148 + HEAD, 45_523 + HEAD),
        ("tf_efficientnet_lite0", 49, 86_220 + 10 * 1281, 255_835 + 10 * 1281),
    ],
)
def test_numbers_a_task_of_a_network(name, norms, phase, window):
    assert model_row(name)[2:] == [str(norms), str(norms), f"{phase:,}", f"{window:,}"]


def test_parameters_are_counted_without_the_head():
    assert model_row("resnet18")[1] == "11.2M"  # 11,689,512 less 1000 x 512 + 1000


def test_batch_norms_without_a_convolution_are_not_recovered():
    _, _, norms, recovered, *_ = model_row("densenet121")
    assert 0 < int(recovered) < int(norms) == 121


@pytest.mark.parametrize(
    ("name", "problem"), [("vit_tiny_patch16_224", "has no batch norm"), ("resnet81", "no model 'resnet81'")]
)
def test_a_network_that_does_not_convert_says_why(name, problem):
    _, why = model_row(name)
    assert why.startswith(problem)


def test_without_a_pattern_the_well_known_ones():
    assert matching_models(None) == list(WELL_KNOWN)
    assert len(WELL_KNOWN) <= MOST
    assert set(WELL_KNOWN) <= set(model_names())


def test_a_pattern_is_part_of_a_name_or_has_wildcards():
    assert "resnet18" in matching_models("resnet18")
    assert "torchvision:resnet18" in matching_models("resnet18")
    assert all("resnet18" in name for name in matching_models("resnet18"))
    assert matching_models("resnet1?") == ["resnet18"]
    assert all(name.startswith("vgg") and name.endswith("_bn") for name in matching_models("vgg*_bn"))
    assert len(matching_models("vgg*_bn")) == 4
    assert matching_models("no such thing") == []


def test_short_names_come_first():
    assert matching_models("resnet")[:3] == ["resnet18", "resnet26", "resnet34"]
