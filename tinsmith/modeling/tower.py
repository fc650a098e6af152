"""The vision tower of a base model. It computes features of pictures, which replace the embeddings of their tokens.

The tower's own weights are frozen, so the features of a picture never change, and are kept under the picture's digest.
An adapter of the group `vision` changes the features. A sampler keeps such features under the number of the version
that it samples from; the trainer computes them again, with gradients, in each pass.

Shapes: P tokens of pictures, F features of one token (its embedding, and one more for each early layer of the decoder
that takes further features, as in Qwen3-VL's "deepstack"), H hidden.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tinsmith.modeling.adapter_runs import ActiveRuns, Run
from tinsmith.modeling.attention import Ahead
from tinsmith.modeling.kernels.transfer import on_device
from tinsmith.modeling.pretrained import beside_text
from tinsmith.pictures.families import family_of
from tinsmith.pictures.processing import Picture, Processor

_KEPT_BYTES = 2**28
"""Most bytes of features that are kept, in host memory."""
_PIXELS_AT_ONCE = 2**20
"""Most pixels that the tower computes in one call, unless a single picture has more: 4,096 patches of 16 x 16."""
_PATCH_BYTES = 100_000
"""Memory that a patch takes while it is encoded, in bytes, in the largest towers of the Qwen family."""


@dataclass(frozen=True, slots=True)
class PlacedPicture:
    """A picture in a packed batch."""

    start: int
    """Row of its first token."""
    picture: Picture

    @property
    def stop(self) -> int:
        """Row after its last token."""
        return self.start + self.picture.num_tokens

    def whole(self, stop: int) -> int:
        """The last row, at most `stop`, at which a batch can be cut without cutting this picture. That is the picture's
        first row if its tokens see each other and `stop` lies within it, else `stop`."""
        return self.start if self.picture.sees_ahead and self.start < stop < self.stop else stop


@dataclass(frozen=True, slots=True)
class PictureFeatures:
    """The features of all pictures of a packed batch."""

    rows_P: Tensor
    """int64: rows of the tokens in the batch, in rising order."""
    features_P_F_H: Tensor
    """Features of the tokens, in the model's dtype and on its device."""
    numbers_P: Tensor
    """int64: number of each token's picture, from 0. Pictures of different sequences may share a number."""

    def within(self, start: int, stop: int) -> PictureFeatures | None:
        """The features of the rows from `start` to `stop`, numbered from 0; None if there are none."""
        chosen = (self.rows_P >= start) & (self.rows_P < stop)
        if not bool(chosen.any()):
            return None
        return PictureFeatures(self.rows_P[chosen] - start, self.features_P_F_H[chosen], self.numbers_P[chosen])

    def moved(self, rows: int) -> PictureFeatures:
        """The features of the same pictures, `rows` rows further on in the batch."""
        return PictureFeatures(self.rows_P + rows, self.features_P_F_H, self.numbers_P)

    @classmethod
    def joined(cls, parts: Sequence[PictureFeatures]) -> PictureFeatures:
        """The features of consecutive parts of a batch."""
        return cls(
            torch.cat([one.rows_P for one in parts]),
            torch.cat([one.features_P_F_H for one in parts]),
            torch.cat([one.numbers_P for one in parts]),
        )

    def options(self, embeddings_T_H: Tensor) -> Mapping[str, Any]:
        """The decoder's arguments for the batch, in place of token ids. `embeddings_T_H`: embeddings of the token
        ids."""
        placed = embeddings_T_H.index_copy(0, self.rows_P, self.features_P_F_H[:, 0])
        more = self.features_P_F_H[:, 1:].unbind(1)
        if not more:
            return {"inputs_embeds": placed[None]}
        mask = torch.zeros(len(placed), dtype=torch.bool, device=placed.device).index_fill_(0, self.rows_P, True)
        return {"inputs_embeds": placed[None], "visual_pos_masks": mask[None], "deepstack_visual_embeds": list(more)}


class Tower:
    """Encodes pictures. For one thread at a time."""

    def __init__(self, model: PreTrainedModel, processor: Processor) -> None:
        """`model`: the whole model, of which only the tower is run here."""
        self._model: Any = model.base_model
        self.processor = processor
        self.active = ActiveRuns()
        """The runs that the tower's adapted layers read."""
        self._kept: OrderedDict[tuple[int, bytes], Tensor] = OrderedDict()
        """Features in host memory, by version and digest; version 0 is the base model."""
        self._kept_bytes = 0

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The layers of the tower, and those between it and the language model, for activation checkpointing."""
        return [layer for _, part in beside_text(self._model) for layer in _listed_layers(part)]

    @property
    def patches_per_token(self) -> float:
        """Number of patches for each token, in a picture of a typical size."""
        width, height = self.processor.counting.typical()
        side = self._model.config.vision_config.patch_size
        across, down = (side, side) if isinstance(side, int) else side
        return width * height / (across * down) / self.examples(1)[0].picture.num_tokens

    def bytes_for(self, num_tokens: int) -> int:
        """Memory of `num_tokens` tokens of pictures in bytes, while they are encoded, and of their features."""
        (features_P_F_H,) = self.encode([self.examples(1)[0].picture])
        feature_bytes = features_P_F_H.nbytes // len(features_P_F_H)
        return round(num_tokens * (self.patches_per_token * _PATCH_BYTES + feature_bytes))

    def examples(self, count: int) -> list[PlacedPicture]:
        """`count` different pictures of a typical size, one after the other, for measurements."""
        width, height = self.processor.counting.typical()
        pixels = [np.full((height, width, 3), number % 256, np.uint8) for number in range(count)]
        pictures = [self.processor.of_pixels(one) for one in pixels]
        return [PlacedPicture(number * one.num_tokens, one) for number, one in enumerate(pictures)]

    def set_own_attention(self) -> None:
        """Gives the tower attention over its own patches. To be called after the whole model got the attention for
        packed text."""
        for _, module in beside_text(self._model):
            if isinstance(module, PreTrainedModel):
                module.set_attn_implementation("sdpa")

    def features_of(
        self, placed: Sequence[PlacedPicture], runs: Sequence[Run] = (), *, version: int = 0
    ) -> PictureFeatures:
        """The features of pictures, which are in rising order of their places. A picture that occurs twice in a run is
        encoded once.

        `runs`: their rows must be slices. An adapter with layers of the tower changes the pictures in its rows.
        `version`: number under which the features of adapted pictures are kept. It stands for weights of the adapters
        that never change; 0 if they change, or if there are no adapters.
        """
        runs = [run for run in runs if run.adapter.config.train_vision]
        runs_of = [next((run for run in runs if _is_within(one, run)), None) for one in placed]
        features: dict[tuple[int, bytes], Tensor] = {}
        for run in (None, *runs):
            pictures = {one.picture.digest: one.picture for one, its in zip(placed, runs_of, strict=True) if its is run}
            found = self._features(pictures, version=0) if run is None else self._adapted(pictures, run, version)
            features |= {(id(run), digest): one for digest, one in found.items()}
        rows_P = torch.cat([torch.arange(one.start, one.stop) for one in placed])
        numbers_P = torch.cat([torch.full((one.picture.num_tokens,), number) for number, one in enumerate(placed)])
        parts = [features[id(run), one.picture.digest] for one, run in zip(placed, runs_of, strict=True)]
        if len({one.device for one in parts}) > 1:  # features with gradients are on the device, kept ones on the host
            parts = [on_device(one, self.device) for one in parts]
        return PictureFeatures(*(on_device(one, self.device) for one in (rows_P, torch.cat(parts), numbers_P)))

    def ahead(self, picture_features: PictureFeatures, num_rows: int) -> Ahead | None:
        """The tokens of pictures that see each other in both directions, in a batch of `num_rows` rows. None for a
        model whose tokens see earlier tokens only."""
        where = self.processor.sees_ahead
        if not where:
            return None
        numbers_T = torch.full((num_rows,), -1, device=self.device).index_copy(
            0, picture_features.rows_P, picture_features.numbers_P
        )
        return Ahead(numbers_T, in_windows_only=where == "in windows")

    def inputs(self, pictures: Sequence[Picture]) -> dict[str, Tensor]:
        """The arguments of the model's `get_image_features` for some pictures, on the model's device."""
        known = inspect.signature(self._model.get_image_features).parameters
        arrays = self.processor.arrays(pictures)
        found = {name: torch.from_numpy(one) for name, one in arrays.items() if name in known}
        if self.processor.family.rounded:
            found = {name: one.to(self._model.dtype) if one.is_floating_point() else one for name, one in found.items()}
        return {name: on_device(one, self.device) for name, one in found.items()}

    @property
    def device(self) -> torch.device:
        return self._model.device

    @torch.no_grad()
    def _features(self, pictures: Mapping[bytes, Picture], *, version: int) -> Mapping[bytes, Tensor]:
        """The features of each picture, [P, F, H], in host memory. They are computed unless they are kept."""
        found = {digest: self._kept[version, digest] for digest in pictures if (version, digest) in self._kept}
        for digest in found:
            self._kept.move_to_end((version, digest))
        missing = [picture for digest, picture in pictures.items() if digest not in found]
        for group in self._groups(missing):
            for picture, features in zip(group, self.encode(group), strict=True):
                found[picture.digest] = features.cpu()
                self._keep((version, picture.digest), found[picture.digest])
        return found

    def _adapted(self, pictures: Mapping[bytes, Picture], run: Run, version: int) -> Mapping[bytes, Tensor]:
        """The features of each picture with a run's adapter, [P, F, H]. Features of a version are kept in host memory.
        Others are on the device, with gradients if gradients are enabled."""
        self.active.runs, self.active.every_row = [run], True
        try:
            if version and not torch.is_grad_enabled():
                return self._features(pictures, version=version)
            groups = list(self._groups(list(pictures.values())))
            return {
                picture.digest: features
                for group in groups
                for picture, features in zip(group, self.encode(group), strict=True)
            }
        finally:
            self.active.clear()

    def _groups(self, pictures: Sequence[Picture]) -> Iterator[list[Picture]]:
        """Divides pictures into groups that the tower computes in one call each."""
        group: list[Picture] = []
        for picture in pictures:
            if group and sum(one.pixels.size // 3 for one in (*group, picture)) > _PIXELS_AT_ONCE:
                yield group
                group = []
            group.append(picture)
        if group:
            yield group

    def encode(self, pictures: Sequence[Picture]) -> list[Tensor]:
        """The features of each picture, [P, F, H]."""
        output = self._model.get_image_features(**self.inputs(pictures), return_dict=True)
        levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        dtype = self._model.get_input_embeddings().weight.dtype
        together = torch.stack([_end_to_end(one) for one in levels], 1).to(dtype)
        seen = [one.tokens == self.processor.picture_token for one in pictures]
        found = together.split([int(one.sum()) for one in seen])
        return [self._with_ends(*one) for one in zip(found, pictures, seen, strict=True)]

    def _with_ends(self, features: Tensor, picture: Picture, seen: npt.NDArray[np.bool_]) -> Tensor:
        """The features of all tokens of a picture, [P, F, H]. Tokens that get no features have their embeddings.
        `seen`: whether each token gets features; `features`: the features of these tokens."""
        if seen.all():
            return features
        embedded = self._model.get_input_embeddings()(on_device(torch.from_numpy(picture.tokens), self.device))
        (rows,) = np.nonzero(seen)
        return embedded[:, None].index_copy(0, on_device(torch.from_numpy(rows), self.device), features)

    def _keep(self, key: tuple[int, bytes], features: Tensor) -> None:
        """Keeps features, and drops the oldest kept ones beyond _KEPT_BYTES."""
        self._kept[key] = features
        self._kept_bytes += features.nbytes
        while self._kept_bytes > _KEPT_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= oldest.nbytes


def _listed_layers(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists of modules."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _listed_layers(child)


def _is_within(placed: PlacedPicture, run: Run) -> bool:
    assert isinstance(run.rows, slice)
    return run.rows.start <= placed.start < run.rows.stop


def _end_to_end(features: Tensor | Sequence[Tensor]) -> Tensor:
    """The features of several pictures, end to end: [P, H]. Models return them as [pictures, tokens, H], as [P, H], or
    as a list with one tensor for each picture."""
    return features.flatten(0, -2) if isinstance(features, Tensor) else torch.cat(list(features))


def positions_with_pictures(lengths: Sequence[int], placed: Sequence[PlacedPicture], device: torch.device) -> Tensor:
    """Frame, row and column of each token, int64 [3, T], as M-RoPE counts them (arXiv:2409.12191, section 2.1).

    The three numbers of a token of text are equal, and so are those of a token of a picture without a grid. All tokens
    of a picture with a grid have the same frame, and its rows and columns are numbered from the number of the frame.
    The text after it continues after the larger number of rows and columns.
    """
    columns: list[np.ndarray] = []
    pictures = (one for one in placed if one.picture.grid is not None)
    following = next(pictures, None)
    start = 0
    for length in lengths:
        stop, at, position = start + length, start, 0
        while at < stop:
            here = stop if following is None else min(stop, following.start)
            columns.append(np.tile(np.arange(position, position + here - at), (3, 1)))
            position, at = position + here - at, here
            if following is not None and at == following.start and at < stop:
                grid = following.picture.grid
                assert grid is not None
                columns.append(np.indices((1, *grid)).reshape(3, -1) + position)
                position, at = position + max(grid), following.stop
                following = next(pictures, None)
        start = stop
    return on_device(torch.from_numpy(np.concatenate(columns, 1)), device)


def tower_of(model: PreTrainedModel, path: str) -> Tower:
    """The tower of a model, with the image processor in the model's files. Raises ValueError, with the reason, if there
    is no tower that can be used here."""
    family = family_of(model.config)
    return Tower(model, Processor.load(path, family, model.config))
