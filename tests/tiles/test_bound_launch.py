"""tiles/launching/bound_launch.py: which frame a launch is written to, and what is written anew."""

import ctypes
import sys
import threading

import numpy as np
import pytest
from cuda.bindings import driver
from host_driver import frames_of, on_device, takes
from kernels import scale

import tiles
from tiles import fp16, st
from tiles.launching import bound_launch as bound_launches
from tiles.targets import HOPPER, parse_target

launching = sys.modules["tiles.launching.launch"]


def bound_to_maps(gpu):
    q, x, gpu.count = on_device(64, 64, dtype=np.float16), on_device(8), 10
    tensors = [tiles.tensor(q, st(64, 64, fp16)), tiles.tensor(q, st(32, 64, fp16))]
    return tiles.launch(takes, 1, 32).bind(tensors[0], x, tensors[1], 7)


def test_maps_are_encoded_for_the_first_two_launches_and_moved_then(gpu, encoded):
    """Contents of a new length come once, mostly, and are not kept. The driver copies maps, aligned to 64 bytes, from the
    frame; what was written for an address is found again."""
    bound, first, second = bound_to_maps(gpu), (4096, 8192, 12288), (16, 32, 48)
    for addresses in (first, first, first, second, second, first):
        bound(3, *addresses)
        _, slots, _ = gpu.launches[-1]
        assert slots == [addresses[0], 0, 0, 8, 4, addresses[1], 8, 4, addresses[2], 7]
    assert [which for which, _ in encoded] == ["encode"] * 4 + ["move"] * 2
    assert [at for _, at in encoded] == [4096, 12288, 4096, 12288, 16, 48]
    for frame in frames_of(bound):
        pointers = (ctypes.c_uint64 * gpu.count).from_address(frame.pointers)
        maps = [pointers[0], pointers[8]]
        assert maps == [tensor_map.getPtr() for tensor_map in frame.maps] and all(place % 64 == 0 for place in maps)
        start, size = ctypes.addressof(frame.memory), ctypes.sizeof(frame.memory)
        assert all(start <= place < start + size for place in [*pointers, *(place + 127 for place in maps)])
    assert len(frames_of(bound)) == 2


def test_the_same_addresses_write_nothing(gpu, monkeypatch):
    """And other ones, without maps, nothing else."""
    x, gpu.count, written = on_device(16, 16), 19, []
    real = bound_launches.ParameterFrame.write_addresses
    monkeypatch.setattr(
        bound_launches.ParameterFrame, "write_addresses", lambda frame, what, at: written.append(at) or real(frame, what, at)
    )
    bound = tiles.launch(scale, 1, 32).bind(x, x, 2.0)
    bound(3, 16, 32), written.clear()  # its frame is not kept: it may be of a length that comes once
    for stream, *addresses in ((3, 16, 32), (3, 16, 32), (3, 16, 48), (4, 16, 48), (4, 16, 48), (3, 16, 48)):
        bound(stream, *addresses)
        assert gpu.launches[-1][:2] == (stream, [*gpu.launches[0][1][:4], addresses[0], *gpu.launches[0][1][5:13], addresses[1],
                                                 *gpu.launches[0][1][14:]])  # fmt: skip
    assert written == [(16, 32), (16, 48), (16, 48)] and len(frames_of(bound)) == 2


def test_a_list_of_addresses_that_changes_is_written(gpu):
    """It is no other list, and says other addresses."""
    x, gpu.count, addresses = on_device(16, 16), 19, [16, 32]
    bound = tiles.launch(scale, 1, 32).bind(x, x, 2.0)
    for addresses[1] in (32, 48, 48, 64):
        bound.run(0, addresses)
        assert (gpu.launches[-1][1][4], gpu.launches[-1][1][13]) == (16, addresses[1])


def test_inputs_that_take_turns_are_written_once(gpu, encoded, monkeypatch):
    """As many as frames are kept; of more the one used longest ago is forgotten, and its frame written anew."""
    bound, written, most = bound_to_maps(gpu), [], bound_launches.RECENT
    real = bound_launches.ParameterFrame.write
    monkeypatch.setattr(
        bound_launches.ParameterFrame, "write", lambda frame, *args: written.append(frame) or real(frame, *args)
    )
    bound(0, 0, 0, 0), written.clear()  # the first time no frame is kept
    for n in [*range(most), *range(most), 0, most, 0, 1, 2]:  # 0 was used a moment before `most` came, 1 was not
        bound(0, 4096 * n, 0, 0)
        assert gpu.launches[-1][1][0] == 4096 * n and len(frames_of(bound)) <= most
    assert len(written) == most + 3 and len(set(map(id, written))) == most


def test_a_launch_keeps_its_frame(gpu, encoded, monkeypatch, collect):
    """While the driver reads a frame, another thread that launches the same takes another one."""
    bound, real = bound_to_maps(gpu), driver.cuLaunchKernelEx

    def interrupted(*args):
        monkeypatch.setattr(driver, "cuLaunchKernelEx", real)
        other = threading.Thread(target=bound, args=(5, 160, 320, 480))
        other.start(), other.join()
        collect()
        return real(*args)

    bound(3, 16, 32, 48), bound(3, 16, 32, 48)
    monkeypatch.setattr(driver, "cuLaunchKernelEx", interrupted)
    bound(3, 1600, 3200, 4800)
    actual = [(stream, slots[0], slots[5], slots[8]) for stream, slots, _ in gpu.launches[1:]]
    assert actual == [(3, 16, 32, 48), (5, 160, 320, 480), (3, 1600, 3200, 4800)] and len(frames_of(bound)) == 3


def test_frames_are_limited(gpu):
    x, gpu.count = on_device(16, 16), 19
    bound = tiles.launch(scale, 1, 32).bind(x, x, 2.0)
    for k in range(100):
        bound(k % 7, 4096 * k, 8192 * k)
        assert len(frames_of(bound)) <= bound_launches.RECENT
    assert [(stream, slots[4], slots[13]) for stream, slots, _ in gpu.launches] == [
        (k % 7, 4096 * k, 8192 * k) for k in range(100)
    ]


@pytest.mark.parametrize(("overlaps", "target"), [(True, HOPPER), (False, HOPPER), (True, parse_target("sm_80"))])
def test_what_may_overlap_the_previous_launch(gpu, monkeypatch, overlaps, target):
    """A launch that says so, on a GPU that can."""
    monkeypatch.setattr(launching.device(0), "target", target)
    x, gpu.count = on_device(16, 16), 19
    tiles.launch(scale, 1, 32, overlaps_previous=overlaps).bind(x, x, 2.0)(3, 16, 32)
    assert gpu.launches[-1][2].numAttrs == (overlaps and target is HOPPER)


@pytest.mark.parametrize("context", [0, 99])
def test_maps_in_a_thread_without_the_context(gpu, encoded, context):
    """They are made in the GPU's own, and the other one comes back; so it is if a map must be moved there."""
    bound = bound_to_maps(gpu)
    for before, addresses in ((context, (16, 32, 48)), (1234, (160, 320, 480)), (context, (1600, 3200, 4800))):
        gpu.current = before
        bound(3, *addresses)
        assert gpu.current == before and not gpu.pushed
    assert [(slots[0], slots[5], slots[8]) for _, slots, _ in gpu.launches] == [
        (16, 32, 48), (160, 320, 480), (1600, 3200, 4800)
    ]  # fmt: skip


def test_an_error_of_the_driver_leaves_no_frame_half_written(gpu, encoded, monkeypatch):
    """What it refused is reported, once more in the GPU's own context, and what follows is right."""
    bound, ok = bound_to_maps(gpu), gpu.status
    monkeypatch.setattr(driver, "cuGetErrorName", lambda s: (ok, b"CUDA_ERROR_INVALID_VALUE"))
    monkeypatch.setattr(driver, "cuGetErrorString", lambda s: (ok, b"invalid argument"))
    bound(3, 16, 32, 48)
    for current in (1234, 0):
        gpu.status, gpu.current = driver.CUresult.CUDA_ERROR_INVALID_VALUE, current
        with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE: invalid argument"):
            bound(3, 160, 320, 480)
        with pytest.raises(ValueError, match="multiple of 16 bytes, got 0x8"):
            bound(3, 8, 320, 480)
        assert gpu.current == current and not gpu.pushed
        gpu.status, gpu.current = ok, 1234
        bound(3, 1600, 3200, 4800)
        _, slots, _ = gpu.launches[-1]
        assert (slots[0], slots[5], slots[8]) == (1600, 3200, 4800)


def test_threads_share_few_frames(gpu, monkeypatch):
    """However often they take turns in taking and adding them."""
    x, gpu.count, start = on_device(16, 16), 19, threading.Barrier(8)
    monkeypatch.setattr(bound_launches, "RECENT", 4)
    bound = tiles.launch(scale, 1, 32).bind(x, x, 2.0)
    before, failed = sys.getswitchinterval(), []
    sys.setswitchinterval(1e-6)

    def work(n):
        start.wait()
        try:
            for k in range(500):
                bound(n, 4096 * (k % 7), 16)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not failed and len(frames_of(bound)) <= 4 + 8 and len(gpu.launches) == 4000
    assert [slots[4] % 4096 for _, slots, _ in gpu.launches] == [0] * 4000
