"""Frozen weights in 8 or 4 bits, which are dequantised wherever they are used.

Weights are cut into blocks of 64 in the order in which they lie in memory. A block has one bfloat16 scale, which
follows from its largest magnitude. A weight is the scale times a number: an integer from -127 to 127 (int8), or one of
the 16 values of NormalFloat (nf4; Dettmers et al., QLoRA, arXiv:2305.14314, appendix E). Codes are made in float32 on
the CPU while a model is loaded, and a dequantised weight is one float32 product. So codes and weights are equal in
every process and on every device.

A quantised parameter is a parametrization of its module (torch.nn.utils.parametrize): reading the attribute computes
the weights. Autograd functions must therefore not save what they read; `LoraLinear` and `LoraExperts` read it again in
their backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import ParametrizationList
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from tinsmith.modeling.base_weights import sample_of
from tinsmith.quantization import BLOCK, Quantization

_CHUNK = 2**22
"""Number of weights that are quantised at once, a multiple of BLOCK. It bounds the temporary memory, which is 20 bytes
for each of these weights."""
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_METHOD = "tinsmith"


class Dequantize(nn.Module):
    """The parametrization of a quantised parameter. It holds the form, shape and type, which the codes do not show."""

    def __init__(self, quantize: Quantization, shape: torch.Size, dtype: torch.dtype) -> None:
        super().__init__()
        self.quantize: Quantization = quantize
        self.shape = shape
        self.dtype = dtype

    @torch.no_grad()
    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of a weight, on the CPU."""
        return quantized(weight, self.quantize)

    @torch.no_grad()
    def forward(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The weight, as a new tensor."""
        return dequantized(codes, scales, self.quantize, self.shape, self.dtype)


def quantized(weight: Tensor, quantize: Quantization) -> tuple[Tensor, Tensor]:
    """Codes and scales of a weight, on the CPU. For int8 the codes are int8; for nf4 they are uint8 with two codes
    each, the first one in the high bits. The scales are bfloat16, one for each block. The last block is filled up with
    zeros."""
    flat = weight.detach().flatten()
    num_blocks = -(-flat.numel() // BLOCK)
    per_code = 2 if quantize == "nf4" else 1
    dtype = torch.uint8 if quantize == "nf4" else torch.int8
    codes = torch.empty(num_blocks * BLOCK // per_code, dtype=dtype)
    scales = torch.empty(num_blocks, dtype=torch.bfloat16)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].float()
        part = nn.functional.pad(part, (0, -part.numel() % BLOCK)).view(-1, BLOCK)
        first = start // BLOCK
        there = scales[first : first + part.shape[0]]
        largest = part.abs().amax(1)
        there.copy_(largest if quantize == "nf4" else largest / 127)
        divisor = there.float()[:, None]
        part = part / torch.where(divisor == 0, 1.0, divisor)
        into = codes[start // per_code : start // per_code + part.numel() // per_code]
        if quantize == "nf4":
            code = torch.bucketize(part.flatten(), _borders(), out_int32=True).to(torch.uint8)
            torch.bitwise_or(code[::2] << 4, code[1::2], out=into)
        else:
            into.copy_(part.flatten().round_().clamp_(-127, 127))
    return codes, scales


def dequantized(codes: Tensor, scales: Tensor, quantize: Quantization, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The weight that `quantized` has stored, on the codes' device."""
    if quantize == "nf4":
        # One look-up for two weights. An int64 holds a pair of float32.
        flat = _pairs(codes.device).index_select(0, codes.to(torch.int32)).view(torch.float32)
    else:
        flat = codes.to(torch.float32)
    flat.view(-1, BLOCK).mul_(scales.to(torch.float32)[:, None])
    return flat[: shape.numel()].view(shape).to(dtype)


@cache
def _borders() -> Tensor:
    """The middles between neighbouring values of NormalFloat, float32 [15]."""
    values = torch.tensor(_NF4)
    return (values[1:] + values[:-1]) / 2


@cache
def _pairs(device: torch.device) -> Tensor:
    """For each byte of two nf4 codes, the bits of both float32 values: int64 [256]."""
    values = torch.tensor(_NF4)
    return torch.stack([values.repeat_interleave(16), values.repeat(16)], 1).view(torch.int64)[:, 0].to(device)


def quantize_parameter(module: nn.Module, name: str, quantize: Quantization, dtype: torch.dtype) -> None:
    """Replaces a parameter by its quantised form, which reads as a weight of type `dtype`."""
    weight: Tensor = getattr(module, name)
    parametrize.register_parametrization(module, name, Dequantize(quantize, weight.shape, dtype), unsafe=True)


def quantized_parameters(module: nn.Module) -> Mapping[str, ParametrizationList]:
    """The module's quantised parameters, by name. A call of such a parameter, without arguments, computes the
    weight."""
    if not parametrize.is_parametrized(module):
        return {}
    assert isinstance(module.parametrizations, nn.ModuleDict)
    return {name: one for name, one in module.parametrizations.items() if isinstance(one, ParametrizationList)}


def take_quantized(module: nn.Module, source: nn.Module) -> None:
    """Gives `module` the quantised parameters of `source`. They lie under `parametrizations` there, too, so that their
    names stay."""
    if parametrize.is_parametrized(source):
        module.parametrizations = source.parametrizations


def shape_of(parameter: ParametrizationList) -> torch.Size:
    """Shape of a quantised parameter's weight."""
    return _rule(parameter).shape


def dtype_of(parameter: ParametrizationList) -> torch.dtype:
    """Type of a quantised parameter's weight once it is dequantised."""
    return _rule(parameter).dtype


def _rule(parameter: ParametrizationList) -> Dequantize:
    rule = parameter[0]
    assert isinstance(rule, Dequantize)
    return rule


def all_quantized(model: nn.Module) -> Iterator[tuple[str, ParametrizationList]]:
    """Every quantised parameter of a model, with its name."""
    for prefix, module in model.named_modules():
        for name, parameter in quantized_parameters(module).items():
            yield f"{prefix}.{name}", parameter


def num_weights(module: nn.Module) -> int:
    """Number of the module's weights, quantised or not."""
    quantized = [parameter for _, parameter in all_quantized(module)]
    stored = sum(one.numel() for parameter in quantized for one in parameter.parameters())
    weights = sum(shape_of(parameter).numel() for parameter in quantized)
    return sum(parameter.numel() for parameter in module.parameters()) - stored + weights


# While transformers loads a model


class LoadingConfig(QuantizationConfigMixin):
    """The configuration that transformers passes to `LoadingQuantizer`."""

    def __init__(
        self, quantize: Quantization, dtype: torch.dtype, names_in: Callable[[PreTrainedModel], set[str]]
    ) -> None:
        """`dtype`: type of the dequantised weights. `names_in`: returns the names of the parameters of a model that are
        to be quantised; may raise ValueError."""
        self.quant_method = _METHOD  # type: ignore[assignment]  # transformers names its own methods only
        self.quantize: Quantization = quantize
        self.dtype = dtype
        self.names_in = names_in
        self.names: set[str] = set()
        self.shapes: dict[str, torch.Size] = {}
        """Shapes of all parameters by config.json, before the files are read."""
        self.samples: list[Tensor] = []
        """Samples of each quantised weight before it was quantised, for the checksum (base_weights.py)."""

    def mismatched(self, model: nn.Module) -> list[tuple[str, torch.Size, torch.Size]]:
        """The parameters whose shape differs between the files and config.json: name, shape in the files, shape by
        config.json. transformers compares shapes only if it does not quantise."""
        read = {name: parameter.shape for name, parameter in model.named_parameters()}
        return sorted(
            (name, read[name], shape) for name, shape in self.shapes.items() if read.get(name, shape) != shape
        )

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": _METHOD, "quantize": self.quantize}


class LoadingQuantizer(HfQuantizer):
    """Quantises each weight as soon as it has been read, so that only one weight at a time is in memory unquantised."""

    @property
    def _settings(self) -> LoadingConfig:
        assert isinstance(self.quantization_config, LoadingConfig)
        return self.quantization_config

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        settings = self._settings
        settings.names = settings.names_in(model)
        settings.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        for name in settings.names:
            path, _, own_name = name.rpartition(".")
            module = model.get_submodule(path)
            parameter = module.get_parameter(own_name)
            # transformers reads a weight in the type of its parameter. With float32, the codes do not depend on the
            # model's dtype.
            setattr(module, own_name, nn.Parameter(parameter.to(torch.float32), requires_grad=False))
        return model

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        return param_name in self._settings.names

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self._settings)

    def is_serializable(self) -> bool:  # type: ignore[override]  # transformers annotates neither of these
        return False

    @property
    def is_trainable(self) -> bool:  # type: ignore[override]
        return True


# These are not decorators, because their types would hide the classes from the type checker.
register_quantization_config(_METHOD)(LoadingConfig)
register_quantizer(_METHOD)(LoadingQuantizer)


class _Quantize(ConversionOps):
    def __init__(self, settings: LoadingConfig) -> None:
        self._settings = settings

    def convert(
        self,
        input_dict: dict[str, Any],
        *args: Any,
        model: PreTrainedModel | None = None,
        missing_keys: set[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Quantises weights and puts them into the model. Returns the weights that are not to be quantised, and those
        of a wrong shape, which transformers reports."""
        assert model is not None
        settings, rest = self._settings, {}
        for name, value in input_dict.items():
            weight: Tensor = value[0] if isinstance(value, list) else value
            if name not in settings.names or weight.shape != settings.shapes[name]:
                rest[name] = value
                continue
            settings.samples.append(sample_of(weight))
            path, _, own_name = name.rpartition(".")
            module = model.get_submodule(path)
            setattr(module, own_name, nn.Parameter(weight, requires_grad=False))
            quantize_parameter(module, own_name, settings.quantize, settings.dtype)
            for stored in quantized_parameters(module)[own_name].parameters():
                stored._is_hf_initialized = True  # type: ignore[attr-defined]  # else transformers fills it at random
            if missing_keys is not None:
                missing_keys.discard(name)
        return rest


def quantized_in_files(config: PretrainedConfig) -> str:
    """Name of the method by which a model's files are quantised; empty if the files are not quantised."""
    for part in (config, config.get_text_config()):
        method = getattr(part, "quantization_config", None)
        if method is not None:
            return str(method.get("quant_method", "?") if isinstance(method, dict) else method.quant_method)
    return ""
