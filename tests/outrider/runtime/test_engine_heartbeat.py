"""A loop is stuck when its step lasts too long, and long is what is long for it."""

from outrider.runtime.engine import TIMES_THE_LONGEST, Heartbeat


class Clock:
    """Tells the time that it was given."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def beating() -> tuple[Heartbeat, Clock]:
    clock = Clock()
    return Heartbeat(clock), clock


def test_a_step_beyond_the_bound_is_stuck() -> None:
    heart, clock = beating()
    heart.begin()
    clock.now += 9.9
    assert abs(heart.step_seconds() - 9.9) < 1e-9
    assert not heart.is_stuck(10.0)
    clock.now += 0.2
    assert heart.is_stuck(10.0)
    heart.begin()
    assert not heart.is_stuck(10.0)


def test_one_that_waits_for_work_is_never_stuck() -> None:
    heart, clock = beating()
    heart.rest()
    clock.now += 1e6
    assert not heart.is_stuck(1.0)
    heart.begin()
    clock.now += 0.5
    heart.rest()
    clock.now += 1e6
    assert not heart.is_stuck(1.0)
    assert heart.step_seconds() == 0.0


def test_long_passes_widen_the_bound() -> None:
    """What took 30 s once may take a few times as long, whatever the bound; rests do not count."""
    heart, clock = beating()
    heart.begin()
    clock.now += 30.0
    heart.rest()
    clock.now += 1e6
    heart.begin()
    assert abs(heart.longest - 30.0) < 1e-6
    clock.now += TIMES_THE_LONGEST * 30.0 - 1.0
    assert not heart.is_stuck(10.0)
    clock.now += 2.0
    assert heart.is_stuck(10.0)
