"""The ranks of a process group, and how they exchange tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

F = TypeVar("F", bound=Callable)
GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the second is its older name


def disable_compile(function: F) -> F:
    """Decorator: torch.compile breaks its graph at this function, and does not trace into it, because it sends messages."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    wrapper = cast(F, call)
    # a code object of its own, because Dynamo limits the compilations of each
    wrapper.__code__ = wrapper.__code__.replace(co_name=function.__name__)
    return wrapper


class PendingMessages:
    """Messages that are still being sent or received. They keep the arrays that they read alive until `wait`."""

    def __init__(self, works: Sequence[Any], buffers: Sequence[Any] = ()):
        self.works, self.buffers = works, buffers

    def wait(self) -> None:
        """Wait until the messages have arrived; on a GPU the current stream waits, not the host."""
        for work in self.works:
            work.wait()
        self.works, self.buffers = (), ()


@dataclass(frozen=True)
class Peers:
    """A process group as this rank sees it. group: None for a single rank without torch.distributed. rank, world: this rank's
    number in the group, and how many ranks there are. ranks: their global ranks."""

    group: Any
    rank: int
    world: int
    ranks: tuple[int, ...]

    def __hash__(self):
        return hash(self.group)  # computed in every call, so it covers only the group

    def exchange(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> PendingMessages:
        """Send and receive contiguous tensors, each a pair (rank, tensor). What a rank sends to another arrives in that order.
        All messages are one NCCL group, on NCCL's own stream after the current one."""
        buffers = [tensor for _, tensor in (*sends, *receives)]
        # both ranks leave out empty tensors
        sends, receives = ([one for one in todo if one[1].numel()] for todo in (sends, receives))
        if not sends and not receives:
            return PendingMessages(())
        backend = _coalescing_backend(self.group, buffers[0].device)
        if backend is None:
            return PendingMessages(dist.batch_isend_irecv(self._operations(sends, receives)), buffers)
        return PendingMessages(_exchange_coalesced(backend, sends, receives), buffers)

    @property
    def device(self) -> Any:
        """The device of messages of a rank that has no tensors."""
        on_gpu = self.group is not None and "cuda" in dist.get_backend_config(self.group) and torch.cuda.is_available()
        return torch.device("cuda" if on_gpu else "cpu")

    @property
    def maps_memory(self) -> bool:
        """Do rows arrive by `pull_rows`, through mapped memory? See symmetric_memory.py."""
        return False

    @property
    def overlaps_copies(self) -> bool:
        """Can attention read keys while they are copied by `start_copies`? See symmetric_memory.py."""
        return False

    def start_copies(self, schedule: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """(keys, values, number of copies done) of other ranks, which are being copied as a CopySchedule says."""
        raise NotImplementedError

    def pull_rows(self, routes: Sequence[tuple[Any, Any, Sequence[Any]]]) -> PendingMessages:
        """For each (array, Redistribution, views of an output): start to copy the rows that other ranks hold to these views."""
        raise NotImplementedError

    def _operations(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> list[Any]:
        """The messages as torch.distributed's P2POps."""
        operations = []
        for operation, todo in (dist.isend, sends), (dist.irecv, receives):
            tags = [0] * self.world
            for rank, tensor in todo:
                operations.append(dist.P2POp(operation, tensor, self.ranks[rank], self.group, tags[rank]))
                tags[rank] += 1
        return operations

    def all_gather_bytes(self, data: bytes, device: Any) -> list[bytes]:
        """Each rank's `data`, as many bytes on all ranks."""
        local = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        return [bytes(x.cpu().tolist()) for x in self.all_gather(local)]

    def all_gather(self, x: Any) -> Sequence[Any]:
        """Each rank's tensor of this shape, which is not empty."""
        gathered = x.new_empty((self.world * x.shape[0], *x.shape[1:]))
        GATHER(gathered, x, group=self.group)
        return gathered.chunk(self.world)

    def all_gather_text(self, text: str) -> list[str]:
        """The texts of all ranks, this rank's being `text`."""
        texts: list[Any] = [None] * self.world
        dist.all_gather_object(texts, text, group=self.group)
        return texts


@functools.lru_cache(64)
def _coalescing_backend(group: Any, device: Any) -> Any:
    """The backend of a group's messages, if it can send many as one: calling it directly takes a third of the host time of
    torch.distributed's functions. None: this is not known of it."""
    try:
        backend = group._get_backend(device)
    except (AttributeError, RuntimeError):
        return None
    calls = "_start_coalescing", "_end_coalescing", "send", "recv"
    serves = getattr(backend, "supports_coalescing", False) and all([hasattr(backend, name) for name in calls])
    return backend if serves and device.type == "cuda" else None


def _exchange_coalesced(backend: Any, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> tuple[Any, ...]:
    """batch_isend_irecv without its checks, which take more host time than everything else in a call."""
    backend._start_coalescing()
    for rank, tensor in sends:
        backend.send([tensor], rank, 0)
    for rank, tensor in receives:
        backend.recv([tensor], rank, 0)
    return (backend._end_coalescing(),)


SINGLE_RANK = Peers(None, 0, 1, (0,))


def peers_of(group: Any) -> tuple[Peers, ...]:
    """The Peers of a process group, of each dimension of a DeviceMesh, or of all processes for None; each element of a tuple is
    a dimension, too; Peers are returned as they are. TypeError, ValueError, RuntimeError: it is none of these."""
    if group is None:
        return (_peers(dist.group.WORLD),) if dist.is_initialized() else (SINGLE_RANK,)
    if isinstance(group, Peers):
        return (group,)
    if isinstance(group, tuple):
        return tuple([one for part in group for one in peers_of(part)])
    if hasattr(group, "mesh_dim_names") and hasattr(group, "get_group"):
        return tuple([_peers(group.get_group(dim)) for dim in range(group.ndim)])
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: this process is not one of its ranks; only these may call functions with this group")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: must be a process group or a DeviceMesh of torch.distributed, or a tuple of two: {group=!r}")
    if not dist.is_initialized():
        raise RuntimeError("group: torch.distributed is not initialised: call init_process_group, or run under torchrun")
    return (_peers(group),)


@functools.lru_cache(64)
def _peers(group: Any) -> Peers:
    ranks = tuple(dist.get_process_group_ranks(group))
    return Peers(group, dist.get_rank(group), len(ranks), ranks)


def check_torch_tensors(**arrays: Any) -> None:
    """TypeError, with its name: an array is not a torch tensor, or is a DTensor."""
    for name, x in arrays.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: must be a torch tensor, because torch.distributed sends it, not {type(x).__name__}")
        if hasattr(x, "to_local"):
            raise TypeError(f"{name}: must be this rank's shard, and is a DTensor: pass {name}.to_local()")


def one_dimensional_peers(group: Any) -> Peers:
    """The Peers of a group that must have one dimension. ValueError."""
    dimensions = peers_of(group)
    if len(dimensions) != 1:
        raise ValueError(
            f"group: must have one dimension, a process group or a dimension of a DeviceMesh: it has {len(dimensions)}"
        )
    return dimensions[0]
