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


ONE_PART, TWO_PARTS = {"train": 10}, {"train": 10, "evaluate": 10}


@pytest.mark.parametrize(
    ("compiles", "planned", "works", "left"),
    [
        (False, TWO_PARTS, [("evaluate", 5.0)], None),
        (False, TWO_PARTS, [("evaluate", 5.0), ("train", 2.0)], 9 * 2 + 9 * 5),
        (False, ONE_PART, [("train", 60.0), ("train", 1.0)], 8),
        (True, ONE_PART, [("train", 84.0)], None),  # of a GPU whose kernels were compiled for it
        (True, ONE_PART, [("train", 84.0), ("train", 0.1)], 8 * 0.1),
        (True, {"train": 1, "evaluate": 2}, [("train", 10.0)], 20),
        (False, ONE_PART, [("train", 1.0), ("another", 9.0)], 9),
    ],
)
def test_what_is_left_follows_from_what_was_measured(compiles, planned, works, left):
    """The first batch tells until the second ends, unless it compiles and another one follows."""
    run = Simulated(compiles=compiles)
    for part, units in planned.items():
        run.clock.plan(part, units)
    for part, seconds in works:
        run.work(part, seconds)
    assert run.clock.left() == (None if left is None else pytest.approx(left))


def test_time_that_passes_within_a_unit_is_subtracted_and_outside_of_parts_is_not():
    run = Simulated()
    run.clock.plan("train", 10)
    run.now += 50.0
    run.clock.restart()
    run.work("train", 4.0)
    run.now += 3.0
    assert run.clock.left() == pytest.approx(36 - 3)
    run.now += 1000.0
    assert run.clock.left() == 0


def test_a_limit_ends_training_early():
    run = Simulated()
    run.clock.plan("train", 100, limit=10)
    run.clock.plan("evaluate", 3, cost=1)
    run.work("train", 2.0)
    assert run.clock.left() == pytest.approx(8 + 3 * 2)


@pytest.mark.parametrize(("seed", "forward"), [(0, 0.3), (2, 0.5)])
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
