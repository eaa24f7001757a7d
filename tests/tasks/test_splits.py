import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.model_selection import train_test_split

from confitune.errors import DataError
from confitune.tasks.splits import class_order, cut_into_tasks, hold_out, stratified_split


@pytest.mark.parametrize(("n_classes", "seed"), [(102, 0), (101, 0), (100, 0), (200, 0), (20, 3)])
def test_class_order_is_that_of_the_global_generator(n_classes: int, seed: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        expected = torch.randperm(n_classes).tolist()
    assert class_order(n_classes, seed) == expected


def test_class_order_leaves_the_callers_random_numbers_alone() -> None:
    before = torch.random.get_rng_state()
    class_order(102)
    assert torch.equal(torch.random.get_rng_state(), before)


@given(st.integers(2, 60), st.integers(2, 20))
def test_cutting_uses_each_class_once(n_classes: int, per_task: int) -> None:
    if per_task > n_classes:
        with pytest.raises(DataError, match=f"classes_per_task is {per_task}, but there are only {n_classes}"):
            cut_into_tasks(range(n_classes), per_task)
        return
    groups, left = cut_into_tasks(range(n_classes), per_task)
    assert [c for group in groups for c in group] + left == list(range(n_classes))
    assert {len(group) for group in groups} == {per_task}
    assert len(left) < per_task


def test_tasks_of_one_class_are_refused() -> None:
    with pytest.raises(DataError, match="two or more classes"):
        cut_into_tasks(range(4), 1)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(5, 40), min_size=2, max_size=8))
def test_split_is_scikit_learns_and_five_images_a_class_are_enough(counts: list[int]) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    train, test = stratified_split(labels, [str(i) for i in range(len(counts))])
    theirs = train_test_split(np.arange(len(labels)), stratify=labels, test_size=0.2, random_state=0)
    assert train.tolist() == sorted(theirs[0])
    assert test.tolist() == sorted(theirs[1])
    assert np.bincount(labels[test]).min() >= 1


def test_flowers_numbers_of_the_papers_appendix() -> None:
    """Flowers102 has 40 to 258 images a species; the paper's table has 32 and 206 of them for training."""
    labels = np.repeat([0, 1], [40, 258])
    train, _ = stratified_split(labels, ["a", "b"])
    assert np.bincount(labels[train]).tolist() == [32, 206]


def test_classes_too_small_to_split_are_named() -> None:
    with pytest.raises(DataError, match=r"too few images .*: 'rare' \(1\); give every class 5 images or more, or make"):
        stratified_split([0] * 20 + [1], ["many", "rare"])
    with pytest.raises(DataError, match=r"too few images to train and to test on: 'rare' \(2\)"):
        stratified_split([0] * 50 + [1] * 2, ["many", "rare"])
    with pytest.raises(DataError, match=r"'a' \(2\), 'b' \(2\), 'c' \(2\); give every class 5 images"):
        stratified_split([0, 0, 1, 1, 2, 2], ["a", "b", "c"])


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.sampled_from([0.1, 0.25, 0.5, 0.9]))
def test_the_same_share_of_every_class_is_held_out(counts: list[int], share: float) -> None:
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))]
    stay, held = hold_out(labels, share, torch.Generator().manual_seed(0))
    assert sorted([*stay.tolist(), *held.tolist()]) == list(range(len(labels)))  # disjoint, and nothing is lost
    assert (stay.tolist(), held.tolist()) == (sorted(stay.tolist()), sorted(held.tolist()))
    for count, kept, out in zip(
        counts,
        labels[stay].bincount(minlength=len(counts)).tolist(),
        labels[held].bincount(minlength=len(counts)).tolist(),
        strict=True,
    ):
        assert kept >= 1
        assert out == 0 if count == 1 else out >= 1
        if count * share >= 1 and count * (1 - share) >= 1:
            assert abs(out - count * share) <= 0.5


def test_a_tenth_is_rounded_to_whole_images() -> None:
    counts = [1, 2, 3, 14, 15, 24, 25, 100]
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    _, held = hold_out(labels, 0.1, torch.Generator().manual_seed(0))
    assert labels[held].bincount().tolist() == [0, 1, 1, 1, 2, 2, 3, 10]


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 1.5])
def test_a_share_that_leaves_nothing_is_refused(share: float) -> None:
    with pytest.raises(DataError, match=r"must lie between 0 and 1"):
        hold_out(torch.zeros(10, dtype=torch.int64), share, torch.Generator())
