import statistics

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from confitune import metrics

NAN = np.nan

# Task 0 peaks after task 1 (transfer backwards), then falls; task 1 only falls; what is below the diagonal is noise.
HAND = np.array(
    [
        [80.0, 90.0, 60.0],
        [99.0, 70.0, 64.0],
        [99.0, 99.0, 50.0],
    ]
)
JOINT = np.array(
    [
        [NAN, NAN, 90.0],
        [NAN, NAN, 80.0],
        [NAN, NAN, 70.0],
    ]
)

percent = st.floats(0, 100, allow_subnormal=False)
matrices = st.integers(1, 8).flatmap(lambda tasks: hnp.arrays(np.float64, (tasks, tasks), elements=percent))
later_matrices = st.integers(2, 8).flatmap(lambda tasks: hnp.arrays(np.float64, (tasks, tasks), elements=percent))


def test_hand_computed_matrix():
    assert metrics.average_accuracy(HAND) == pytest.approx((60 + 64 + 50) / 3)
    assert metrics.average_forgetting(HAND) == pytest.approx(((90 - 60) + (70 - 64)) / 2)
    assert metrics.learning_accuracy(HAND) == pytest.approx((80 + 70 + 50) / 3)
    assert metrics.backward_transfer(HAND) == pytest.approx(((60 - 80) + (64 - 70)) / 2)
    np.testing.assert_allclose(metrics.average_accuracy_curve(HAND), [80, 80, 58])


def test_joint_training_has_an_average_accuracy_and_nothing_else():
    assert metrics.average_accuracy(JOINT) == pytest.approx(80)
    assert np.isnan(metrics.average_forgetting(JOINT))
    assert np.isnan(metrics.learning_accuracy(JOINT))
    assert np.isnan(metrics.backward_transfer(JOINT))
    np.testing.assert_allclose(metrics.average_accuracy_curve(JOINT), [NAN, NAN, 80])


def test_a_single_task_forgets_nothing():
    assert metrics.average_accuracy([[93.0]]) == 93.0
    assert metrics.learning_accuracy([[93.0]]) == 93.0
    assert metrics.average_forgetting([[93.0]]) == 0.0
    assert metrics.backward_transfer([[93.0]]) == 0.0
    np.testing.assert_array_equal(metrics.average_accuracy_curve([[93.0]]), [93.0])


def test_forgetting_is_unknown_when_an_evaluation_between_is_missing():
    skipped = HAND.copy()
    skipped[0, 1] = NAN
    assert np.isnan(metrics.average_forgetting(skipped))
    assert metrics.backward_transfer(skipped) == metrics.backward_transfer(HAND)
    np.testing.assert_allclose(metrics.average_accuracy_curve(skipped), [80, NAN, 58])


def test_null_of_a_json_file_is_read_as_not_measured():
    assert metrics.average_forgetting([[90.0, 80.0], [None, 95.0]]) == 10.0


@given(matrices)
def test_against_numpy_one_liners(matrix):
    tasks = len(matrix)
    upper = np.where(np.tri(tasks, dtype=bool).T, matrix, -np.inf)
    forgetting = (upper.max(axis=1) - matrix[:, -1])[:-1]
    assert metrics.average_accuracy(matrix) == pytest.approx(matrix[:, -1].sum() / tasks)
    assert metrics.average_forgetting(matrix) == pytest.approx(forgetting.sum() / max(tasks - 1, 1))
    assert metrics.learning_accuracy(matrix) == pytest.approx(np.trace(matrix) / tasks)
    assert metrics.average_accuracy_curve(matrix) == pytest.approx(
        np.triu(matrix).sum(axis=0) / np.arange(1, tasks + 1)
    )


@given(matrices)
def test_nothing_below_the_diagonal_is_read(matrix):
    masked = np.where(np.tri(len(matrix), k=-1, dtype=bool), NAN, matrix)
    for metric in (
        metrics.average_accuracy,
        metrics.average_forgetting,
        metrics.learning_accuracy,
        metrics.backward_transfer,
        metrics.average_accuracy_curve,
    ):
        np.testing.assert_array_equal(metric(masked), metric(matrix))


@given(matrices)
def test_forgetting_is_never_negative_and_at_least_the_loss_since_learning(matrix):
    forgetting = metrics.average_forgetting(matrix)
    assert forgetting >= 0
    assert forgetting >= -metrics.backward_transfer(matrix) - 1e-9


@given(hnp.arrays(np.float64, st.integers(1, 8), elements=percent))
def test_constant_rows_forget_nothing(row_values):
    matrix = np.tile(row_values[:, None], (1, len(row_values)))
    assert metrics.average_forgetting(matrix) == 0
    assert metrics.backward_transfer(matrix) == 0
    assert metrics.average_accuracy(matrix) == pytest.approx(metrics.learning_accuracy(matrix))


@given(later_matrices)
def test_final_accuracy_is_what_was_learned_plus_backward_transfer(matrix):
    tasks = len(matrix)
    expected = metrics.learning_accuracy(matrix) + metrics.backward_transfer(matrix) * (tasks - 1) / tasks
    assert metrics.average_accuracy(matrix) == pytest.approx(expected, abs=1e-9)


@given(matrices)
def test_the_curve_ends_at_the_average_accuracy(matrix):
    assert metrics.average_accuracy_curve(matrix)[-1] == pytest.approx(metrics.average_accuracy(matrix))


@given(st.lists(percent, min_size=2, max_size=12))
def test_interval_against_scipy_stats(values):
    mean, half_width, n = metrics.mean_and_interval(values)
    assert n == len(values)
    assert mean == pytest.approx(np.mean(values))
    assert half_width == pytest.approx(stats.t.ppf(0.975, n - 1) * statistics.stdev(values) / np.sqrt(n), abs=1e-9)


def test_interval_by_the_table():
    # t_{0.975, 4} = 2.776; the sample standard deviation of 1..5 is sqrt(2.5).
    interval = metrics.mean_and_interval([1, 2, 3, 4, 5])
    assert interval.mean == 3
    assert interval.half_width == pytest.approx(2.776 * np.sqrt(2.5 / 5), abs=1e-3)


def test_one_seed_has_a_mean_but_no_interval():
    mean, half_width, n = metrics.mean_and_interval([86.99])
    assert (mean, n) == (86.99, 1)
    assert np.isnan(half_width)


def test_undefined_values_stay_undefined():
    mean, half_width, n = metrics.mean_and_interval([NAN, NAN])
    assert np.isnan(mean)
    assert np.isnan(half_width)
    assert n == 2


@pytest.mark.parametrize(
    ("matrix", "complaint"),
    [
        (np.zeros((2, 3)), r"square.*\(2, 3\)"),
        (np.zeros(3), r"square.*\(3,\)"),
        (np.zeros((0, 0)), r"square.*\(0, 0\)"),
        (np.array([[90.0, NAN], [NAN, 95.0]]), r"after the last task is missing for task\(s\) \[0\] of 2"),
        (np.array([[90.0, 80.0], [NAN, 101.0]]), r"0 to 100.*80 to 101"),
        (np.array([[-1.0]]), r"0 to 100.*-1 to -1"),
        (np.array([[np.inf]]), r"0 to 100"),
    ],
)
def test_malformed_matrices_are_refused_with_what_is_wrong(matrix, complaint):
    with pytest.raises(ValueError, match=complaint):
        metrics.average_accuracy(matrix)


@pytest.mark.parametrize("values", [[], 3.0, [[1.0, 2.0]]])
def test_interval_refuses_what_is_not_a_list_of_numbers(values):
    with pytest.raises(ValueError, match="at least one number"):
        metrics.mean_and_interval(values)
