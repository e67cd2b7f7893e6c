"""The processes that work together: which one this is of how many, and how they exchange tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

F = TypeVar("F", bound=Callable)
GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its older name


def disable_compile(function: F) -> F:
    """Decorator: torch.compile breaks its graph where the function is called, and does not look inside, where messages are."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    made = cast(F, call)
    made.__code__ = made.__code__.replace(co_name=function.__name__)  # of its own: Dynamo counts what it compiles of each
    return made


class PendingMessages:
    """Messages under way. They keep the arrays that they read alive until they are waited for."""

    def __init__(self, works: Sequence[Any], held: Sequence[Any] = ()):
        self.works, self.held = works, held

    def wait(self) -> None:
        """Wait until they have arrived; on a GPU the current stream waits, not the host."""
        for work in self.works:
            work.wait()
        self.works, self.held = (), ()


@dataclass(frozen=True)
class Peers:
    """A process group as this rank sees it; `group` is None where there is this rank alone."""

    group: Any
    rank: int
    world: int
    ranks: tuple[int, ...]  # their global ones

    def __hash__(self):
        return hash(self.group)  # called for every call, so it covers no more than tells groups apart

    def exchange(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> PendingMessages:
        """Send these contiguous tensors, and receive into those: each a pair (rank, tensor). What a rank sends to another the
        latter receives in that order. All are one message of NCCL's, on its own stream behind the current one."""
        held = [tensor for _, tensor in (*sends, *receives)]
        # both sides leave out empty tensors
        sends, receives = ([one for one in todo if one[1].numel()] for todo in (sends, receives))
        if not sends and not receives:
            return PendingMessages(())
        backend = _coalescing_backend(self.group, held[0].device)
        if backend is None:
            return PendingMessages(dist.batch_isend_irecv(self._operations(sends, receives)), held)
        return PendingMessages(_exchange_coalesced(backend, sends, receives), held)

    @property
    def device(self) -> Any:
        """That of a message of a rank that has no tensors."""
        on_gpu = self.group is not None and "cuda" in dist.get_backend_config(self.group) and torch.cuda.is_available()
        return torch.device("cuda" if on_gpu else "cpu")

    @property
    def maps(self) -> bool:
        """Do rows come by `bring` now? See mapped.py."""
        return False

    @property
    def overlaps_copies(self) -> bool:
        """May attention read by `arrive` what is still being copied? See mapped.py."""
        return False

    def start_copies(self, arrival: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """(keys, values, how many copies are done), of those that an Arrival says are on their way."""
        raise NotImplementedError

    def pull_rows(self, routes: Sequence[tuple[Any, Any, Sequence[Any]]]) -> PendingMessages:
        """Of each array, of a batch of one, by its Way, the rows that others have to their places in another."""
        raise NotImplementedError

    def _operations(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> list[Any]:
        """The same as torch.distributed says it."""
        operations = []
        for operation, todo in (dist.isend, sends), (dist.irecv, receives):
            tags = [0] * self.world
            for rank, tensor in todo:
                operations.append(dist.P2POp(operation, tensor, self.ranks[rank], self.group, tags[rank]))
                tags[rank] += 1
        return operations

    def all_gather_bytes(self, said: bytes, device: Any) -> list[bytes]:
        """What each rank says, as many bytes."""
        mine = torch.frombuffer(bytearray(said), dtype=torch.uint8).to(device)
        return [bytes(x.cpu().tolist()) for x in self.all_gather(mine)]

    def all_gather(self, x: Any) -> Sequence[Any]:
        """Each rank's tensor of this shape, which has elements."""
        found = x.new_empty((self.world * x.shape[0], *x.shape[1:]))
        GATHER(found, x, group=self.group)
        return found.chunk(self.world)

    def all_gather_text(self, text: str) -> list[str]:
        """What each rank says."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, text, group=self.group)
        return found


@functools.lru_cache(64)
def _coalescing_backend(group: Any, device: Any) -> Any:
    """What sends a group's tensors, if it makes one message of many: by itself it takes a third of the host's time that
    torch.distributed takes to call it. None: it is not known to."""
    try:
        backend = group._get_backend(device)
    except (AttributeError, RuntimeError):
        return None
    calls = "_start_coalescing", "_end_coalescing", "send", "recv"
    serves = getattr(backend, "supports_coalescing", False) and all([hasattr(backend, name) for name in calls])
    return backend if serves and device.type == "cuda" else None


def _exchange_coalesced(backend: Any, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> tuple[Any, ...]:
    """batch_isend_irecv without its checks, which take a GPU's host longer than all else of a call."""
    backend._start_coalescing()
    for rank, tensor in sends:
        backend.send([tensor], rank, 0)
    for rank, tensor in receives:
        backend.recv([tensor], rank, 0)
    return (backend._end_coalescing(),)


SINGLE_RANK = Peers(None, 0, 1, (0,))


def peers_of(group: Any) -> tuple[Peers, ...]:
    """The Peers of a process group, of each dimension of a DeviceMesh, or of all processes for None; each of a tuple of these
    is a dimension, too; Peers are what they are. TypeError, ValueError, RuntimeError."""
    if group is None:
        return (_peers(dist.group.WORLD),) if dist.is_initialized() else (SINGLE_RANK,)
    if isinstance(group, Peers):
        return (group,)
    if isinstance(group, tuple):
        return tuple([one for part in group for one in peers_of(part)])
    if hasattr(group, "mesh_dim_names") and hasattr(group, "get_group"):
        return tuple([_peers(group.get_group(dim)) for dim in range(group.ndim)])
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: this process is not one of its ranks: only these call what works on the group")
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
    """TypeError, by its name: an array that torch's processes cannot exchange."""
    for name, x in arrays.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: must be a tensor of torch, by whose processes arrays travel, not {type(x).__name__}")
        if hasattr(x, "to_local"):
            raise TypeError(f"{name}: must be this rank's share, and is a DTensor: pass {name}.to_local()")


def one_dimensional_peers(group: Any) -> Peers:
    """The Peers of what must have one dimension. ValueError."""
    found = peers_of(group)
    if len(found) != 1:
        raise ValueError(f"group: must have one dimension here, a process group or one of a DeviceMesh's: it has {len(found)}")
    return found[0]
