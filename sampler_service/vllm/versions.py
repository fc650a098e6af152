"""Versions as the vLLM engine holds them: in shared memory, from where its workers load them when they are used."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import astuple
from typing import Any

from sampler_service.vllm.full import FullVersion
from sampler_service.vllm.shared_memory import SharedTensor
from tinsmith.errors import Unsupported
from tinsmith.modeling.adapter import Adapter

Rpc = Callable[..., Awaitable[list[Any]]]
"""Calls a method of the workers by its name, with arguments. Returns one result for each worker."""


class SharedAdapter(Adapter):
    """An adapter over shared memory, under the number that the workers know it by."""

    def __init__(self, adapter: Adapter, shared: SharedTensor, number: int) -> None:
        super().__init__(adapter.config, adapter.targets, shared.tensor)
        self.shared = shared
        self.number = number


class SharedFull(FullVersion):
    """All parameters in shared memory, under the number that the workers know them by."""

    def __init__(self, version: FullVersion, shared: SharedTensor, number: int) -> None:
        super().__init__(version.parameters, shared.tensor)
        self.shared = shared
        self.number = number


class WorkerVersions:
    """Tells the workers which versions come and go. No number is used twice, and so no name in vLLM's prefix cache."""

    def __init__(self, rpc: Rpc) -> None:
        self._rpc = rpc
        self._numbers = itertools.count(1)
        self._leaving: set[asyncio.Task[None]] = set()

    async def register(self, adapter: Adapter, shared: SharedTensor) -> SharedAdapter:
        """Once the workers know it."""
        resident = SharedAdapter(adapter, shared, next(self._numbers))
        specs = [(name, list(shape)) for name, shape in resident.specs()]
        handle = astuple(shared.handle)
        await self._rpc("tinsmith_register", resident.number, handle, specs, adapter.config.rank, adapter.scaling)
        return resident

    async def register_full(self, version: FullVersion, shared: SharedTensor) -> SharedFull:
        """Registers a full version, and returns once the workers know it. Raises Unsupported when vLLM cannot load such
        versions of this model."""
        resident = SharedFull(version, shared, next(self._numbers))
        columns = version.parameters.by_columns
        specs = [(name, list(shape), name in columns) for name, shape in resident.specs()]
        reasons = await self._rpc("tinsmith_register_full", resident.number, astuple(shared.handle), specs)
        if reason := next(filter(None, reasons), ""):
            await self._rpc("tinsmith_forget_full", resident.number)  # in workers that could load it
            raise Unsupported(no_full_versions(reason))
        return resident

    def forget(self, resident: SharedAdapter | SharedFull) -> None:
        """Called when no request uses a version any more. The workers forget it some time later."""
        leaving = asyncio.create_task(self._forget(resident))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def _forget(self, resident: SharedAdapter | SharedFull) -> None:
        method = "tinsmith_forget" if isinstance(resident, SharedAdapter) else "tinsmith_forget_full"
        try:
            await self._rpc(method, resident.number)
        except Exception:  # noqa: S110 - the engine has died, and all it knew with it
            pass
        finally:
            resident.shared.close()


def no_full_versions(reason: str) -> str:
    return (
        f"lora_config.rank: 0 (all parameters) is not served by the vLLM engine for this base model: {reason}; start "
        "the sampler with --engine torch"
    )
