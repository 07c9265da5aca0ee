"""What the host knows of numbers on a device: bounds that never fall below the truth."""

from hypothesis import given
from hypothesis import strategies as st

from karvan.store.cuda.rows.bounds import Bound


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0, 1), st.integers(0, 3)), max_size=30))
def test_a_bound_is_never_below_the_number(lookups):
    """A lookup has positions, of which a part are new keys; the host reads the number some lookups later."""
    bound, number, history, log = Bound(1), 1, [1], []
    for time, (positions, share, delay) in enumerate(lookups, 1):
        number += int(positions * share)
        history.append(number)
        log.append((time, positions))
        read = max(0, time - delay)
        bound.learn(history[read] if read else 0, read)  # before the first copy arrives, nothing is known
        assert bound.known + sum(count for at, count in log if at > bound.time) >= number


def test_what_was_read_before_a_restart_is_ignored():
    bound = Bound()
    bound.learn(7, 3)
    bound.restart(2, 4, 6)
    bound.learn(1, 5)
    assert (bound.known, bound.time) == (2, 4)
    bound.learn(3, 6)
    assert (bound.known, bound.time) == (3, 6)
