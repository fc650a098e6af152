"""Runs a frozen Hugging Face causal LM over packed sequences with many adapters.

Shapes: T packed tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from tinsmith.allocator import blocks_at_page_starts
from tinsmith.errors import Unsupported
from tinsmith.modeling import preparation
from tinsmith.modeling.adaptation import decoder_layers, decoder_of, quantizable
from tinsmith.modeling.adapter import ALL_GROUPS, VISION, Group, Target, groups_of
from tinsmith.modeling.adapter_runs import ActiveRuns, Run
from tinsmith.modeling.attention import Layout, Packed
from tinsmith.modeling.capabilities import checked
from tinsmith.modeling.kernels.choice import PLAIN, Kernels, Setting, choose
from tinsmith.modeling.kernels.cpu import CPU
from tinsmith.modeling.kernels.transfer import on_device
from tinsmith.modeling.kv_cache import Cached, CachedTogether
from tinsmith.modeling.latent import compress
from tinsmith.modeling.logprobs import Head, target_logprobs
from tinsmith.modeling.padded import cached_batches, padded_batches, runs_within, uncached
from tinsmith.modeling.parallel import Division
from tinsmith.modeling.parallel_base import ShardedLayers
from tinsmith.modeling.parallel_tensor import TensorParallel
from tinsmith.modeling.pretrained import persistent_buffers
from tinsmith.modeling.quantized import LoadingConfig, num_weights
from tinsmith.modeling.recurrent import call_packages_where_they_work, pack_recurrent
from tinsmith.modeling.self_check import Probe
from tinsmith.modeling.shared_pages import can_share, share_base
from tinsmith.modeling.tower import PictureFeatures, Tower
from tinsmith.modeling.weight_parts import in_parts, move
from tinsmith.modeling.whole_layers import take_over
from tinsmith.quantization import Quantization

_WORK_OF_THREAD = 25_000_000
"""Multiply-adds in a layer for which one more thread pays on a CPU. A layer consists of dozens of operations, and the
threads synchronise at each of them. Measured in training with `small` (1.6 M weights in a layer), two threads took 0.92
times as long as one with 16 tokens, and 0.7 times as long with 64 tokens, on two idle cores. Beside a process that took
one of the two cores, two threads took 3 times and 2 times as long."""


NO_LIMIT = 2**20
"""Context length, in tokens, of a model that has no position embeddings, and so no limit of its own."""


@dataclass(frozen=True, slots=True)
class _Options:
    """Options with which a model is read and prepared. BaseModel.load describes the fields."""

    path: str | Path
    device: torch.device
    kernels: Setting
    trainable: bool = False
    prepack: bool | None = False
    division: Division | None = None
    pictures: bool = True
    quantization: LoadingConfig | None = None
    from_files: bool = False
    """Whether the model was loaded from `path`, where its image processor lies, too."""


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A frozen model whose linear layers take adapters.

    Only one thread may use it at a time; the services run it on their compute thread.
    """

    path: str
    decoder: nn.Module
    head: Head
    targets: Sequence[Target]
    """Every layer that an adapter may change, in the model's order."""
    config: PretrainedConfig
    active: ActiveRuns
    parameters: Mapping[str, nn.Parameter]
    """All parameters by their Hugging Face names; tied ones appear once."""
    by_columns: frozenset[str] = frozenset()
    """Names of the parameters that full_weights.py stores column by column: the matrices of all linear layers except
    the output layer."""
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    """The buffers in the model's files, by name. Training does not change them."""
    kernels: Kernels = PLAIN
    weights_sum: str = ""
    """Checksum of the weights in the model's files (base_weights.py), followed by `quantize` if they are quantised."""
    quantize: Quantization | None = None
    """Form in which the weights of the adapted layers are stored (quantized.py); None if they are not quantised."""
    refused_groups: Mapping[Group, str] = field(default_factory=dict)
    """Groups whose adapters cannot be computed here, with the reasons. They have no targets."""
    tensor_parallel: TensorParallel | None = None
    """Division of the layers' features among ranks; None if they are not divided."""
    sharded: ShardedLayers | None = None
    """Division of the layers' memory among ranks; None if it is not divided."""
    recurrent: Sequence[str] = ()
    """Names of the classes of the layers that carry a state from token to token (recurrent.py)."""
    pads: bool = False
    """Whether some of the `recurrent` layers compute the sequences of a packed batch side by side, padded
    (padded.py)."""
    one_by_one: str = ""
    """The reason for which the model runs one sequence at a time, with its own attention; empty if it packs them."""
    token_by_token: bool = False
    """Whether layers that continue from earlier tokens take only one further token at a time, as Mamba's do."""
    why_not_cached: str = ""
    """The reason for which sequences cannot be continued from a cache; empty if they can."""
    why_not_shared: str = ""
    """The reason for which sequences cannot share the rows of a common beginning; empty if they can."""
    tower: Tower | None = None
    """The vision tower; None if the model takes no pictures here."""
    why_no_pictures: str = ""
    """The reason for which the model takes no pictures here; empty if it takes them."""

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        trainable: bool = False,
        kernels: Setting = "auto",
        prepack: bool | None = False,
        division: Division | None = None,
        quantize: Quantization | None = None,
        pictures: bool = True,
        pages: str = "",
    ) -> BaseModel:
        """Loads a base model. `path`: a folder or a Hugging Face id. With a division, all ranks must call this
        together.

        `trainable`: whether all parameters can be trained (full_weights.py). The layers then stay as they are and take
        no adapters, and autograd computes the gradient of every parameter.
        `prepack`: whether passes without gradient use a second copy of the matrices, in the layout of the CPU's
        products (kernels/prepacked.py). None makes the copy if there is enough memory.
        `division`: the ranks among which the model is divided; None for a whole model.
        `quantize`: form with 8 or 4 bits in which the weights of all layers that take adapters are stored, except the
        output layer (quantized.py). The model is then compared with transformers' own forward on these weights, and
        nothing is prepacked.
        `pictures`: False does not load the vision tower of a family that sees pictures here, unless the model is
        trainable.
        `pages`: path of a file of memory through which services share the pages of the weights (shared_pages.py); empty
        shares nothing.

        A model whose packed forward pass disagrees with its own runs one sequence at a time (`one_by_one`).

        Raises UnsupportedModel if the files lack parameters or hold broken ones, if the output layer is not a plain
        linear layer, or if the adapted layers do not compute the same as the model's own layers. Raises OSError if
        there is no such model, or if a file is damaged. Raises CannotDivide, a ValueError, for a division that the
        model does not support. Raises ValueError for kernels that do not work here, for a model that cannot be
        quantised, and for `quantize` with `trainable`, `prepack` or a division of the model.
        """
        if quantize is not None:
            preparation.check_quantize(quantize, trainable=trainable, prepack=prepack, division=division)
            prepack = False

        options = _Options(
            path,
            device,
            kernels,
            trainable=trainable,
            prepack=prepack,
            division=division,
            pictures=pictures,
            quantization=None if quantize is None else LoadingConfig(quantize, dtype, quantizable),
            from_files=True,
        )
        shares = can_share(pages, device, trainable=trainable, divided=division is not None)
        with blocks_at_page_starts() if shares else nullcontext():
            base, probe = cls._loaded(options, dtype) if division is None else cls._divided(options, dtype, division)
        base = checked(base, probe)
        if shares:
            share_base(base, pages)
        return base

    @classmethod
    def of(cls, model: PreTrainedModel, *, path: str, kernels: Setting = "auto") -> BaseModel:
        """Makes a BaseModel of a causal LM with eager attention, on the LM's device and in its dtype. `path`: name of
        the model. The LM must not be used otherwise afterwards. Raises UnsupportedModel as `load` does.
        """
        return checked(*cls._prepared(model, _Options(path, model.device, kernels)))

    @classmethod
    def _loaded(cls, options: _Options, dtype: torch.dtype) -> tuple[BaseModel, Probe]:
        """Loads and prepares a model that is not divided."""
        model = _read(options, dtype)
        model.to(options.device)  # type: ignore[arg-type]  # transformers' decorated signature
        return cls._prepared(model, options)

    @classmethod
    def _divided(cls, options: _Options, dtype: torch.dtype, division: Division) -> tuple[BaseModel, Probe]:
        """Loads and prepares this rank's part of a model. The ranks of a machine read one after the other."""

        def load() -> Callable[[], tuple[BaseModel, Probe]]:
            """Reads the model. Returns the function that prepares it, which all ranks call together. A rank that has
            read a whole model prepares it at once, so that it is divided before the next rank reads."""
            model = _read(options, dtype)
            if in_parts(model):
                move(model, options.device)
                return partial(cls._prepared, model, options)
            prepared = cls._prepared(model, options)
            return lambda: prepared

        return division.in_turns(load)()

    @classmethod
    def _prepared(cls, model: PreTrainedModel, options: _Options) -> tuple[BaseModel, Probe]:
        """Adapts and divides the model. Also returns the probe, with the results of the model's own forward pass."""
        path, device, division = str(options.path), options.device, options.division
        trainable, quantization = options.trainable, options.quantization
        # torch's default rounds the inputs of a convolution, which cuts a picture into patches, to 10 bits in float32.
        torch.backends.cudnn.allow_tf32 = False
        model = model.eval().requires_grad_(trainable)
        weights_sum = preparation.weights_sum(model, quantization, division)
        call_packages_where_they_work(model)
        with preparation.lent(division, model):
            probe = Probe.run(model)  # with its own attention
        why_no_pictures = preparation.why_no_pictures(
            model, trainable, division, pictures=options.pictures, from_files=options.from_files
        )
        tower = None
        if not why_no_pictures:
            tower, why_no_pictures = preparation.tower_or_reason(model, path, probe)
        with preparation.lent(division, model):
            kernels_here = choose(options.kernels, device, model.dtype)
            chosen = preparation.install_kernels(model, kernels_here, device, trainable=trainable)
        linear, buffers = preparation.linear_weights(model), persistent_buffers(model)
        active = ActiveRuns()
        targets, refused = preparation.adapt_layers(model, active, probe, tower, trainable=trainable, division=division)
        decoder = decoder_of(model)
        layers = decoder_layers(decoder, model.config.get_text_config().num_hidden_layers)
        tensor_parallel, sharded = (None, None) if division is None else division.apply(model, layers, active, device)
        without_cache = ", ".join(uncached(decoder))
        recurrent, pads = pack_recurrent(decoder, active)
        if tensor_parallel is None and sharded is None:
            compress(decoder, active)
            if chosen.elementwise is CPU and not trainable:
                take_over(decoder, layers, active)
        head = preparation.head_of(model)
        may_prepack = not trainable and options.prepack is not False
        if may_prepack and preparation.prepack_matrices(model, head, device, path=path, always=options.prepack):
            head = head.with_prepacked()
        base = cls(
            path=path,
            decoder=decoder,
            head=head,
            targets=targets,
            config=model.config.get_text_config(),
            active=active,
            parameters=dict(model.named_parameters()),
            by_columns=linear,
            buffers=buffers,
            kernels=chosen,
            weights_sum=weights_sum,
            quantize=quantization and quantization.quantize,
            refused_groups=refused,
            tensor_parallel=tensor_parallel,
            sharded=sharded,
            recurrent=recurrent,
            pads=pads,
            why_not_cached=without_cache and f"its layers {without_cache} carry a state, and take no cache for it",
            tower=tower,
            why_no_pictures=why_no_pictures,
        )
        return base, probe

    @property
    def device(self) -> torch.device:
        return self.head.weight_V_H.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight_V_H.dtype

    @property
    def trainable(self) -> bool:
        """Whether all parameters can be trained. Such a model takes no adapters."""
        return self.head.weight_V_H.requires_grad

    @property
    def vocab_size(self) -> int:
        return self.head.vocab_size

    @property
    def max_context_length(self) -> int:
        return getattr(self.config, "max_position_embeddings", None) or NO_LIMIT

    @property
    def architecture(self) -> str:
        return (self.config.architectures or [type(self.config).__name__])[0]

    @property
    def tokens_per_thread(self) -> int:
        """Fewest tokens of a pass for each of its threads. With fewer tokens for each thread, fewer threads are as
        fast."""
        if self.device.type != "cpu" or not self.layers:
            return 1
        weights = sum(num_weights(layer) for layer in self.layers)
        return max(1, _WORK_OF_THREAD * len(self.layers) // max(1, weights))

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder's layers, in order. Empty for a model without a list of them."""
        return decoder_layers(self.decoder, self.config.num_hidden_layers)

    @property
    def groups(self) -> list[Group]:
        """The groups that adapters may change."""
        return groups_of(self.targets)

    def check_groups(self, groups: Collection[Group]) -> None:
        """Raises Unsupported, with the reason, for a group that adapters cannot change here."""
        for group in ALL_GROUPS:
            if group in groups and group not in self.groups:
                field = f"lora_config.train_{group}"
                raise Unsupported(f"{field}: {self.why_not(group)}; set it to false", field=field)

    def why_not(self, group: Group) -> str:
        """The reason for which a group is not in `groups`."""
        if group == VISION and self.tower is None:
            return f"this base model takes no pictures: {self.why_no_pictures}"
        return self.refused_groups.get(group) or "this base model has no such layers that can be adapted"

    def hidden_states(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        layout: Layout,
        runs: Sequence[Run],
        picture_features: PictureFeatures | None = None,
    ) -> Tensor:
        """The decoder's last hidden states [T, H], in the model's dtype. Raises Unsupported for a layout with a cache
        if the model cannot be continued from one.

        `tokens_T`, `positions_T`: int64 [T], on the model's device. A run's adapter applies to the run's rows. Rows
        without a run get the base model. `picture_features`: features of pictures, from `tower`, which replace the
        embeddings of some tokens; with them, `positions_T` may be [3, T] (`positions_with_pictures`).
        """
        if not isinstance(layout, Packed) and self.why_not_cached:
            raise Unsupported(f"{self.architecture} cannot be continued from a cache: {self.why_not_cached}")
        if positions_T.ndim == 2 and (self.tower is None or not self.tower.processor.family.grid):
            positions_T = positions_T[0]
        position_ids = positions_T[None] if positions_T.ndim == 1 else positions_T[:, None]
        if self.one_by_one:
            return self._hidden_states_apart(tokens_T, position_ids, layout, runs, picture_features)
        if isinstance(layout, Packed):
            layout = layout.with_kernel(self.kernels.attention, self.device)
        if picture_features is not None and self.tower is not None:
            layout = layout.with_ahead(self.tower.ahead(picture_features, len(tokens_T)))
        if self.tensor_parallel is not None:
            runs = self.tensor_parallel.runs(runs)
        self.active.layout = layout
        if self.pads and isinstance(layout, Packed) and len(layout.lengths) > 1:
            self.active.padded = padded_batches(layout.lengths, runs, self.kernels, self.device)
        elif self.recurrent and isinstance(layout, Cached | CachedTogether):
            self.active.padded = cached_batches(
                layout, runs, self.kernels, self.device, token_by_token=self.token_by_token
            )
        options = {"use_cache": False, "position_ids": position_ids, "layout": layout}
        return self._decode(tokens_T, runs, picture_features, options)

    def _hidden_states_apart(
        self,
        tokens_T: Tensor,
        position_ids: Tensor,
        layout: Layout,
        runs: Sequence[Run],
        picture_features: PictureFeatures | None,
    ) -> Tensor:
        """Computes `hidden_states` for one sequence after the other, as the plain model does."""
        outputs, start = [], 0
        for length, options in self._calls(layout):
            stop = start + length
            seen = None if picture_features is None else picture_features.within(start, stop)
            # The positions of text after a picture do not follow from the length of a cache, so they are passed.
            told = seen is not None or (self.tower is not None and "past_key_values" in options)
            places = {"position_ids": position_ids[..., start:stop]} if told else {}
            within = runs_within(runs, start, stop)
            outputs.append(self._decode(tokens_T[start:stop], within, seen, {**options, **places}))
            start = stop
        return torch.cat(outputs)

    def _calls(self, layout: Layout) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """The calls of the plain model in the order of the tokens: the number of tokens and the arguments of each."""
        if isinstance(layout, Packed):
            yield from ((length, {"use_cache": False}) for length in layout.lengths)
            return
        assert isinstance(layout, Cached | CachedTogether)
        for part in layout.parts:
            lanes = range(part.num_decoding) if isinstance(part.lanes, slice) else part.lanes.tolist()
            yield from ((1, {"use_cache": True, "past_key_values": part.cache.whole[lane]}) for lane in lanes)
        for part in layout.parts:
            for piece in part.prefills:
                if piece.start == 0:
                    part.cache.whole[piece.lane] = DynamicCache(config=self.config)
                options = {"use_cache": True, "past_key_values": part.cache.whole[piece.lane]}
                apart = self.token_by_token and piece.start > 0
                yield from ((1, options) for _ in range(piece.length)) if apart else ((piece.length, options),)

    def _decode(
        self,
        tokens_T: Tensor,
        runs: Sequence[Run],
        picture_features: PictureFeatures | None,
        options: Mapping[str, Any],
    ) -> Tensor:
        """Calls the decoder with the runs' adapters. Returns the last hidden states [T, H]."""
        inputs: Mapping[str, Any] = {"input_ids": tokens_T[None]}
        if picture_features is not None:
            inputs = {
                **self._by_layer(tokens_T, picture_features),
                **picture_features.options(self._embedded(tokens_T)),
            }
        self.active.runs = runs
        self.active.every_row = "past_key_values" in options
        if not self.active.every_row:
            self.active.groups = self.kernels.groups(runs, tokens_T.shape[0], self.device)
        if self.active.groups is None and self.tensor_parallel is None and self.device.type == "cuda":
            # Adapters are rounded by one operation for all layers. Starting two operations for each layer would take
            # the host longer than the device takes to compute them.
            self.active.runs = [run.rounded_for(self.dtype) for run in runs]
        try:
            output = self.decoder(**inputs, **options)
        finally:
            self.active.clear()
            if self.tensor_parallel is not None:
                self.tensor_parallel.forget()
        return output.last_hidden_state[0]

    def _embedded(self, tokens_T: Tensor) -> Tensor:
        return self.decoder.get_input_embeddings()(tokens_T)  # type: ignore[operator]

    def _by_layer(self, tokens_T: Tensor, picture_features: PictureFeatures) -> Mapping[str, Any]:
        """The argument with further embeddings for each layer, which the small models of Gemma 4 take. Tokens of
        pictures have the further embeddings of the padding token. Empty for other models."""
        if not getattr(self.config, "hidden_size_per_layer_input", None):
            return {}
        text_T = tokens_T.index_fill(0, picture_features.rows_P, self.config.pad_token_id or 0)
        found = self.decoder.get_per_layer_inputs(text_T[None], self._embedded(text_T)[None])  # type: ignore[operator]
        return {"per_layer_inputs": found}

    def target_logprobs(self, hidden_T_H: Tensor, rows_M: Tensor, tokens_M: Tensor, runs: Sequence[Run]) -> Tensor:
        """Computes logprobs.target_logprobs for this model's output layer: float32 [M]."""
        if self.tensor_parallel is None:
            return target_logprobs(self.head, hidden_T_H, rows_M, tokens_M, runs)
        return self.tensor_parallel.target_logprobs(self.head, hidden_T_H, rows_M, tokens_M, runs)


def positions_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """The positions 0, 1, 2, ... of each sequence, end to end: int64 [T]."""
    return on_device(torch.cat([torch.arange(length) for length in lengths]), device)


def _read(options: _Options, dtype: torch.dtype) -> PreTrainedModel:
    """The model as transformers makes it. With a division, only this rank's part of it if its files allow that."""
    division = options.division
    cut = None if division is None else partial(division.cut, device=options.device)
    tower = options.pictures or options.trainable
    return preparation.load(options.path, dtype, options.quantization, tower=tower, cut=cut)
