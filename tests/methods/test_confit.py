"""ConFiT and its two halves."""

from confitune.methods import create_method, hierarchical


def kinds(method):
    return [part.kind for part in method.parts()]


def stages(method):
    return [method.stages(10, index) for index in (0, 1)]


def test_the_ablation_is_two_kinds_of_stages_by_two_kinds_of_norms():
    found = {name: create_method(name) for name in ("finetune", "hierarchical", "finetune-xconv", "confit")}
    assert kinds(found["finetune"]) == kinds(found["hierarchical"]) != kinds(found["confit"])
    assert kinds(found["finetune-xconv"]) == kinds(found["confit"])
    assert stages(found["finetune"]) == stages(found["finetune-xconv"]) != stages(found["confit"])
    assert stages(found["hierarchical"]) == stages(found["confit"]) == [hierarchical(10)] * 2
