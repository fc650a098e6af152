"""Runs a frozen Hugging Face causal LM over packed sequences with many adapters.

Shapes: T packed tokens, H hidden.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from tinsmith.errors import Unsupported
from tinsmith.modeling import attention
from tinsmith.modeling.adaptation import adapt, decoder_layers, decoder_of, quantizable
from tinsmith.modeling.adapter import ALL_GROUPS, VISION, Group, Target, groups_of
from tinsmith.modeling.adapter_runs import ActiveRuns, Run
from tinsmith.modeling.attention import Layout, Packed
from tinsmith.modeling.base_weights import sum_of
from tinsmith.modeling.capabilities import MISFITS, checked
from tinsmith.modeling.config import load_config
from tinsmith.modeling.kernels import prepacked
from tinsmith.modeling.kernels.choice import PLAIN, Kernels, Setting, choose
from tinsmith.modeling.kernels.cpu import CPU
from tinsmith.modeling.kernels.elementwise import eager_on_host
from tinsmith.modeling.kernels.install import install
from tinsmith.modeling.kernels.transfer import on_device
from tinsmith.modeling.kv_cache import Cached, CachedTogether
from tinsmith.modeling.latent import compress
from tinsmith.modeling.logprobs import Head, target_logprobs
from tinsmith.modeling.lora import LoraLinear, prepack
from tinsmith.modeling.padded import cached_batches, padded_batches, runs_within, uncached
from tinsmith.modeling.parallel import Division
from tinsmith.modeling.parallel_base import ShardedLayers
from tinsmith.modeling.parallel_tensor import CannotDivide, TensorParallel
from tinsmith.modeling.picture_check import PictureProbe
from tinsmith.modeling.pretrained import (
    UnsupportedModel,
    auto_class,
    beside_text,
    listed,
    load_causal_lm,
    persistent_buffers,
)
from tinsmith.modeling.quantized import LoadingConfig, all_quantized, num_weights
from tinsmith.modeling.recurrent import call_packages_where_they_work, pack_recurrent
from tinsmith.modeling.self_check import Probe
from tinsmith.modeling.tower import Sights, Tower, tower_of
from tinsmith.modeling.whole_layers import take_over
from tinsmith.pictures.families import FAMILIES
from tinsmith.quantization import Quantization

logger = logging.getLogger(__name__)

_WORK_OF_THREAD = 25_000_000
"""Multiply-adds in a layer for which one more thread pays on a CPU. A layer consists of some dozens of operations, and
the threads synchronise at each. Measured in training with `small` (1.6 M weights in a layer), two threads in relation
to one: on two idle cores 0.92 of the time with 16 tokens and 0.7 with 64 tokens. Beside a process that took one core:
3 and 2 times as long."""


NO_LIMIT = 2**20
"""Context length, in tokens, of a model that has no position embeddings, and so no limit of its own."""


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
    """Buffers in the model's files, which training does not change, by name."""
    kernels: Kernels = PLAIN
    weights_sum: str = ""
    """Checksum of the weights in the model's files (base_weights.py), followed by `quantize` if they are quantised."""
    quantize: Quantization | None = None
    """How the weights of the adapted layers are stored (quantized.py)."""
    refused_groups: Mapping[Group, str] = field(default_factory=dict)
    """Groups whose adapters cannot be computed here, with the reason. They have no targets."""
    tensor_parallel: TensorParallel | None = None
    """Division of the layers' features among ranks; None if they are not divided."""
    sharded: ShardedLayers | None = None
    """Division of the layers' memory among ranks; None if it is not divided."""
    recurrent: Sequence[str] = ()
    """Classes of the layers that carry a state from token to token (recurrent.py)."""
    pads: bool = False
    """Whether some of these layers compute the sequences of a packed batch side by side, padded (padded.py)."""
    one_by_one: str = ""
    """The reason for which the model runs one sequence at a time, with its own attention; empty if it packs them."""
    token_by_token: bool = False
    """Whether layers that go on from earlier tokens take the next ones one at a time only, as Mamba's do."""
    why_not_cached: str = ""
    """The reason for which tokens cannot be computed one after the other from a cache; empty if they can."""
    why_not_shared: str = ""
    """The reason for which sequences cannot share rows for tokens with which several of them begin; empty if they
    can."""
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
    ) -> BaseModel:
        """Loads a folder or a Hugging Face id. With a division, all ranks must call this together.

        `trainable`: for full-parameter training (full_weights.py). The layers stay as they are and take no adapters, so
        that autograd computes the gradient of every parameter.
        `prepack`: passes without gradient use a second copy of the matrices, in the layout of the CPU's products
        (kernels/prepacked.py). None makes the copy if there is enough memory.
        `quantize`: stores the weights of all layers that take adapters, except the output layer, in 8 or 4 bits
        (quantized.py). The model is then compared with transformers' own forward on these weights. Nothing is
        prepacked.
        `pictures`: without them, the vision tower of a model of a family that sees pictures here is not loaded, unless
        all parameters are trained.

        A model whose packed forward pass disagrees with its own runs one sequence at a time (`one_by_one`).

        Raises UnsupportedModel if the files lack parameters or hold broken ones, if the output layer is not a plain
        linear layer, or if the adapted layers compute something else than the model's own. Raises OSError if there is
        no such model or a file is damaged. Raises ValueError for kernels that do not work here, and CannotDivide, a
        ValueError, for a division that the model does not support. Raises ValueError if the model cannot be quantised,
        or not together with `trainable`, `prepack` or this division.
        """
        if quantize is not None:
            _check_quantize(quantize, trainable=trainable, prepack=prepack, division=division)
            prepack = False

        def prepare() -> tuple[BaseModel, Probe]:
            quantization = None if quantize is None else LoadingConfig(quantize, dtype, quantizable)
            model = _loaded(path, dtype, quantization, tower=pictures or trainable)
            if division is None:
                model.to(device)  # type: ignore[arg-type]  # transformers' decorated signature
            return cls._prepared(
                model,
                path=str(path),
                device=device,
                trainable=trainable,
                kernels=kernels,
                prepacks=prepack,
                division=division,
                from_files=True,
                pictures=pictures,
                quantization=quantization,
            )

        base, probe = prepare() if division is None else division.in_turns(prepare)
        return checked(base, probe)

    @classmethod
    def of(cls, model: PreTrainedModel, *, path: str, trainable: bool = False, kernels: Setting = "auto") -> BaseModel:
        """Takes over a causal LM with eager attention, on its device and in its dtype. `path`: name of the model.

        Raises UnsupportedModel as `load` does.
        """
        base, probe = cls._prepared(
            model, path=path, device=model.device, trainable=trainable, kernels=kernels, prepacks=False, division=None
        )
        return checked(base, probe)

    @classmethod
    def _prepared(
        cls,
        model: PreTrainedModel,
        *,
        path: str,
        device: torch.device,
        trainable: bool,
        kernels: Setting,
        prepacks: bool | None,
        division: Division | None,
        from_files: bool = False,
        pictures: bool = True,
        quantization: LoadingConfig | None = None,
    ) -> tuple[BaseModel, Probe]:
        """Adapts and divides the model. Also returns the probe, which its own forward pass computed before that.

        `from_files`: `path` is where the model was loaded from, with the processor of its pictures.
        """
        model = model.eval().requires_grad_(trainable)
        weights_sum = _weights_sum(model, quantization)
        call_packages_where_they_work(model)
        probe = Probe.run(model)  # with its own attention
        why_no_pictures = _why_no_pictures(model, trainable, division, pictures=pictures, from_files=from_files)
        tower = None
        if not why_no_pictures:
            tower, why_no_pictures = _tower(model, path, probe)
        chosen = _install(model, choose(kernels, device, model.dtype), device, trainable=trainable)
        linear, buffers = _linear_weights(model), persistent_buffers(model)
        active = ActiveRuns()
        targets, refused = _adapt(model, active, probe, tower, trainable=trainable, by_columns=division is None)
        decoder = decoder_of(model)
        layers = decoder_layers(decoder, model.config.get_text_config().num_hidden_layers)
        tensor_parallel, sharded = (None, None) if division is None else division.apply(model, layers, active, device)
        without_cache = ", ".join(uncached(decoder))
        recurrent, pads = pack_recurrent(decoder, active)
        if tensor_parallel is None and sharded is None:
            compress(decoder, active)
            if chosen.elementwise is CPU and not trainable:
                take_over(decoder, layers, active)
        head = _head(model)
        if not trainable and prepacks is not False and _prepack(model, head, device, path=path, always=prepacks):
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
        """Number of tokens for which one more thread pays. With fewer tokens for each thread, fewer threads are as
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
        sights: Sights | None = None,
    ) -> Tensor:
        """The decoder's last hidden states [T, H], in the model's dtype.

        tokens_T and positions_T are int64 [T] on the model's device. A run's adapter applies to the run's rows. Rows
        without a run get the base model. `sights`: features of pictures, from `tower`, in place of the embeddings of
        some tokens; with them, positions_T may be [3, T] (`positions_with_pictures`).
        """
        if not isinstance(layout, Packed) and self.why_not_cached:
            raise Unsupported(f"{self.architecture} cannot be continued from a cache: {self.why_not_cached}")
        if positions_T.ndim == 2 and (self.tower is None or not self.tower.processor.family.grid):
            positions_T = positions_T[0]
        position_ids = positions_T[None] if positions_T.ndim == 1 else positions_T[:, None]
        if self.one_by_one:
            return self._hidden_states_apart(tokens_T, position_ids, layout, runs, sights)
        if isinstance(layout, Packed):
            layout = layout.with_kernel(self.kernels.attention, self.device)
        if sights is not None and self.tower is not None:
            layout = layout.with_ahead(self.tower.ahead(sights, len(tokens_T)))
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
        return self._decode(tokens_T, runs, sights, options)

    def _hidden_states_apart(
        self, tokens_T: Tensor, position_ids: Tensor, layout: Layout, runs: Sequence[Run], sights: Sights | None
    ) -> Tensor:
        """hidden_states of one sequence after the other, computed as by the plain model."""
        outputs, start = [], 0
        for length, options in self._calls(layout):
            stop = start + length
            seen = None if sights is None else sights.within(start, stop)
            # Text after a picture has positions of its own, which the length of a cache does not tell.
            told = seen is not None or (self.tower is not None and "past_key_values" in options)
            places = {"position_ids": position_ids[..., start:stop]} if told else {}
            within = runs_within(runs, start, stop)
            outputs.append(self._decode(tokens_T[start:stop], within, seen, {**options, **places}))
            start = stop
        return torch.cat(outputs)

    def _calls(self, layout: Layout) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """The calls of the plain model, in the order of the tokens: the number of tokens, and arguments."""
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
        self, tokens_T: Tensor, runs: Sequence[Run], sights: Sights | None, options: Mapping[str, Any]
    ) -> Tensor:
        """One call of the decoder, with the runs' adapters. [T, H]"""
        inputs: Mapping[str, Any] = {"input_ids": tokens_T[None]}
        if sights is not None:
            inputs = {**self._by_layer(tokens_T, sights), **sights.options(self._embedded(tokens_T))}
        self.active.runs = runs
        self.active.every_row = "past_key_values" in options
        if not self.active.every_row:
            self.active.groups = self.kernels.groups(runs, tokens_T.shape[0], self.device)
        if self.active.groups is None and self.tensor_parallel is None and self.device.type == "cuda":
            # One operation for all layers: the host takes longer to start two for each than the device to compute them.
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

    def _by_layer(self, tokens_T: Tensor, sights: Sights) -> Mapping[str, Any]:
        """The further embeddings that each layer takes in the small models of Gemma 4, which have those of padding at
        pictures."""
        if not getattr(self.config, "hidden_size_per_layer_input", None):
            return {}
        text_T = tokens_T.index_fill(0, sights.rows_P, self.config.pad_token_id or 0)
        found = self.decoder.get_per_layer_inputs(text_T[None], self._embedded(text_T)[None])  # type: ignore[operator]
        return {"per_layer_inputs": found}

    def target_logprobs(self, hidden_T_H: Tensor, rows_M: Tensor, tokens_M: Tensor, runs: Sequence[Run]) -> Tensor:
        """logprobs.target_logprobs for this model's output layer."""
        if self.tensor_parallel is None:
            return target_logprobs(self.head, hidden_T_H, rows_M, tokens_M, runs)
        return self.tensor_parallel.target_logprobs(self.head, hidden_T_H, rows_M, tokens_M, runs)


def positions_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """int64 [T]: 0, 1, 2, ... for each sequence, end to end."""
    return on_device(torch.cat([torch.arange(length) for length in lengths]), device)


def _loaded(
    path: str | Path, dtype: torch.dtype, quantization: LoadingConfig | None, *, tower: bool
) -> PreTrainedModel:
    """The model as transformers makes it, in host memory unless it is quantised. `tower`: with the vision tower, which
    models of families that see no pictures here always keep. Raises UnsupportedModel."""
    transformers_logging.disable_progress_bar()  # it would break up the service's log lines
    config = load_config(path)
    if auto_class(config) is None:
        raise UnsupportedModel(f"transformers has no causal language model for {type(config).__name__}")
    model, missing = load_causal_lm(
        path,
        config=config,
        dtype=dtype,
        quantization=quantization,
        tower=tower or config.model_type not in FAMILIES,
        attn_implementation="eager",
    )
    if missing:  # each process would fill them with other random values
        raise UnsupportedModel(
            f"{len(missing)} parameters are not in the files ({listed(missing)}): the files are incomplete, or "
            "of another architecture than config.json says; fetch them again"
        )
    return model


def _why_no_pictures(
    model: PreTrainedModel, trainable: bool, division: Division | None, *, pictures: bool, from_files: bool
) -> str:
    """The reason for which no vision tower is looked for; empty if one is."""
    if trainable or division is not None:
        return "pictures are not supported when all parameters are trained, or divided among ranks"
    if not pictures and model.config.model_type in FAMILIES:
        return "they are switched off here (pictures is false), and its vision tower is not loaded"
    if not from_files:
        return "it was not loaded from files, which hold the processor of pictures"
    return ""


def _install(model: PreTrainedModel, chosen: Kernels, device: torch.device, *, trainable: bool) -> Kernels:
    """Gives the model the chosen elementwise kernels, which compute no gradient of a norm's weight."""
    if chosen.elementwise is not None and not trainable:
        here = model.device.type == device.type
        install(model, chosen.elementwise if here else eager_on_host(chosen.elementwise))
    return chosen


def _linear_weights(model: PreTrainedModel) -> frozenset[str]:
    """Names of the matrices of all linear layers except the output layer."""
    output = model.get_output_embeddings()
    linear = (name for name, module in model.named_modules() if type(module) is nn.Linear and module is not output)
    return frozenset(f"{name}.weight" for name in linear)


def _adapt(
    model: PreTrainedModel,
    active: ActiveRuns,
    probe: Probe,
    tower: Tower | None,
    *,
    trainable: bool,
    by_columns: bool,
) -> tuple[Sequence[Target], Mapping[Group, str]]:
    """Gives the layers adapters and our attention. Returns the targets, and the groups that cannot be adapted, with
    their reasons. The probe gets what the model's own forward pass gives with adapters."""
    seeing = probe.pictures if tower is not None else None
    targets, refused = adapt(
        model,
        active,
        replace=not trainable,
        for_pictures=() if seeing is None else seeing.layers,
        seeing=tower and tower.active,
        by_columns=by_columns,
    )
    if not trainable:
        probe.run_groups(model, targets)
    if tower is not None and seeing is not None:
        seeing.run_adapter(model, tower, targets)
    model.set_attn_implementation(attention.NAME)
    if tower is not None:
        tower.set_own_attention()
    return targets, refused


def _tower(model: PreTrainedModel, path: str, probe: Probe) -> tuple[Tower | None, str]:
    """The model's tower, or the reason for which there is none. The probe gets logits with pictures. `model` must be as
    transformers made it."""
    try:
        tower = tower_of(model, path)
        probe.pictures = PictureProbe.run(model, tower)
    except torch.OutOfMemoryError:
        raise
    except MISFITS as error:
        return None, str(error)
    return tower, ""


def _check_quantize(
    quantize: Quantization, *, trainable: bool, prepack: bool | None, division: Division | None
) -> None:
    """Raises ValueError for what a quantised model cannot be."""
    if trainable:
        raise ValueError(f"quantize: {quantize} is for adapters; full-parameter training changes the base weights")
    if prepack:
        raise ValueError(f"quantize: {quantize} leaves no matrices to prepack; leave prepack out")
    if division is not None and (division.tensor is not None or division.mesh is not None):
        raise CannotDivide(
            f"quantize: {quantize} weights cannot be divided among ranks; set tensor_parallel to 1 and shard_base to "
            "false"
        )


def _weights_sum(model: PreTrainedModel, quantization: LoadingConfig | None) -> str:
    """The checksum without the layers for pictures, so that it is the same if they are not loaded."""
    beside = {parameter for _, module in beside_text(model) for parameter in module.parameters()}
    used = [parameter for parameter in model.parameters() if parameter not in beside]
    if quantization is None:
        return sum_of(used)
    stored = {id(one) for _, parameter in all_quantized(model) for one in parameter.parameters()}
    others = (parameter for parameter in used if id(parameter) not in stored)
    return f"{sum_of(others, quantization.samples)}-{quantization.quantize}"


def _prepack(model: PreTrainedModel, head: Head, device: torch.device, *, path: str, always: bool | None) -> bool:
    """Makes the prepacked copy of the layers' matrices. Returns False if it cannot be used here, or if memory is short
    and `always` is not set."""
    if not prepacked.works(model.dtype, device):
        return False
    matrices = [head.weight_V_H, *(layer.weight for layer in model.modules() if isinstance(layer, LoraLinear))]
    num_bytes = sum(matrix.nbytes for matrix in matrices)
    if not (always or prepacked.have_room(num_bytes)):
        return False
    prepack(model)
    logger.info("%s: matrices copied into the layout of the CPU's products, %d MB", path, num_bytes >> 20)
    return True


def _head(model: PreTrainedModel) -> Head:
    output = model.get_output_embeddings()
    if type(output) is not nn.Linear:
        raise UnsupportedModel(f"the output layer of {type(model).__name__} is not a plain linear layer: {output}")
    config = model.config.get_text_config().to_dict()
    names = {id(module): name for name, module in model.named_modules()}
    scale = 1.0
    if config.get("logit_scale") is not None:  # Cohere
        scale = float(config["logit_scale"])
    elif config.get("lm_head_multiplier") is not None:  # Falcon-H1
        scale = float(config["lm_head_multiplier"])
    elif config.get("logits_scaling") is not None:  # Granite
        scale = 1.0 / float(config["logits_scaling"])
    elif config.get("logits_mup_width_multiplier") is not None:  # Inkling divides what goes into the output layer
        scale = 1.0 / float(config["logits_mup_width_multiplier"])
    return Head(
        name=names[id(output)],
        weight_V_H=output.weight,
        bias_V=output.bias,
        softcap=config.get("final_logit_softcapping") or config.get("logits_soft_cap"),  # RecurrentGemma has the second
        scale=scale,
    )
