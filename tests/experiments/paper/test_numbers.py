"""What the paper reports."""

from confitune.experiments.paper.numbers import reported
from confitune.experiments.paper.plan import TABLE1, Scope
from confitune.experiments.paper.reproduce import parts_of

ELEVEN = {
    *("finetune", "ewc", "si", "rwalk", "mas", "mas-cpr", "mas-afec", "confit", "ccll", "linear-probe", "single-task"),
}


def test_reported_numbers_are_complete():
    table = reported("table1")
    assert set(table) == ELEVEN
    assert all(set(row) == {"cifar100", "cub200", "caltech101", "flowers102"} for row in table.values())
    assert table["confit"]["caltech101"] == {"acc": 88.73, "acc_interval": 0.34, "fgt": 0.67, "fgt_interval": 0.27}
    assert reported("table2")["hierarchical"]["flowers102"] == {"acc": 83.39, "acc_interval": 0.43}


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
