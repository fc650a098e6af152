"""What ranks that share one computation do with each other's tensors, with gradients.

Where forward leaves every rank with the same tensor, backward leaves every rank with the whole gradient of what it gave
(Shoeybi et al. 2019, arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Peers(Protocol):
    """The ranks that share one computation. Every one of them must make the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum_(self, tensor: Tensor) -> None:
        """Adds up over the ranks, in place. The result is the same on every rank, bit for bit."""
        ...

    def gather(self, tensor: Tensor) -> Sequence[Tensor]:
        """Every rank's tensor, by rank. They must have one shape."""
        ...


@dataclass(frozen=True, slots=True)
class GroupPeers:
    """The ranks of a process group."""

    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def sum_(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)

    def gather(self, tensor: Tensor) -> Sequence[Tensor]:
        everyone = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(everyone, tensor, group=self.group)
        return everyone


def replicated(x: Tensor, peers: Peers) -> Tensor:
    """x itself, which is the same on every rank. Each rank uses it in its own way: the gradients add up."""
    return _Replicated.apply(x, peers)


def summed(x: Tensor, peers: Peers) -> Tensor:
    """The sum of all ranks' x."""
    return _Summed.apply(x, peers)


def joined(x: Tensor, peers: Peers) -> Tensor:
    """All ranks' x, [..., n], one after the other: [..., n * ranks]. Everyone must use the result in the same way."""
    return _Joined.apply(x, peers)


def own_part(x: Tensor, peers: Peers) -> Tensor:
    """This rank's features of x, which is the same on every rank: [..., n * ranks] to [..., n]."""
    return _OwnPart.apply(x, peers)


def shared_gradient(x: Tensor, peers: Peers) -> Tensor:
    """x itself. Every rank computes the whole gradient; each keeps its share of it, so that the sum is right."""
    return _SharedGradient.apply(x, 1 / peers.size)


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return _sum(grad_outputs[0], ctx.peers), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        return _sum(x, peers)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return torch.cat(list(peers.gather(x.contiguous())), -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return _part(grad_outputs[0], ctx.peers), None


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return _part(x, peers).contiguous()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return torch.cat(list(ctx.peers.gather(grad_outputs[0].contiguous())), -1), None


class _SharedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        ctx.share = share
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0] * ctx.share, None


def _sum(x: Tensor, peers: Peers) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    peers.sum_(total)
    return total


def _part(x: Tensor, peers: Peers) -> Tensor:
    return x.chunk(peers.size, -1)[peers.rank]
