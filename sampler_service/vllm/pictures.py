"""Pictures on their way to vLLM's workers, and prompts that contain them.

vLLM's own processor of pictures never runs: prompts come to vLLM with the tokens of their pictures in place, and with
the place of each. The scaled pixels go to the workers once for all samples of a request, and each worker makes its
tower's inputs of them (picture_inputs.py).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sampler_service.vllm.versions import Rpc
from tinsmith.modeling.config import load_config
from tinsmith.modeling.tower import PlacedPicture
from tinsmith.pictures.counting import ByArea
from tinsmith.pictures.families import family_of
from tinsmith.pictures.processing import Picture, Processor

NUMBER = "tinsmith_picture"
"""Field of an item of vLLM's that has the number by which the workers know the picture."""
MODALITY = "image"


@dataclass(slots=True)
class _Held:
    """A picture that the workers have, or that is on its way to them."""

    number: int
    sent: asyncio.Future[Any]
    users: int = 0


class WorkerPictures:
    """Tells the workers which pictures come and go. A number is never used again."""

    def __init__(self, rpc: Rpc) -> None:
        self._rpc = rpc
        self._numbers = itertools.count(1)
        self._held: dict[bytes, _Held] = {}
        """The pictures that the workers have, by digest."""
        self._leaving: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def held(self, placed: Sequence[PlacedPicture]) -> AsyncIterator[Sequence[int]]:
        """A context in which the workers have these pictures, under the numbers that it gives."""
        helds = [self._hold(one.picture) for one in placed]
        try:
            for one in helds:
                await asyncio.shield(one.sent)
            yield [one.number for one in helds]
        finally:
            for one, where in zip(helds, placed, strict=True):
                self._release(where.picture.digest, one)

    def _hold(self, picture: Picture) -> _Held:
        held = self._held.get(picture.digest)
        if held is None:
            number, pixels = next(self._numbers), picture.pixels
            sending = asyncio.ensure_future(
                self._rpc("tinsmith_take_picture", number, list(pixels.shape), pixels.tobytes())
            )
            held = self._held[picture.digest] = _Held(number, sending)
        held.users += 1
        return held

    def _release(self, digest: bytes, held: _Held) -> None:
        held.users -= 1
        if not held.users:
            del self._held[digest]
            leaving = asyncio.create_task(self._forget(held))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

    async def _forget(self, held: _Held) -> None:
        try:
            await held.sent
            await self._rpc("tinsmith_forget_picture", held.number)
        except Exception:  # noqa: S110 - the engine has died, and all it knew with it
            pass


def load_processor(path: str) -> Processor:
    """The processor in the files of a base model that takes pictures."""
    config = load_config(path)
    return Processor.load(path, family_of(config), config)


def picture_prompt(
    tokens: list[int],
    placed: Sequence[PlacedPicture],
    numbers: Sequence[int],
    *,
    processor: Processor,
    base_weights: int,
    cache_salt: str | None,
) -> Any:
    """A prompt with pictures, as vLLM takes it. `numbers`: numbers by which the workers know the pictures.
    `base_weights`: number of the base weights, on which the features of a picture depend."""
    from vllm.inputs.engine import mm_input  # pyright: ignore[reportMissingImports]
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange  # pyright: ignore[reportMissingImports]

    items = [_item(one.picture, number, processor) for one, number in zip(placed, numbers, strict=True)]
    return mm_input(
        tokens,
        MultiModalKwargsItems({MODALITY: items}),
        # The names of the pictures in vLLM's prefix cache, and in its cache of features.
        {MODALITY: [f"{base_weights}:{one.picture.digest.hex()}" for one in placed]},
        {
            MODALITY: [
                PlaceholderRange(one.start, one.picture.num_tokens, is_embed=_seen(one.picture, processor))
                for one in placed
            ]
        },
        cache_salt=cache_salt,
    )


def _seen(picture: Picture, processor: Processor) -> torch.Tensor | None:
    """Which of its tokens get features, where others end its rows; None if all do."""
    is_seen = picture.tokens == processor.picture_token
    return None if is_seen.all() else torch.from_numpy(is_seen)


def _item(picture: Picture, number: int, processor: Processor) -> Any:
    """The fields of a picture that vLLM reads before the tower runs: its number and, with M-RoPE, its rows and columns
    of patches."""
    arrays = {NUMBER: torch.tensor([number])}
    if picture.grid is not None and isinstance(processor.counting, ByArea):
        rows, columns = (processor.counting.merge_size * one for one in picture.grid)
        arrays["image_grid_thw"] = torch.tensor([1, rows, columns])
    return item_of(arrays, stacked=arrays.keys(), on_host=arrays.keys())


def item_of(arrays: Mapping[str, torch.Tensor], *, stacked: Any, on_host: Any) -> Any:
    """An item of vLLM's. In a batch of pictures vLLM stacks the arrays of the names `stacked`, and joins others. It
    brings those to the device which are not `on_host`."""
    from vllm.multimodal.inputs import (  # pyright: ignore[reportMissingImports]
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalFlatField,
        MultiModalKwargsItem,
    )

    fields = {
        name: (
            MultiModalBatchedField(keep_on_cpu=name in on_host)
            if name in stacked
            else MultiModalFlatField(slices=[slice(None)])
        )
        for name in arrays
    }
    return MultiModalKwargsItem(
        {name: MultiModalFieldElem(data=one, field=fields[name]) for name, one in arrays.items()}
    )
