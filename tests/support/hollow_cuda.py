"""A CUDA device that computes nothing, for a build of torch without CUDA: tensors there have a shape, a type and a
place, and no values.

Every operation goes through torch's own rules for it (torch._subclasses.fake_tensor): that devices and types go
together, and what kernels ask of their arguments as far as torch knows it without them, such as the alignment of
grouped products. Host tensors are real. Values that come to the host from the device are made up:
`HollowCuda.integer`, zero, or true.

It cannot tell whether a value is right, whether a kernel takes the arguments that torch lets through, whether a kernel
of Triton's compiles, or how long anything takes: tests/gpu is for that.
"""

from __future__ import annotations

import ctypes
import traceback
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("cuda", 0)

aten = torch.ops.aten

_ROOT = Path(__file__).parents[2]
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
"""By type of device: who changes between devices of it. Autograd asks even for a device that nothing runs on."""
_CUDA, _META = 1, 14
"""c10::DeviceType"""


_OF_ONE_TYPE = {
    aten.mm, aten.addmm, aten.addmm_, aten.bmm, aten.baddbmm, aten.baddbmm_, aten._grouped_mm,
    aten.index_put, aten.index_put_, aten.index_add, aten.index_add_,
}  # fmt: skip
"""Operations whose floating-point tensors must have one type, which torch's rules do not say."""


class HollowCuda(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode()
        self.integer = 1
        """Value of every integer that comes from the device."""
        self.waits: Counter[str] = Counter()
        """Functions of this repository in which the host waits for the device, for a value or for the end of a copy."""
        self._pinned: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.is_inference_mode_enabled() and func.namespace == "aten" and func._can_decompose():
            with self:  # in inference mode nobody else takes operations apart
                return func.decompose(*args, **kwargs)
        if func in (aten.pin_memory.default, aten._pin_memory.default):
            with unset_fake_temporarily():
                return self._pin(args[0].clone())
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "meta":  # what a "cuda" without a number becomes here
            device = kwargs["device"] = DEVICE
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_here = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        makes_here = device is not None and torch.device(device).type == "cuda"
        if kwargs.pop("pin_memory", False):
            with unset_fake_temporarily():
                return self._pin(torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype))
        if not is_here and not makes_here:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return self._on_device(func, tensors, args, kwargs)

    def _on_device(self, func: Any, tensors: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
        if func is aten._local_scalar_dense.default:
            self._wait()
            return self._made_up(args[0].dtype)
        on_host = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]
        if any(x.dim() and x.untyped_storage() not in self._pinned for x in on_host):
            self._wait()  # such memory may be paged out: the driver copies it on the spot
        if func is aten.copy_.default and on_host and on_host[0] is args[0]:
            self._wait()
            assert args[0].shape == args[1].shape
            with unset_fake_temporarily():
                return args[0].fill_(self._made_up(args[0].dtype))
        dtypes = {tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point}
        if func.overloadpacket in _OF_ONE_TYPE and len(dtypes) > 1:
            raise RuntimeError(f"{func}: tensors of {dtypes}, which must be of one dtype")
        args, kwargs = tree_map_only(Tensor, self._faked, (args, kwargs))
        return tree_map_only(FakeTensor, self._arrived, func(*args, **kwargs))

    def _faked(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.fake.from_tensor(tensor, static_shapes=True)

    def _arrived(self, tensor: FakeTensor) -> Tensor:
        if tensor.device.type != "cpu":
            return tensor
        self._wait()
        with unset_fake_temporarily():
            return torch.full(tensor.shape, self._made_up(tensor.dtype), dtype=tensor.dtype)

    def _made_up(self, dtype: torch.dtype) -> Any:
        return True if dtype == torch.bool else 0.0 if dtype.is_floating_point else self.integer

    def _pin(self, tensor: Tensor) -> Tensor:
        self._pinned.add(tensor.untyped_storage())
        return tensor

    def _wait(self) -> None:
        here = [frame for frame in traceback.extract_stack() if _is_ours(Path(frame.filename))]
        frame = next(frame for frame in reversed(here) if frame.filename != __file__)
        self.waits[f"{Path(frame.filename).relative_to(_ROOT)}: {frame.name}"] += 1


def _is_ours(path: Path) -> bool:
    """The environment may lie within the repository."""
    return path.is_relative_to(_ROOT) and "site-packages" not in path.parts


@contextmanager
def hollow_cuda(monkeypatch: pytest.MonkeyPatch, *, capability: tuple[int, int] = (9, 0)) -> Iterator[HollowCuda]:
    """Until the end of the `with` block, torch has one CUDA device, of an H100's capability."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 << 30, 5 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.autograd, "grad", _grad)
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, _GUARDS)
    mode = HollowCuda()
    with ExitStack() as leaving:
        leaving.callback(guards.__setitem__, _CUDA, guards[_CUDA])
        guards[_CUDA] = guards[_META]
        leaving.enter_context(mode.fake)
        leaving.enter_context(mode)
        yield mode


def _grad(outputs: Tensor, inputs: Sequence[Tensor], *, allow_unused: bool = False) -> tuple[Tensor | None, ...]:
    """torch.autograd.grad of a number. torch's own asks for a stream of the device, of which there is none: so its
    nodes are called here, one by one, and what each returns is made what the next one was promised, as there."""
    followers: Counter[Any] = Counter()
    seen, stack = set(), [outputs.grad_fn]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for below, _ in node.next_functions:
            if below is not None:
                followers[below] += 1
                stack.append(below)
    arrived: dict[Any, dict[int, Tensor]] = {outputs.grad_fn: {0: torch.ones_like(outputs)}}
    leaves: dict[int, Tensor] = {}
    ready = [outputs.grad_fn]
    while ready:
        node: Any = ready.pop()
        edges = node.next_functions
        for (below, place), grad in zip(edges, _called(node, arrived.pop(node, {}), leaves), strict=True):
            if below is None:
                continue
            if grad is not None:
                with torch.no_grad():
                    there = arrived.setdefault(below, {})
                    there[place] = grad if place not in there else there[place] + grad
            followers[below] -= 1
            if not followers[below]:
                ready.append(below)
    grads = tuple(leaves.get(id(one)) for one in inputs)
    assert allow_unused or None not in grads
    return grads


def _called(node: Any, arrived: dict[int, Tensor], leaves: dict[int, Tensor]) -> Sequence[Tensor | None]:
    """The gradients that a node of autograd's graph gives to its next_functions, one each."""
    if not arrived:
        return [None] * len(node.next_functions)
    promised = node._input_metadata if hasattr(node, "_input_metadata") else [node.variable]
    with torch.no_grad():
        grads = [
            arrived[n].to(meta.dtype).sum_to_size(tuple(meta.shape)) if n in arrived else None
            for n, meta in enumerate(promised)
        ]
        assert all(grad is None or grad.device == meta.device for grad, meta in zip(grads, promised, strict=True))
        if type(node).__name__ == "AccumulateGrad":
            leaves |= {id(node.variable): grad for grad in grads if grad is not None}
            return []
        if not isinstance(node, torch._C._FunctionBase):
            returned = node(*grads)
            return returned if isinstance(returned, tuple) else [returned]
        # A torch.autograd.Function takes no None, and returns a value for arguments that are no tensors, too.
        function: Any = node
        returned = function.apply(*(
            torch.zeros(tuple(meta.shape), dtype=meta.dtype, device=meta.device) if grad is None else grad
            for grad, meta in zip(grads, promised, strict=True)
        ))  # fmt: skip
    wanted = iter(
        grad
        for grad, needed in zip(
            returned if isinstance(returned, tuple) else [returned], node.needs_input_grad, strict=True
        )
        if needed
    )
    return [None if below is None else next(wanted) for below, _ in node.next_functions]
