"""tiles/launching/lengths.py: a function made of one run gives what the planner gives, for all lengths that it holds for."""

import functools
import math
import struct
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiles.launching.frameworks import persistent_blocks
from tiles.launching.lengths import Length, Trace, Untraceable, watched_call, watched_function


def watched(planner, *values):
    """The function of a tuple of numbers that plans like `planner` with these."""
    trace = Trace()
    numbers = [trace.variable(f"n{k}", value) for k, value in enumerate(values)]
    return trace.function("".join(f"{n.text}, " for n in numbers), planner(*numbers))


def narrowed_to_first(planner, first, second):
    """The function of the first of two numbers, when the second one is that of this call."""
    trace = Trace()
    return trace.specialize(["n0"], {"n1": second}, planner(trace.variable("n0", first), trace.variable("n1", second)))


BLOCK = struct.Struct("<8x2qi16xiqi4x2dqi4x8x")
EXPRESSIONS = {
    "arithmetic": lambda a, b: (a + b, a - 2, 3 - a, a * b, 7 * a, -a, a // 3, 100 // b, a % 7, a / b, 1 / b, -(-a // b)),
    "bits": lambda a, b: ((a | 6) & 12, a & b | 1, 5 & a, 6 | b, a ^ 3, 1 << a, b << 2, (a * 64) >> b),
    "powers": lambda a, b: (a**2, 2**b, a**b, a**-0.5),
    "rounded": lambda a, b: (math.ceil(a / b), math.floor(7 / a), round(a / b), round(a / 3, 1), divmod(a, b), divmod(9, b)),
    "by other modules": lambda a, b: (math.sqrt(int(a % 2)), math.gcd(a, 6), math.prod([a, b, 2])),
    "a choice": lambda a, b: a if a > b else b + 1,
    "least and greatest": lambda a, b: (min(a, b, 9), max(a, 4), abs(a - b), sorted([a, b, 5])),
    "a table of what it may be": lambda a, b: min(d for d in (4, 16, 64) if d >= a % 60),
    "truth": lambda a, b: [1 if a % 2 else 2, not b % 3],
    "equality": lambda a, b: (a == b, a != 3, a in (1, 2, b)),
    "as a number": lambda a, b: [b] * (int(a % 3)) + list(range(a % 2)),
    "as a float": lambda a, b: float(a % 2) + b,
    "a call": lambda a, b: watched_call(struct.pack, "<qd", a + b, 0.5),
    "a block of numbers": lambda a, b: watched_call(BLOCK.pack, 5, a, -7, a * b, 9, 1, 2, 0.5, b, 1),
    "aligned as the machine does": lambda a, b: watched_call(struct.Struct("iq").pack, 1, a),
    "neutral elements": lambda a, b: (a * 1, b * (a * 1), 1 * a + a * 1, a / 1, 0 * a + b),
    "a call in a call": lambda a, b: watched_call(divmod, watched_call(pow, a, 2), b),
    "what does not depend": lambda a, b: (watched_call(pow, 2, 3), a * 0, "text", None, True),
    "a sum": lambda a, b: sum([a, b, a * b], 5),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
@given(st.data())
def test_a_function_of_lengths(name, data):
    planner, number = EXPRESSIONS[name], st.integers(1, 12)
    first, second = (data.draw(st.tuples(number, number)) for _ in range(2))
    function = watched(planner, *first)
    assert function(first) == planner(*first)
    assert function(second) in (None, planner(*second))
    narrowed = narrowed_to_first(planner, *first)
    assert narrowed(first[0]) == planner(*first) and narrowed(second[0]) in (None, planner(second[0], first[1]))


def test_constants_of_a_block_are_packed_before():
    function = narrowed_to_first(EXPRESSIONS["a block of numbers"], 4, 3)
    assert function(11) == BLOCK.pack(5, 11, -7, 33, 9, 1, 2, 0.5, 3, 1)
    assert [type(constant) for constant in function.__code__.co_consts].count(bytes) == 3, "before, between and behind two"


def test_it_holds_where_all_questions_are_answered_alike():
    function = watched(lambda a, b: a * 2 if a > 64 and a % 2 == 0 else b, 100, 3)
    assert [function((a, 3)) for a in (66, 64, 67, 1000)] == [132, None, None, 2000]


def test_a_number_that_was_asked_for_is_the_only_one():
    function = watched(lambda a, b: "x" * int(a) + str(int(b)), 2, 3)
    assert [function(pair) for pair in ((2, 3), (2, 4), (3, 3))] == ["xx3", None, None]


def test_what_refuses_lengths_refuses_them():
    """The planner, whose words the caller is to read, is asked then."""
    function = watched(lambda a, b: watched_call(struct.pack, "<i", a // b), 4, 2)
    assert function((4, 2)) == struct.pack("<i", 2) and function((2**40, 2)) is None and function((4, 0)) is None


class Pair(NamedTuple):
    first: object
    second: object


def test_tuples_keep_their_kind_and_constants_their_identity():
    thing = object()
    function = watched(lambda a: Pair([a, (a + 1, thing)], Pair(thing, {"x": 1})), 1)
    actual = function((5,))
    assert actual == Pair([5, (6, thing)], Pair(thing, {"x": 1})) and type(actual.second) is Pair
    assert actual.first is not function((5,)).first, "lists are made anew"


def test_nothing_is_computed_that_nobody_uses():
    calls = []
    function = watched(lambda a: (watched_call(lambda n: calls.append(n), a), a + 1)[1], 1)
    assert function((3,)) == 4 and calls == [1]


def test_a_watched_function_searches_once_for_what_lengths_share():
    """Also where the generated function calls it."""
    searched = []

    @watched_function
    def search(tiles: int) -> int:
        searched.append(tiles)
        return 2 * tiles

    function = watched(lambda n: search(-(-n // 64)), 100)
    assert [function((n,)) for n in (65, 128, 129, 100)] == [4, 4, 6, 4] and searched == [2, 3]


def test_lengths_do_not_get_into_tables():
    """They would be found there by others, long after."""
    looked_up = functools.cache(lambda n: n)
    for look in (lambda a: looked_up(a), lambda a: {1: 2}[a], lambda a: {a}):
        with pytest.raises(Untraceable, match="cannot be looked up"):
            watched(look, 1)
    assert watched(lambda a: looked_up(int(a)), 1)((1,)) == 1


def test_a_function_that_follows():
    """Is called again, with numbers; without lengths it is an ordinary one."""
    calls = []

    @watched_function
    @functools.cache
    def search(n, limit):
        """The greatest divisor of n up to a limit."""
        calls.append((n, limit))
        return next(k for k in range(limit, 0, -1) if n % k == 0)

    function = watched(lambda a: (search(a, 10), search(a * 2, 3)) if search(a, 4) > 1 else 0, 8)
    assert function((18,)) == (9, 3) and function((7,)) is None and search(12, 5) == 4
    assert all(type(n) is int for call in calls for n in call) and search.__doc__.startswith("The greatest divisor")


def test_equal_lengths_are_one():
    """So that what follows from one of them is computed once."""
    trace = Trace()
    a, b, c = (trace.variable(f"n{k}", 6) for k in range(3))
    assert a == b and b == c
    assert (a + b).text == (b + c).text and c == 6 and c * 2 == 12 and not isinstance(c * 2, Length)
    function = trace.function("n0, n1, n2", b)
    assert [function(triple) for triple in ((6, 6, 6), (6, 7, 6), (6, 6, 7), (7, 7, 7))] == [6, None, None, None]


def test_messages_show_what_it_is():
    assert repr(Trace().variable("n3", 5) + 1) == "v0=6"


def test_blocks_that_stay():
    """How many there are is followed: fewer tiles than blocks and more of them have one plan. The interpreter has 3
    multiprocessors."""
    x = np.zeros(4, np.float32)
    for more, limit in (((), 3), ((2,), 6), ((1, 2), 2)):
        trace = Trace()
        count = persistent_blocks(trace.variable("n0", 1), x, *more)
        actual = trace.function("n0,", count)
        cluster = more[1] if len(more) > 1 else 1
        assert [actual((n,)) for n in (1, 2, 100)] == [min(cluster * n, limit) for n in (1, 2, 100)]
        assert persistent_blocks(100, x, *more) == limit
