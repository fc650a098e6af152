"""The layers of a base model, from its config.json.

The sizes of the models in FAMILIES and of the towers in TOWERS are computed exactly; a test compares them with loaded
models. The layers of other models are counted in a model that transformers makes (counted.py). A language model that
cannot be counted is estimated as a dense Llama, and the size of its files gives its number of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tinsmith_cli.base_models import UsageError
from tinsmith_cli.planning.counted import CountedLayer, CountedModel, NotCounted, count
from tinsmith_cli.planning.shape import Layer, Matrix, Shape, Widths

Config = Mapping[str, Any]

NO_LIMIT = 2**20
"""Context length of a model without position embeddings, in tokens, which trainer and sampler use, too."""


class UnknownModel(UsageError):
    """The planner does not know the size of this model. The services may still load it."""


def of_config(config: Config, *, name: str, stored: int | None = None) -> Shape:
    """The shape of a model. `config`: content of config.json. `stored`: number of parameters in the files; None if it
    is unknown. Raises UsageError for a missing field, and UnknownModel for a model of an unknown family that cannot be
    counted and has no files."""
    nested = config.get("text_config")
    is_text = not isinstance(nested, dict)
    text: Config = config if is_text else {**config, **nested}
    family = str(text.get("model_type", "unknown"))
    tower_of = TOWERS.get(str(config.get("model_type")))
    counted, why_not = None, ""
    if family not in FAMILIES or not (is_text or tower_of):
        try:
            counted = count(config)
        except NotCounted as error:
            why_not = str(error)
        else:
            text = {**counted.config, "tie_word_embeddings": counted.tied}
            family = str(text["model_type"])
    try:
        if (layers := FAMILIES.get(family)) is None:
            if counted is not None:
                return _with_counts(_shape(text, family, _dense(text), note=_note(config)), counted, text)
            return _of_files(_shape(text, family, _dense(text)), text, stored, name=name, why_not=why_not)
        text = {**_DEFAULTS.get(family, {}), **text}
        if "tie_word_embeddings" in config and counted is None:  # the value of the whole model decides
            text["tie_word_embeddings"] = config["tie_word_embeddings"]
        found = _shape(text, family, layers(text), note=_note(config))
        if counted is not None:
            return replace(
                found,
                tower=counted.tower,
                tower_parameters=counted.tower_parameters,
                outside_more=counted.parameters - found.parameters,
            )
        if tower_of is not None:
            return _with_tower(found, *tower_of(config["vision_config"], text))
    except KeyError as error:
        raise UsageError(
            f"{name}: config.json has no {error.args[0]}, which the size of a model of type {family!r} depends on"
        ) from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise UsageError(f"{name}: config.json does not describe a model of type {family!r}: {error}") from None
    return found if is_text else _without_tower(found, config, stored, why_not=why_not)


def _with_counts(estimate: Shape, counted: CountedModel, text: Config) -> Shape:
    """The estimated shape, with the counted numbers of parameters in it."""
    if counted.layers:
        layers = _counted_layers(counted.layers, estimate.layers[0].widths, estimate.layers[0].kv_elements, text)
        estimate = replace(estimate, layers=layers)
    note = (
        f"models of type {estimate.family!r} are unknown to the planner: parameters are counted, keys, values and "
        "activations are estimates"
    )
    return replace(
        estimate,
        outside_more=counted.parameters - estimate.parameters,
        tower=counted.tower,
        tower_parameters=counted.tower_parameters,
        is_estimate=True,
        recurrent=_carries_state(text, estimate.family),
        note="; ".join(filter(None, [estimate.note, note])),
    )


def _counted_layers(counted: Sequence[CountedLayer], usual: Widths, usual_kv: int, text: Config) -> list[Layer]:
    """The counted layers. Their widths follow from the matrices with the usual names, such as q_proj. `usual`,
    `usual_kv`: widths, and elements of keys and values, of a layer or model without such names."""
    has_keys = any(name.endswith("k_proj") for one in counted for name in one.matrices)
    taken = text.get("num_experts_per_tok") or text.get("top_k_experts") or 0
    layers: list[Layer] = []
    for one in counted:
        matrices = list(one.matrices.values())
        outputs = {name.rpartition(".")[2]: matrix.outputs for name, matrix in one.matrices.items()}
        keys = outputs.get("k_proj", 0) if has_keys else usual.keys  # a layer may use the keys of an earlier layer
        inner = sum(m.outputs for name, m in one.matrices.items() if name.endswith("up_proj") and not m.num_experts)
        inner += taken * sum(matrix.inputs for matrix in matrices if matrix.shares == "B")
        pairs = taken if any(matrix.num_experts for matrix in matrices) else 0
        widths = Widths(outputs.get("q_proj", usual.queries), keys, inner or usual.inner, pairs)
        layers.append(Layer(matrices, one.others, 2 * keys if has_keys else usual_kv, widths))
    return layers


def _of_files(estimate: Shape, text: Config, stored: int | None, *, name: str, why_not: str) -> Shape:
    """The estimated shape, with the number of parameters in the files. Raises UnknownModel without files."""
    if stored is None:
        raise UnknownModel(
            f"{name}: the planner does not know models of type {estimate.family!r} and cannot count this one "
            f"({why_not}), and finds no safetensors files to take its size from; it knows "
            f"{', '.join(sorted(FAMILIES))}. Give a folder with the weights"
        )
    note = (
        f"models of type {estimate.family!r} are unknown to the planner and cannot be counted ({why_not}): an estimate "
        "from the size of the files"
    )
    more = max(0, stored - estimate.parameters)
    return replace(
        estimate,
        outside_more=more,
        is_estimate=True,
        recurrent=_carries_state(text, estimate.family),
        note=note,
    )


def _carries_state(text: Config, family: str) -> bool:
    return bool({"linear_attention", "mamba", "conv"} & {*(text.get("layer_types") or ())}) or "mamba" in family


def _without_tower(shape: Shape, config: Config, stored: int | None, *, why_not: str) -> Shape:
    """The shape of a model whose towers cannot be counted. Parameters of the files beyond those of the language model
    are taken for the towers'."""
    parts = ", ".join(name for name in ("vision_config", "audio_config") if config.get(name) is not None)
    which = f"parts beside the language model ({parts})" if parts else "parts beside the language model"
    more, where = 0, "the plan leaves them out, and each service takes more memory by them"
    if stored is not None and stored > shape.parameters and not shape.note:
        more, where = stored - shape.parameters, "they are taken to be the rest of the files"
    note = f"{which} cannot be counted ({why_not}): {where}"
    return replace(
        shape,
        tower_parameters=more,
        outside_more=shape.outside_more + more,
        is_estimate=True,
        note="; ".join(filter(None, [shape.note, note])),
    )


def _note(config: Config) -> str:
    quantised = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not isinstance(quantised, dict):
        return ""
    return (
        f"the files are quantised ({quantised.get('quant_method', 'unknown method')}): the services load them as "
        "whole numbers of the type below, if transformers can"
    )


def _shape(c: Config, family: str, layers: Sequence[Layer], *, note: str = "") -> Shape:
    heads = c["num_attention_heads"]
    return Shape(
        family=family,
        hidden=c["hidden_size"],
        vocab=c["vocab_size"],
        context=c.get("max_position_embeddings") or NO_LIMIT,
        layers=layers,
        tied=bool(c.get("tie_word_embeddings", family in _TIED)),
        heads=heads,
        kv_heads=c.get("num_key_value_heads") or heads,
        latent="kv_lora_rank" in c,
        recurrent="linear_attention" in (c.get("layer_types") or ()),
        state_heads=c.get("linear_num_key_heads") or 0,
        note=note,
    )


def _with_tower(shape: Shape, matrices: Sequence[Matrix], others: int) -> Shape:
    """The shape with a vision tower. `matrices`: the tower's linear layers. `others`: its other parameters."""
    parameters = sum(matrix.parameters for matrix in matrices) + others
    return replace(shape, tower=matrices, tower_parameters=parameters, outside_more=shape.outside_more + parameters)


_TIED = {"gemma3_text"}
"""Families whose output layer shares the embedding's weight unless the configuration says otherwise."""


def _attention(c: Config, *, qkv_bias: bool, out_bias: bool, head_norms: bool, sinks: bool = False) -> Layer:
    """Grouped-query attention, as a layer without a feed-forward part."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    kv_heads = c.get("num_key_value_heads") or heads
    head_dim = c.get("head_dim") or hidden // heads
    queries, keys = heads * head_dim, kv_heads * head_dim
    matrices = [
        Matrix(hidden, queries, "attn", bias=qkv_bias),
        *[Matrix(hidden, keys, "attn", bias=qkv_bias)] * 2,
        Matrix(queries, hidden, "attn", bias=out_bias),
    ]
    others = 2 * hidden + 2 * head_dim * head_norms + heads * sinks
    return Layer(matrices, others, 2 * keys, Widths(queries, keys, 0))


def _mlp(hidden: int, inner: int, *, bias: bool = False) -> list[Matrix]:
    up, down = Matrix(hidden, inner, "mlp", bias=bias), Matrix(inner, hidden, "mlp", bias=bias)
    return [up, up, down]


def _experts(hidden: int, inner: int, count: int, *, bias: bool = False) -> list[Matrix]:
    """Fused experts, with gate and up projections in one tensor."""
    return [
        Matrix(hidden, 2 * inner, "mlp", num_experts=count, shares="A", bias=bias),
        Matrix(inner, hidden, "mlp", num_experts=count, shares="B", bias=bias),
    ]


def _count(c: Config, name: str) -> int:
    """Number of experts: the field `name`, or transformers' other name for it, num_local_experts."""
    return c[name] if name in c else c["num_local_experts"]


def _with(attention: Layer, matrices: Sequence[Matrix], *, inner: int, pairs: int = 0, others: int = 0) -> Layer:
    """A layer of attention with the matrices of a feed-forward part. `inner`, `pairs`: see Widths. `others`: further
    parameters."""
    widths = replace(attention.widths, inner=inner, num_pairs=pairs)
    return replace(
        attention, matrices=[*attention.matrices, *matrices], others=attention.others + others, widths=widths
    )


def _dense_layer(c: Config, attention: Layer) -> Layer:
    inner = c["intermediate_size"]
    return _with(attention, _mlp(c["hidden_size"], inner, bias=bool(c.get("mlp_bias"))), inner=inner)


def _dense(c: Config) -> list[Layer]:
    bias = bool(c.get("attention_bias"))
    return [_dense_layer(c, _attention(c, qkv_bias=bias, out_bias=bias, head_norms=False))] * c["num_hidden_layers"]


def _qwen2(c: Config) -> list[Layer]:
    return [_dense_layer(c, _attention(c, qkv_bias=True, out_bias=False, head_norms=False))] * c["num_hidden_layers"]


def _qwen3_attention(c: Config) -> Layer:
    bias = bool(c.get("attention_bias"))
    c = {"head_dim": 128, **c}
    return _attention(c, qkv_bias=bias, out_bias=bias, head_norms=True)


def _qwen3(c: Config) -> list[Layer]:
    return [_dense_layer(c, _qwen3_attention(c))] * c["num_hidden_layers"]


def _qwen3_moe(c: Config) -> list[Layer]:
    bias = bool(c.get("attention_bias"))
    attention, hidden, inner = (
        _attention(c, qkv_bias=bias, out_bias=bias, head_norms=True),
        c["hidden_size"],
        c["moe_intermediate_size"],
    )
    count, taken = _count(c, "num_experts"), c["num_experts_per_tok"]
    sparse = _with(
        attention,
        [Matrix(hidden, count), *_experts(hidden, inner, count)],
        inner=taken * inner,
        pairs=taken,
    )
    dense = _dense_layer(c, attention)
    only_dense, step = c.get("mlp_only_layers") or [], c.get("decoder_sparse_step", 1)
    return [dense if n in only_dense or (n + 1) % step else sparse for n in range(c["num_hidden_layers"])]


def _mixtral(c: Config) -> list[Layer]:
    attention, hidden, inner = (
        _attention(c, qkv_bias=False, out_bias=False, head_norms=False),
        c["hidden_size"],
        c["intermediate_size"],
    )
    count, taken = _count(c, "num_experts"), c["num_experts_per_tok"]
    matrices = [Matrix(hidden, count), *_experts(hidden, inner, count)]
    return [_with(attention, matrices, inner=taken * inner, pairs=taken)] * c["num_hidden_layers"]


def _gpt_oss(c: Config) -> list[Layer]:
    bias, hidden, inner = bool(c.get("attention_bias", True)), c["hidden_size"], c["intermediate_size"]
    attention = _attention(c, qkv_bias=bias, out_bias=bias, head_norms=False, sinks=True)
    count, taken = _count(c, "num_experts"), c["num_experts_per_tok"]
    matrices = [Matrix(hidden, count, bias=True), *_experts(hidden, inner, count, bias=True)]
    return [_with(attention, matrices, inner=taken * inner, pairs=taken)] * c["num_hidden_layers"]


def _after_dense(c: Config, attention: Layer) -> list[Layer]:
    """`first_k_dense_replace` dense layers, then layers of routed and shared experts."""
    hidden, inner = c["hidden_size"], c["moe_intermediate_size"]
    count, taken, shared = _count(c, "n_routed_experts"), c["num_experts_per_tok"], c.get("n_shared_experts") or 0
    experts = [Matrix(hidden, count), *_experts(hidden, inner, count)]
    if shared:
        experts += _mlp(hidden, inner * shared)
    sparse = _with(attention, experts, inner=(taken + shared) * inner, pairs=taken)
    num_layers = c["num_hidden_layers"]
    num_dense = min(c["first_k_dense_replace"], num_layers)
    return [*[_dense_layer(c, attention)] * num_dense, *[sparse] * (num_layers - num_dense)]


def _deepseek_v3(c: Config) -> list[Layer]:
    hidden, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    own, rotated, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    bias, others = bool(c.get("attention_bias")), 2 * hidden + rank
    if (q_rank := c.get("q_lora_rank")) is None:
        queries = [Matrix(hidden, heads * (own + rotated), "attn")]
    else:
        queries = [Matrix(hidden, q_rank, "attn", bias=bias), Matrix(q_rank, heads * (own + rotated), "attn")]
        others += q_rank
    matrices = [
        *queries,
        Matrix(hidden, rank + rotated, "attn", bias=bias),
        Matrix(rank, heads * (own + value), "attn"),
        Matrix(heads * value, hidden, "attn", bias=bias),
    ]
    # Training makes the keys and values of all heads.
    widths = Widths(heads * (own + rotated), heads * max(own + rotated, value), 0)
    return _after_dense(c, Layer(matrices, others, rank + rotated, widths))


def _delta(c: Config) -> Layer:
    """Gated DeltaNet, as a layer without a feed-forward part."""
    hidden, heads, own = c["hidden_size"], c["linear_num_value_heads"], c["linear_value_head_dim"]
    keys, values = c["linear_num_key_heads"] * c["linear_key_head_dim"], heads * own
    mixed = 2 * keys + values
    inputs = [Matrix(hidden, outputs, "attn") for outputs in (mixed, values, heads, heads)]
    others = 2 * hidden + mixed * (c.get("linear_conv_kernel_dim") or 4) + 2 * heads + own
    return Layer([*inputs, Matrix(values, hidden, "attn")], others, 0, Widths(2 * mixed + 3 * values, 0, 0))


def _gated_attention(c: Config) -> Layer:
    """Attention with a gate that has as many features as the queries, and comes from the same matrix."""
    bias = bool(c.get("attention_bias"))
    found = _attention({"head_dim": 256, **c}, qkv_bias=bias, out_bias=bias, head_norms=True)
    queries, *others = found.matrices
    both = replace(queries, outputs=2 * queries.outputs)
    return replace(found, matrices=[both, *others], widths=replace(found.widths, queries=3 * queries.outputs))


def _alternating(c: Config, complete: Callable[[Layer], Layer]) -> list[Layer]:
    """Layers of Gated DeltaNet and of attention. `complete`: adds a feed-forward layer."""
    step = c.get("full_attention_interval") or 4
    kinds = c.get("layer_types") or [
        "linear_attention" if (n + 1) % step else "full_attention" for n in range(c["num_hidden_layers"])
    ]
    made = {"linear_attention": complete(_delta(c)), "full_attention": complete(_gated_attention(c))}
    return [made[kind] for kind in kinds]


def _qwen3_5(c: Config) -> list[Layer]:
    return _alternating(c, lambda attention: _dense_layer(c, attention))


def _qwen3_5_moe(c: Config) -> list[Layer]:
    hidden, inner, shared = c["hidden_size"], c["moe_intermediate_size"], c["shared_expert_intermediate_size"]
    count, taken = _count(c, "num_experts"), c["num_experts_per_tok"]
    matrices = [Matrix(hidden, count), *_experts(hidden, inner, count), *_mlp(hidden, shared), Matrix(hidden, 1)]
    return _alternating(c, lambda one: _with(one, matrices, inner=taken * inner + shared, pairs=taken))


def _gemma3(c: Config) -> list[Layer]:
    bias, hidden, inner = bool(c.get("attention_bias")), c["hidden_size"], c["intermediate_size"]
    attention = _attention(c, qkv_bias=bias, out_bias=bias, head_norms=True)
    # The norms after attention and after the feed-forward layer keep as much memory as `hidden` inner features.
    layer = _with(attention, _mlp(hidden, inner), inner=inner + hidden, others=2 * hidden)
    return [layer] * c["num_hidden_layers"]


def _glm4_moe(c: Config) -> list[Layer]:
    bias = bool(c.get("attention_bias"))
    attention = _attention(c, qkv_bias=bias, out_bias=False, head_norms=bool(c.get("use_qk_norm")))
    return _after_dense(c, attention)


FAMILIES: Mapping[str, Callable[[Config], list[Layer]]] = {
    "llama": _dense,
    "mistral": _dense,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "qwen3_vl_text": _qwen3,
    "qwen3_vl_moe_text": _qwen3_moe,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5_moe,
    "gemma3_text": _gemma3,
}
"""Functions that compute the layers from the configuration of the language model, by its `model_type`."""
_DEFAULTS: Mapping[str, Config] = {
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
}
"""Settings that published configurations leave out, by `model_type`."""


def _linear(inputs: int, outputs: int) -> Matrix:
    return Matrix(inputs, outputs, "vision", bias=True)


def _qwen_tower(v: Config, _: Config) -> tuple[list[Matrix], int]:
    hidden, inner, patch = v["hidden_size"], v["intermediate_size"], v["patch_size"]
    merged = hidden * v.get("spatial_merge_size", 2) ** 2
    ends = [_linear(merged, merged), _linear(merged, v["out_hidden_size"])]
    early = len(v.get("deepstack_visual_indexes") or ())
    block = [
        _linear(hidden, 3 * hidden), _linear(hidden, hidden), _linear(hidden, inner), _linear(inner, hidden),
    ]  # fmt: skip
    pixels = v.get("in_channels", 3) * v.get("temporal_patch_size", 2) * patch**2
    embedded = (pixels + 1 + v["num_position_embeddings"]) * hidden
    norms = 4 * hidden * v["depth"] + 2 * hidden + 2 * merged * early
    return [*block * v["depth"], *ends * (1 + early)], embedded + norms


def _gemma3_tower(v: Config, text: Config) -> tuple[list[Matrix], int]:
    hidden, inner, patch, count = v["hidden_size"], v["intermediate_size"], v["patch_size"], v["num_hidden_layers"]
    layer = [*[_linear(hidden, hidden)] * 4, _linear(hidden, inner), _linear(inner, hidden)]
    embedded = (3 * patch**2 + 1 + (v["image_size"] // patch) ** 2) * hidden
    others = embedded + 4 * hidden * count + 2 * hidden + hidden * text["hidden_size"] + hidden
    if v.get("vision_use_head", True):  # the head is an attention over the patches, from which no feature comes
        own = [*[_linear(hidden, hidden)] * 4, _linear(hidden, inner), _linear(inner, hidden)]
        others += sum(one.parameters for one in own) + 3 * hidden
    return layer * count, others


TOWERS: Mapping[str, Callable[[Config, Config], tuple[list[Matrix], int]]] = {
    "qwen3_vl": _qwen_tower,
    "qwen3_vl_moe": _qwen_tower,
    "qwen3_5": _qwen_tower,
    "qwen3_5_moe": _qwen_tower,
    "gemma3": _gemma3_tower,
}
"""Functions that compute a vision tower from the configurations of tower and language model, by the `model_type` of the
whole model. They return the tower's layers that take adapters, and the number of its other parameters."""
