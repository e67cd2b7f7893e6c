"""tiles.calls.plan.LruTable: a table that drops the entries least recently used."""

from hypothesis import given
from hypothesis import strategies as st

from tiles.calls.plan import LruTable


def test_recent_forgets_what_was_not_used_for_longest():
    recent = LruTable(8)
    for n in range(100):
        recent.put(n, str(n))
        assert recent.get(0) == "0", "it was asked for again and again"
        assert len(recent) <= 8
        for k in range(max(0, n - 2), n + 1):
            assert recent.get(k) == str(k), "it was put a moment ago"
    assert recent.get(50) is None and recent.get(-1) is None


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60), st.integers(2, 8))
def test_recent_is_a_table(calls, entries):
    """It gives what was put last or nothing, and the newest half of its entries always."""
    recent, truth, order = LruTable(entries), {}, []
    for n, (put, key) in enumerate(calls):
        if put:
            recent.put(key, n)
            truth[key] = n
        else:
            actual = recent.get(key)
            assert actual in (None, truth.get(key))
            if actual is None and key in truth:
                assert key not in order[: entries // 2 - 1]
            if actual is None:
                continue
        order = [key, *[k for k in order if k != key]]
        assert len(recent) <= entries
