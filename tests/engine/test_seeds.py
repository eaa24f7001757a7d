"""Seeds, each for one purpose."""

import torch

from confitune.engine.seeds import derived_generator, derived_seed


def test_seeds_for_different_purposes_never_coincide():
    purposes = [("order", task, epoch) for task in range(20) for epoch in range(20)]
    purposes += [("augment", task, epoch) for task in range(20) for epoch in range(20)]
    seeds = {derived_seed(seed, *purpose) for seed in range(5) for purpose in purposes}
    assert len(seeds) == 5 * len(purposes)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_parts_of_a_purpose_are_kept_apart():
    assert derived_seed(0, "order", 1, 11) != derived_seed(0, "order", 11, 1)
    assert derived_seed(1, 2) != derived_seed(12)


def test_generators_repeat():
    first, again = (torch.rand(4, generator=derived_generator(3, "order", 1)) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, torch.rand(4, generator=derived_generator(4, "order", 1)))
