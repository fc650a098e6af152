"""Differentiable exchange of tensors between ranks that share one computation.

If forward leaves every rank with the same tensor, backward leaves every rank with the whole gradient of its input
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
    """The ranks that share one computation. Each of them must make the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum_(self, tensor: Tensor) -> None:
        """Replaces the tensor by its sum over the ranks. The result is bit-equal on all ranks."""
        ...

    def gather(self, tensor: Tensor) -> Sequence[Tensor]:
        """The tensors of all ranks, by rank. They must have the same shape."""
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
    """x itself, which is equal on every rank. Each rank uses it for another part of the computation, so backward sums
    the gradients of all ranks."""
    return _Replicated.apply(x, peers)


def summed(x: Tensor, peers: Peers) -> Tensor:
    """The sum of x over all ranks. Every rank gets the whole gradient."""
    return _Summed.apply(x, peers)


def joined(x: Tensor, peers: Peers) -> Tensor:
    """The x of all ranks, [..., n] each, side by side: [..., n * ranks]. All ranks must compute the same with it."""
    return _Joined.apply(x, peers)


def own_part(x: Tensor, peers: Peers) -> Tensor:
    """This rank's features of x, which is equal on every rank: [..., n * ranks] to [..., n]."""
    return _OwnPart.apply(x, peers)


def shared_gradient(x: Tensor, peers: Peers) -> Tensor:
    """x itself. Every rank computes the whole gradient of x, and backward multiplies it by 1 / ranks, so that the sum
    over the ranks is the gradient."""
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
