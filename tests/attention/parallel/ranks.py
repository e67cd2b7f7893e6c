"""The processes that tests of attention.parallel start: every rank runs `body`. Many cases share one spawn, because imports
take longer than the cases. A failed assertion ends all processes, and its message is reported."""

import os
import socket
import sys
import traceback
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import attention
from attention import parallel, reference

PATIENCE = 120  # seconds that ranks wait for each other


def start(world, body, backend="gloo"):
    """Run body(world) in so many processes."""
    with _path():
        mp.spawn(_rank, args=(world, body, backend, _free_port()), nprocs=world)


class Waiting:
    """Processes that run several bodies one after the other, so that they import and initialise once."""

    def __init__(self, world, backend):
        self.world, self.backend, self.processes = world, backend, []

    def run(self, body):
        """Run body(world) in all processes. An exception in one of them ends all of them and is reported."""
        if not self.processes:
            context = mp.get_context("spawn")
            self.todo, self.done = [context.SimpleQueue() for _ in range(self.world)], context.Queue()
            inputs = self.world, self.backend, _free_port()
            with _path():
                for rank, todo in enumerate(self.todo):
                    one = context.Process(target=_rank_that_waits, args=(rank, todo, self.done, *inputs), daemon=True)
                    one.start()
                    self.processes.append(one)
        for todo in self.todo:
            todo.put(body)
        for _ in range(self.world):
            error = self.done.get(timeout=PATIENCE)
            if error:
                self.end()
                raise AssertionError(error)

    def end(self):
        """The processes are killed; the next use starts others."""
        for one in self.processes:
            one.kill()
            one.join()
        self.processes = []


def _rank_that_waits(rank, todo, done, world, backend, port):
    def bodies(world):
        while True:
            todo.get()(world)
            dist.barrier()
            done.put("")

    try:
        _rank(rank, world, bodies, backend, port)
    except BaseException:
        done.put(f"rank {rank}: {traceback.format_exc()}")
        raise


@contextmanager
def _path():
    """Inside, spawned processes find the modules of this directory."""
    path = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *sys.path, path])
    try:
        yield
    finally:
        os.environ["PYTHONPATH"] = path


def _free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _rank(rank, world, body, backend, port):
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    where = dict(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    dist.init_process_group(backend, timeout=timedelta(seconds=PATIENCE), **where)
    try:
        body(world)
        dist.barrier()  # nobody leaves while others still talk
    finally:
        dist.destroy_process_group()


def device():
    return "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"


def drawn(length, heads=2, kv_heads=1, dim=16, keys=None, seed=0, batch=1):
    """q, k and v of the whole sequence, the same on every rank."""
    torch.manual_seed(seed)
    shapes = [(batch, n, h, dim) for n, h in ((length, heads), (keys or length, kv_heads), (keys or length, kv_heads))]
    return [torch.randn(shape).bfloat16().to(device()) for shape in shapes]


def differentiated(function, arrays, dout, dlse, learned=()):
    """[out, lse, gradients of `arrays` and of `learned`] of a loss of both results, or of one, if the other's gradient is
    None."""
    inputs = [x.detach().clone().requires_grad_() for x in arrays]
    out, lse = function(*inputs)
    used = [(x, dx) for x, dx in ((out, dout), (lse, dlse)) if dx is not None]
    results, of_results = zip(*used)
    grads = torch.autograd.grad(results, [*inputs, *learned], of_results)
    return [out.detach(), lse.detach(), *grads]


def compared(length, scheme, group=None, order="zigzag", learned=(), keys=None, shapes=None, bitwise=(0, 1), **options):
    """A call on all ranks against the same call on one, out, lse and gradients: those of `bitwise`, by number, bit by bit. out
    of others is no further from float64 than 2.5 times what the call on one is. learned: options that have gradients; rows of a
    bias are this rank's."""
    q, k, v = whole = drawn(length, keys=keys, **shapes or {})
    dout, dlse = torch.randn_like(q), torch.randn(q.shape[0], q.shape[2], q.shape[1], device=q.device)
    share = partial(parallel.shard, group=group, order=order)
    local = {name: share(x, dim=2) if name == "bias" and x.shape[2] > 1 else x for name, x in options.items()}
    one = [x.requires_grad_() for x in (options[name] for name in learned)]
    mine = [local[name].detach().requires_grad_() for name in learned]
    local |= dict(zip(learned, mine))
    one_gpu = differentiated(lambda *x: attention.forward(*x, **options, return_lse=True), whole, dout, dlse, one)
    ranks = partial(parallel.forward, group=group, scheme=scheme, order=order, length=length, length_k=keys, return_lse=True)
    actual = differentiated(lambda *x: ranks(*x, **local), [share(x) for x in whole], share(dout), share(dlse, dim=2), mine)
    expected = [share(one_gpu[0]), share(one_gpu[1], dim=2), *[share(x) for x in one_gpu[2:5]], *one_gpu[5:]]
    for n, (x, y) in enumerate(zip(actual, expected)):
        said = f"{scheme} {order} of {length}, {[*options]}: result {n} on rank {dist.get_rank()}"
        if n > 4 and (learned[n - 5] != "bias" or y.shape[2] == 1):
            dist.all_reduce(x)
        elif n > 4:
            y = share(y, dim=2)
        if n in bitwise:
            assert torch.equal(x, y), f"{said}: {(x.float() - y.float()).abs().max()} of {y.abs().max()}"
        else:
            close = 2.0 ** (-6 if n < 5 else -5) * one_gpu[n].float().abs().max() if n != 1 else 2.0**-9  # 5: sums over rows
            error = (x.float() - y.float()).nan_to_num(0 if n == 1 else torch.nan).abs()  # of -inf and -inf
            assert (error <= close).all(), f"{said}: {error.max()} of {y.abs().max()}"
    if 0 not in bitwise:
        exact, _ = reference.forward(*[x.float().cpu().numpy() for x in (q, k, v)], **plain(options))
        exact = torch.from_numpy(exact).to(device())
        errors = [(x.double() - y).abs().max() for x, y in ((one_gpu[0], exact), (actual[0], share(exact))) if x.numel()]
        assert errors[-1] <= 2.5 * errors[0], f"{said}: {errors}"


def plain(options):
    """Options as the reference takes them."""
    arrays = {name: x.detach().cpu().numpy() for name, x in options.items() if isinstance(x, torch.Tensor)}
    aux = {"aux": tuple([x.cpu().numpy() for x in options["aux"]])} if "aux" in options else {}
    return {name: x for name, x in options.items() if name != "deterministic"} | arrays | aux


def integers(*values):
    return torch.tensor(values, dtype=torch.int32, device=device())


def numbers(*shape):
    return torch.from_numpy(np.random.default_rng(3).standard_normal(shape, np.float32)).to(device())
