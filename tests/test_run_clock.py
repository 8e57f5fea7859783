"""The estimate of the time that a run has left, with simulated clocks."""

import random

import pytest

from mlx_packs.run_clock import FORWARD, RunClock


class Simulated:
    """A run of training, validations, evaluations and answers, whose work takes given times."""

    def __init__(self, compiles: bool = False) -> None:
        self.now = 0.0
        self.clock = RunClock(lambda: self.now, compiles=compiles)
        self.estimates: list[tuple[float, float]] = []  # when, and the end that was expected

    def work(self, part: str, seconds: float, units: float = 1) -> None:
        self.now += seconds
        self.clock.tick(part, units)
        if (left := self.clock.left()) is not None:
            self.estimates.append((self.now, self.now + left))


def test_nothing_is_known_before_the_first_training_batch():
    run = Simulated()
    run.clock.plan("train", 10)
    run.clock.plan("evaluate", 10)
    run.work("evaluate", 5.0)
    assert run.clock.left() is None
    run.work("train", 2.0)
    assert run.clock.left() == pytest.approx(9 * 2 + 9 * 5)


def test_the_first_batch_which_compiles_soon_does_not_count():
    run = Simulated()
    run.clock.plan("train", 10)
    run.work("train", 60.0)
    run.work("train", 1.0)
    assert run.clock.left() == pytest.approx(8)


def test_where_the_first_batch_compiles_the_second_one_tells():
    run = Simulated(compiles=True)
    run.clock.plan("train", 60)
    run.work("train", 84.0)  # of a GPU whose kernels were compiled for it
    assert run.clock.left() is None
    run.work("train", 0.1)
    assert run.clock.left() == pytest.approx(58 * 0.1)


def test_a_run_of_one_batch_that_compiles_has_an_end():
    run = Simulated(compiles=True)
    run.clock.plan("train", 1)
    run.clock.plan("evaluate", 2)
    run.work("train", 10.0)
    assert run.clock.left() == pytest.approx(20.0)


def test_time_that_passes_within_a_unit_is_subtracted():
    run = Simulated()
    run.clock.plan("train", 10)
    run.work("train", 4.0)
    run.now += 3.0
    assert run.clock.left() == pytest.approx(36 - 3)
    run.now += 1000.0
    assert run.clock.left() == 0


def test_time_outside_all_parts_is_of_none():
    run = Simulated()
    run.clock.plan("train", 4)
    run.now += 50.0
    run.clock.restart()
    run.work("train", 1.0)
    assert run.clock.left() == pytest.approx(3)
    run.work("another", 9.0)
    assert run.clock.left() == pytest.approx(3)


def test_a_limit_ends_training_early():
    run = Simulated()
    run.clock.plan("train", 100, limit=10)
    run.clock.plan("evaluate", 3, cost=1)
    run.work("train", 2.0)
    assert run.clock.left() == pytest.approx(8 + 3 * 2)


@pytest.mark.parametrize(("seed", "forward"), [(0, 0.3), (1, 0.4), (2, 0.5)])
def test_the_end_is_right_within_a_fifth_after_a_tenth_of_a_run(seed, forward):
    """Batches differ by a factor of three, and the first takes ten times as long."""
    draw = random.Random(seed)
    run = Simulated()
    batches = 200
    run.clock.plan("train", batches)
    run.clock.plan("validate", 3 * 10, FORWARD)
    run.clock.plan("save", 2, FORWARD)
    run.clock.plan("evaluate", 2 * 20, FORWARD)
    run.clock.plan("answer", 2 * 30, 0.3)

    for batch in range(1, batches + 1):
        run.work("train", draw.uniform(0.5, 1.5) * (10 if batch == 1 else 1))
        if batch % 60 == 0:
            run.work("validate", 10 * forward, units=10)
        if batch % 100 == 0:
            run.work("save", 1.0)

    for _ in range(2):
        for _ in range(20):
            run.work("evaluate", forward)
        for _ in range(30):
            run.work("answer", 0.4)

    later = [(when, end) for when, end in run.estimates if when > run.now / 10]
    assert len(later) > 200
    for when, end in later:
        assert abs(end - run.now) <= 0.2 * run.now, (when, end, run.now)
