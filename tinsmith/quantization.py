"""The forms in which a frozen base model's weights can be stored, and the memory that each takes. Loads no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

Quantization = Literal["int8", "nf4"]
"""int8: 8 bits, evenly spaced. nf4: 4 bits, the 16 values of QLoRA's NormalFloat."""
QUANTIZATIONS: tuple[Quantization, ...] = ("int8", "nf4")
BLOCK = 64
"""Number of consecutive weights that share a scale."""
_SCALE_BYTES = 2
_CODE_BYTES = {"int8": 1.0, "nf4": 0.5}
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def bytes_per_parameter(quantize: Quantization | None, dtype: str) -> float:
    """Bytes of one weight that is stored in the form `quantize`, with its part of the scale. With None, the weight is
    of type `dtype`, as those of embeddings, norms, routers and the output layer always are."""
    if quantize is None:
        return _DTYPE_BYTES[dtype]
    return _CODE_BYTES[quantize] + _SCALE_BYTES / BLOCK


def described(quantize: str) -> str:
    """The form of the base weights, in words for messages. An empty `quantize` means that they are not quantised."""
    return f"quantised to {quantize}" if quantize else "not quantised"


def check_quantization(value: object) -> object:
    """Returns the value. Raises ValueError for fp8, with the reason."""
    if value == "fp8":
        raise ValueError(
            "'fp8' is not supported: with products in float32 or bfloat16 it would take the memory of int8 and round "
            "four times as coarsely; set it to 'int8', or to 'nf4' for half the memory"
        )
    return value


Setting = Annotated[Quantization | None, BeforeValidator(check_quantization)]
"""The setting `quantize` of trainer and sampler; None stores the weights as they are."""
