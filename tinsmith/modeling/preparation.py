"""The steps that prepare a model of transformers for BaseModel: they load it, find its vision tower and its output
layer, and give it kernels, adapted layers and the attention of attention.py."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from tinsmith.modeling import attention
from tinsmith.modeling.adaptation import adapt
from tinsmith.modeling.adapter import Group, Target
from tinsmith.modeling.adapter_runs import ActiveRuns
from tinsmith.modeling.base_weights import sum_of
from tinsmith.modeling.capabilities import MISFITS
from tinsmith.modeling.config import load_config
from tinsmith.modeling.kernels import prepacked
from tinsmith.modeling.kernels.choice import Kernels
from tinsmith.modeling.kernels.elementwise import eager_on_host
from tinsmith.modeling.kernels.install import install
from tinsmith.modeling.logprobs import Head
from tinsmith.modeling.lora import LoraLinear, prepack
from tinsmith.modeling.parallel import Division
from tinsmith.modeling.parallel_tensor import CannotDivide
from tinsmith.modeling.picture_check import PictureProbe
from tinsmith.modeling.pretrained import UnsupportedModel, auto_class, beside_text, listed, load_causal_lm
from tinsmith.modeling.quantized import LoadingConfig, all_quantized
from tinsmith.modeling.self_check import Probe
from tinsmith.modeling.tower import Tower, tower_of
from tinsmith.pictures.families import FAMILIES
from tinsmith.quantization import Quantization

logger = logging.getLogger(__name__)


def load(
    path: str | Path,
    dtype: torch.dtype,
    quantization: LoadingConfig | None,
    *,
    tower: bool,
    cut: Callable[[PreTrainedModel], None] | None,
) -> PreTrainedModel:
    """The model as transformers makes it, in host memory unless it is quantised or `cut` is given. `tower`: False
    leaves out the vision tower, except for models of families that see no pictures here. `cut`: see `load_causal_lm`.
    Raises UnsupportedModel, and the errors of `load_causal_lm`."""
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
        cut=cut,
        attn_implementation="eager",
    )
    if missing:  # every process would fill them with different random values
        raise UnsupportedModel(
            f"{len(missing)} parameters are not in the files ({listed(missing)}): the files are incomplete, or "
            "of another architecture than config.json says; fetch them again"
        )
    return model


def why_no_pictures(
    model: PreTrainedModel, trainable: bool, division: Division | None, *, pictures: bool, from_files: bool
) -> str:
    """The reason for which the model's vision tower is not used; empty if it may be used."""
    if trainable or division is not None:
        return "pictures are not supported when all parameters are trained, or divided among ranks"
    if not pictures and model.config.model_type in FAMILIES:
        return "they are switched off here (pictures is false), and its vision tower is not loaded"
    if not from_files:
        return "it was not loaded from files, which hold the processor of pictures"
    return ""


def install_kernels(model: PreTrainedModel, chosen: Kernels, device: torch.device, *, trainable: bool) -> Kernels:
    """Gives the model the chosen elementwise kernels, unless it is trainable: the kernels compute no gradient of a
    norm's weight. Returns `chosen`."""
    if chosen.elementwise is not None and not trainable:
        here = model.device.type == device.type
        install(model, chosen.elementwise if here else eager_on_host(chosen.elementwise))
    return chosen


def linear_weights(model: PreTrainedModel) -> frozenset[str]:
    """Names of the matrices of all linear layers except the output layer."""
    output = model.get_output_embeddings()
    linear = (name for name, module in model.named_modules() if type(module) is nn.Linear and module is not output)
    return frozenset(f"{name}.weight" for name in linear)


def adapt_layers(
    model: PreTrainedModel,
    active: ActiveRuns,
    probe: Probe,
    tower: Tower | None,
    *,
    trainable: bool,
    division: Division | None,
) -> tuple[Sequence[Target], Mapping[Group, str]]:
    """Replaces layers by adapted ones, and the model's attention by that of attention.py. Returns the targets, and the
    groups that cannot be adapted, with the reasons. Between the two steps, the probe runs the model's own forward pass
    with adapters."""
    seeing = probe.pictures if tower is not None else None
    targets, refused = adapt(
        model,
        active,
        replace=not trainable,
        for_pictures=() if seeing is None else seeing.layers,
        seeing=tower and tower.active,
        by_columns=division is None,
    )
    if not trainable:
        with lent(division, model):
            probe.run_groups(model, targets)
    if tower is not None and seeing is not None:
        seeing.run_adapter(model, tower, targets)
    model.set_attn_implementation(attention.NAME)
    if tower is not None:
        tower.set_own_attention()
    return targets, refused


def tower_or_reason(model: PreTrainedModel, path: str, probe: Probe) -> tuple[Tower | None, str]:
    """The model's tower, or None and the reason. The probe computes logits with pictures. `model` must be as
    transformers made it."""
    try:
        tower = tower_of(model, path)
        probe.pictures = PictureProbe.run(model, tower)
    except torch.OutOfMemoryError:
        raise
    except MISFITS as error:
        return None, str(error)
    return tower, ""


def check_quantize(quantize: Quantization, *, trainable: bool, prepack: bool | None, division: Division | None) -> None:
    """Raises ValueError if a quantised model cannot be loaded with these options."""
    if trainable:
        raise ValueError(f"quantize: {quantize} is for adapters; full-parameter training changes the base weights")
    if prepack:
        raise ValueError(f"quantize: {quantize} leaves no matrices to prepack; leave prepack out")
    if division is not None and (division.tensor is not None or division.mesh is not None):
        raise CannotDivide(
            f"quantize: {quantize} weights cannot be divided among ranks; set tensor_parallel to 1 and shard_base to "
            "false"
        )


def lent(division: Division | None, model: PreTrainedModel) -> AbstractContextManager[None]:
    """A context in which a model that was read in parts can compute its own forward pass."""
    return nullcontext() if division is None else division.parts.lent(model)


def weights_sum(model: PreTrainedModel, quantization: LoadingConfig | None, division: Division | None) -> str:
    """The checksum of the model's weights. It leaves out the layers for pictures, so that it does not depend on whether
    they are loaded."""
    beside = {parameter for _, module in beside_text(model) for parameter in module.parameters()}
    used = [parameter for parameter in model.parameters() if parameter not in beside]
    if quantization is None:
        return sum_of(used if division is None else map(division.parts.whole, used))
    stored = {id(one) for _, parameter in all_quantized(model) for one in parameter.parameters()}
    others = (parameter for parameter in used if id(parameter) not in stored)
    return f"{sum_of(others, quantization.samples)}-{quantization.quantize}"


def prepack_matrices(
    model: PreTrainedModel, head: Head, device: torch.device, *, path: str, always: bool | None
) -> bool:
    """Makes the prepacked copy of the layers' matrices. Returns False, and makes none, if it cannot be used here, or if
    memory is short and `always` is not set."""
    if not prepacked.works(model.dtype, device):
        return False
    matrices = [head.weight_V_H, *(layer.weight for layer in model.modules() if isinstance(layer, LoraLinear))]
    num_bytes = sum(matrix.nbytes for matrix in matrices)
    if not (always or prepacked.fits_in_memory(num_bytes)):
        return False
    prepack(model)
    logger.info("%s: matrices copied into the layout of the CPU's products, %d MB", path, num_bytes >> 20)
    return True


def head_of(model: PreTrainedModel) -> Head:
    """The model's output layer, with its scale and softcap by the configuration. Raises UnsupportedModel if it is not a
    plain linear layer."""
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
    elif config.get("logits_mup_width_multiplier") is not None:  # Inkling divides the output layer's input
        scale = 1.0 / float(config["logits_mup_width_multiplier"])
    return Head(
        name=names[id(output)],
        weight_V_H=output.weight,
        bias_V=output.bias,
        softcap=config.get("final_logit_softcapping") or config.get("logits_soft_cap"),  # RecurrentGemma has the second
        scale=scale,
    )
