"""tiles/compiling/host_code.py: a loop over calls of a C function, and the encoder of tensor maps that comes to use it."""

import ctypes
import mmap
import time

from tiles.compiling import host_code
from tiles.launching import tensor_maps

WORDS = 12


def noting(refused=()):
    """(the address of a C function of 12 words that notes its arguments and returns 7 for those in `refused`, the notes, the
    function, which must live)"""
    notes = []

    @ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * WORDS)
    def note(*arguments):
        notes.append(arguments)
        return 7 if arguments[0] in refused else 0

    return ctypes.cast(note, ctypes.c_void_p).value, notes, note


def records_of(count):
    words = (ctypes.c_uint64 * (WORDS * count))(*[2**33 * n + 5 for n in range(WORDS * count)])
    return ctypes.c_void_p(ctypes.addressof(words)), [tuple(words[WORDS * n : WORDS * (n + 1)]) for n in range(count)], words


def test_each_record_is_a_call_until_one_is_refused():
    (start, rows, _words) = records_of(5)
    for refused, count, calls, status in [((), 5, 5, 0), ((), 0, 0, 0), ((rows[2][0],), 5, 3, 7), ((rows[4][0],), 4, 4, 0)]:
        address, notes, _note = noting(refused)
        assert host_code.compile_loop(address, WORDS)(start, count) == status
        assert notes == rows[:calls]


def test_no_loop_where_memory_must_not_be_executable(monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError

    monkeypatch.setattr(mmap, "mmap", refuse)
    address, *_ = noting()
    assert host_code.compile_loop(address, WORDS) is None


def test_an_encoder_takes_the_loop_after_the_first_calls():
    (start, rows, _words), (address, notes, _note) = records_of(3), noting()
    encoder = tensor_maps.MapEncoder(address)
    one_by_one = encoder.encode_records
    for _ in range(tensor_maps.ONE_BY_ONE):
        assert encoder.encode_records(start, 3) == 0
    waited = time.monotonic()
    while encoder.encode_records == one_by_one and time.monotonic() < waited + 60:
        time.sleep(0.01)
    assert encoder.encode_records != one_by_one and notes == rows * tensor_maps.ONE_BY_ONE
    notes.clear()
    assert encoder.encode_records(start, 3) == 0 and notes == rows


def test_an_encoder_says_what_was_refused():
    """One by one as by the loop."""
    (start, rows, _words) = records_of(3)
    address, notes, _note = noting((rows[1][0],))
    assert tensor_maps.MapEncoder(address).encode_records(start, 3) == 7 and notes == rows[:2]
