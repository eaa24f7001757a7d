"""Statistics of the tensors that convolutions read, against averages computed another way."""

import copy

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch import Tensor, nn
from torch.nn.functional import unfold

from confitune.errors import ConfituneError
from confitune.nn import InputMeans
from confitune.nn.geometry import ConvGeometry
from confitune.nn.parts.input_means import count, fold, take_in


def windows(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """Window means [C, K, K] by cutting out every window (zero padding)."""
    columns = unfold(x, conv.kernel_size, conv.dilation, conv.padding, conv.stride)
    return columns.mean((0, 2)).reshape(x.shape[1], *conv.kernel_size)


def phases(x: Tensor, stride: tuple[int, int]) -> Tensor:
    """Phase means [C, s, s] by slicing."""
    down, right = stride
    means = [x[:, :, a::down, b::right].mean((0, 2, 3)) for a in range(down) for b in range(right)]
    return torch.stack(means, 1).reshape(x.shape[1], down, right)


def read_by(readers, means, channels=2, momentum=0.1) -> InputMeans:
    statistics = InputMeans(channels, means, momentum).train()
    for geometry in readers:
        statistics.add_reader(geometry)
    return statistics


def folded(statistics: InputMeans) -> list[Tensor]:
    fold([statistics])
    return statistics.tables


def test_two_sizes_in_one_task_are_refused(xconv):
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).train()
    xconv(model)
    model(torch.rand(2, 2, 6, 5))
    with pytest.raises(ConfituneError, match=r"6x5 and then of 6x6 in one task.*resize"):
        model(torch.rand(2, 2, 6, 6))


def test_statistics_do_not_lose_precision_to_autocast(xconv):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 1), nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3)).train()
    layer = xconv(model).layers["2"]
    inputs: list[Tensor] = []
    model[1].register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.rand(8, 2, 9, 9))
    assert inputs[0].dtype == torch.bfloat16
    torch.testing.assert_close(
        layer.inputs.window_means(layer.geometry), windows(inputs[0].float(), model[1]), rtol=0, atol=1e-6
    )


geometries = st.builds(
    ConvGeometry,
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.just((2, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.tuples(*[st.integers(0, 2).map(lambda p: (p, p))] * 2),
)


@settings(max_examples=75)
@given(st.lists(geometries, min_size=1, max_size=4), st.tuples(st.integers(5, 8), st.integers(5, 8)))
def test_whatever_is_shared_every_reader_gets_its_own_window_means(readers, size):
    for geometry in readers:
        assume(all(size[a] + 2 * geometry.padding[a][0] > geometry.dilation[a] * 2 for a in (0, 1)))
    x = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0))
    statistics = read_by(readers, "window", channels=3)
    statistics.observe(statistics, (x,))
    for geometry in readers:
        padding = [amount for amount, _ in geometry.padding]
        conv = nn.Conv2d(3, 1, geometry.kernel, geometry.stride, padding, geometry.dilation)
        torch.testing.assert_close(statistics.window_means(geometry), windows(x, conv))


@pytest.mark.parametrize(
    ("first", "second", "window_tables", "phase_tables"),
    [
        # ResNet18's block: the 1x1 shortcut has the 3x3's stride, and windows of its own.
        (ConvGeometry((3, 3), (2, 2), padding=((1, 1), (1, 1))), ConvGeometry((1, 1), (2, 2)), 2, 1),
        # ResNet50's block: conv1 reads every pixel, the shortcut every other.
        (ConvGeometry((1, 1), (1, 1)), ConvGeometry((1, 1), (2, 2)), 2, 2),
        # Inception: the first layers of two branches.
        (ConvGeometry((1, 1)), ConvGeometry((1, 1)), 1, 1),
    ],
)
def test_how_many_tables_two_readers_need(first, second, window_tables, phase_tables):
    for pair in ([first, second], [second, first]):
        assert len(read_by(pair, "window", channels=4).tables) == window_tables
        assert len(read_by(pair, "phase", channels=4).tables) == phase_tables


# ---- batches that are not in the tables yet --------------------------------------------------------------------------

# Two strides, so that neither kind of means can share one table.
READERS = (ConvGeometry((3, 3), (2, 2), padding=((1, 1), (1, 1))), ConvGeometry((1, 1)))


def tracker(means="window", momentum=0.1) -> InputMeans:
    """Without a momentum for a plain average."""
    statistics = read_by(READERS, means, momentum=momentum or 0.1)
    statistics.cumulative = momentum is None
    return statistics


def drawn(count: int, seed: int = 0, dtype=torch.float32) -> list[Tensor]:
    """Batches of 6 x 5 planes that differ in scale and offset."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(3, 2, 6, 5, generator=generator, dtype=dtype) * (1 + i) - i for i in range(count)]


def seen(statistics: InputMeans, batches: list[Tensor]) -> InputMeans:
    for x in batches:
        statistics.observe(statistics, (x,))
    return statistics


def averaged(batches: list[Tensor], means: str, momentum: float | None) -> list[Tensor]:
    """What the two tables must hold: of windows or phases cut out of each batch, averaged one after the other."""
    convs = [nn.Conv2d(2, 1, 3, 2, padding=1), nn.Conv2d(2, 1, 1)]
    tables = []
    for conv in convs:
        of = [windows(x, conv) if means == "window" else phases(x, conv.stride) for x in batches]
        table = of[0]
        for number, mean in enumerate(of[1:], 2):
            share = 1 / number if momentum is None else momentum
            table = (1 - share) * table + share * mean
        tables.append(table)
    return tables


def assert_tables(statistics: InputMeans, expected: list[Tensor], atol: float) -> None:
    for table, wanted in zip(folded(statistics), expected, strict=True):
        torch.testing.assert_close(table, wanted, rtol=0, atol=atol)


def assert_same_bits(statistics: InputMeans, other: InputMeans) -> None:
    assert (statistics.size, statistics.batches) == (other.size, other.batches)
    assert all(map(torch.equal, folded(statistics), folded(other)))


@settings(max_examples=40)
@given(
    means=st.sampled_from(["window", "phase"]),
    momentum=st.sampled_from([0.1, 0.7, None]),
    folds=st.lists(st.booleans(), min_size=1, max_size=10),
)
def test_folding_at_any_moment_changes_the_tables_only_by_rounding(means, momentum, folds):
    batches = drawn(len(folds), dtype=torch.float64)
    often, once = (tracker(means, momentum).double() for _ in range(2))
    for x, now in zip(batches, folds, strict=True):
        seen(often, [x])
        seen(once, [x])
        if now:
            fold([often])
            fold([often])  # nothing is left to bring in
    expected = averaged(batches, means, momentum)
    assert_tables(often, expected, atol=1e-12)
    assert_tables(once, expected, atol=1e-12)
    assert often.batches == once.batches == len(folds)


@pytest.mark.parametrize("means", ["window", "phase"])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("earlier", [0, 2])
def test_live_state_goes_on_to_the_same_bits_while_batches_are_pending(means, momentum, earlier):
    batches = drawn(7)
    statistics = seen(tracker(means, momentum), batches[:earlier])
    fold([statistics])
    seen(statistics, batches[earlier:4])
    state = statistics.get_extra_state()
    assert state["pending"] == 4 - earlier
    seen(statistics, batches[4:])
    twin = seen(tracker(means, momentum), drawn(3, seed=9))  # whatever it had is replaced
    twin.set_extra_state(state)
    assert (twin.batches, twin.size) == (4, (6, 5))
    seen(twin, batches[4:])
    assert_same_bits(twin, statistics)
    assert_tables(twin, averaged(batches, means, momentum), atol=1e-5)
    # It was a copy: what was seen since has not reached it.
    again = tracker(means, momentum)
    again.set_extra_state(state)
    assert_tables(again, averaged(batches[:4], means, momentum), atol=1e-5)


def test_restoring_drops_what_is_pending():
    statistics = seen(tracker(), drawn(3))
    for table in statistics.tables:
        table.fill_(5)
    statistics.restore((6, 5), 4)
    assert all((table == 5).all() for table in folded(statistics))
    assert statistics.batches == 4
    x = drawn(1, seed=3)
    seen(statistics, x)  # the next batch has its ordinary share: the tables are of four
    assert_tables(statistics, [4.5 + 0.1 * table for table in averaged(x, "window", None)], atol=1e-6)


def test_resetting_drops_what_is_pending():
    statistics = seen(tracker(), drawn(3))
    statistics.restore()
    assert (statistics.size, statistics.batches) == (None, 0)
    assert all((table == 0).all() for table in folded(statistics))
    other = [torch.full((2, 2, 4, 4), 3.0)]
    seen(statistics, other)
    assert statistics.size == (4, 4)
    assert_tables(statistics, averaged(other, "window", 0.1), atol=1e-6)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("move", [lambda s: s.double(), lambda s: s.to(torch.float64)], ids=["double", "to"])
def test_moving_loses_no_pending_batch(momentum, move):
    first, later = drawn(3), drawn(5, dtype=torch.float64)[3:]
    statistics = seen(tracker(momentum=momentum), first)
    move(statistics)
    assert statistics.pending == 3
    alone = copy.deepcopy(statistics)
    assert_tables(alone, averaged([x.double() for x in first], "window", momentum), atol=1e-6)
    assert {table.dtype for table in alone.tables} == {torch.float64}
    seen(statistics, later)
    expected = averaged([*(x.double() for x in first), *later], "window", momentum)
    assert_tables(statistics, expected, atol=1e-6)
    # From then on in the new precision: a batch 1e-9 larger shows.
    base, shifted = copy.deepcopy(statistics), copy.deepcopy(statistics)
    seen(base, later[:1])
    seen(shifted, [later[0] + 1e-9])
    share = 1 / 6 if momentum is None else momentum
    assert (folded(shifted)[1] - folded(base)[1]).mean().item() == pytest.approx(1e-9 * share, rel=1e-3)


def test_planes_of_one_size_keep_their_address():
    """What a captured graph was recorded with must be what later tasks take in."""
    statistics = seen(tracker(), drawn(1))
    address = statistics._plane().data_ptr()
    statistics.restore()
    seen(statistics, [torch.rand(2, 2, 4, 4)])
    assert statistics._plane().data_ptr() != address
    statistics.restore()
    statistics.size = (6, 5)
    assert statistics._plane().data_ptr() == address
    assert (statistics._plane() == 0).all()


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("before", [0, 1])
def test_counting_stands_for_a_batch_that_other_code_took_in(before, momentum):
    """As a replayed graph does, which treats a task's first batch as any other."""
    batches, statistics, eager = drawn(4), *(tracker(momentum=momentum) for _ in range(2))
    seen(statistics, batches[:before])
    statistics.size = (6, 5)
    for x in batches[before:]:
        statistics._plane("0").copy_(x.mean(0).permute(1, 2, 0))
        statistics.calls = 1
        take_in([statistics])
        count([statistics])
    assert statistics.batches == 4
    assert_same_bits(statistics, seen(eager, batches))
    assert_tables(statistics, averaged(batches, "window", momentum), atol=1e-5)


@pytest.mark.parametrize("means", ["window", "phase"])
@pytest.mark.parametrize("momentum", [0.1, 0.7])
def test_sums_of_planes_are_moved_as_one_after_the_other_to_the_bit(means, momentum):
    generator = torch.Generator().manual_seed(1)
    sizes = [(3, 5, 6), (7, 1, 1), (2, 9, 4)]  # C, H, W
    every = [read_by([ConvGeometry((1, 1))], means, channels=c, momentum=momentum) for c, _, _ in sizes]
    expected = [torch.zeros(h, w, c) for c, h, w in sizes]
    for batch in range(5):
        share = torch.tensor(momentum if batch else 1.0)
        for inputs, size, plane in zip(every, sizes, expected, strict=True):
            x = torch.randn(4, *size, generator=generator)
            inputs.held, inputs.calls = True, 0
            inputs.observe(inputs, (x,))
            plane.lerp_(x.movedim(1, -1).mean(0), share)
        take_in(every)
        count(every)
    assert all(torch.equal(inputs._plane(), plane) for inputs, plane in zip(every, expected, strict=True))
    assert [(inputs.batches, inputs.pending) for inputs in every] == [(5, 5)] * 3
    together = copy.deepcopy(every)
    fold(together)
    for inputs, other in zip(every, together, strict=True):
        assert_same_bits(inputs, other)


def test_a_deep_copy_has_its_own_pending_batches():
    batches = drawn(6)
    statistics = seen(tracker(), batches[:2])
    twin = copy.deepcopy(statistics)
    seen(twin, batches[2:])
    seen(statistics, batches[4:])
    assert_tables(twin, averaged(batches, "window", 0.1), atol=1e-5)
    assert_tables(statistics, averaged([*batches[:2], *batches[4:]], "window", 0.1), atol=1e-5)
    # ... also where the original has been brought up to date in between.
    third = copy.deepcopy(statistics)
    seen(statistics, batches[:3])
    assert third.batches == 4
    assert_tables(third, averaged([*batches[:2], *batches[4:]], "window", 0.1), atol=1e-5)
