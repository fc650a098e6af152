"""Finds the layers of a Hugging Face model that adapters may change, and replaces them by adapted ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace as with_values
from functools import partial
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tinsmith.modeling.adapter import Group, Target
from tinsmith.modeling.adapter_runs import ActiveRuns
from tinsmith.modeling.experts import LoraExperts, is_fused_experts
from tinsmith.modeling.lora import LoraLinear
from tinsmith.modeling.padded import carries_state


def decoder_layers(decoder: nn.Module, count: int) -> Sequence[nn.Module]:
    """The decoder's layers: the outermost list of `count` modules. Empty if there is none."""
    for module in decoder.modules():  # parents come before their children
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    return []


def decoder_of(model: PreTrainedModel) -> Any:
    """The decoder of a causal LM. transformers' own get_decoder returns the whole model for some models, such as
    Llama 4."""
    decoder = model.get_decoder()
    return decoder if decoder.get_output_embeddings() is None else decoder.model


_PEFT_WITHOUT_OUT_PROJ = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}
"""Types of models whose out_proj PEFT refuses to adapt."""
_TIED_HEAD = "model.unembed_tokens"
"""Name of the output layer in the files of the hosted service, if it shares the embedding's weight."""
_BESIDE_TOWER, _TEXT_ONLY = "model.language_model.", "model."
"""Beginnings of a layer's name: in a language model beside a vision tower, and in the hosted service's files."""


def adapt(
    model: PreTrainedModel,
    active: ActiveRuns,
    *,
    replace: bool,
    for_pictures: Collection[str] = (),
    seeing: ActiveRuns | None = None,
    by_columns: bool = True,
) -> tuple[Sequence[Target], dict[Group, str]]:
    """Replaces every layer that Tinker's train_* flags select by a LoraLinear or LoraExperts.

    Returns the targets, and the groups that cannot be adapted, with the reasons. `replace`: False replaces nothing, and
    returns only the linear layers. `for_pictures`: names of the linear layers for pictures, which read the runs of
    `seeing`. `by_columns`: see LoraLinear; False for a model that is divided among ranks afterwards, because only this
    rank's part may be copied.
    """
    output = model.get_output_embeddings()
    is_tied = output is not None and output.weight is model.get_input_embeddings().weight
    of_text = set(decoder_of(model).modules())
    targets: list[Target] = []
    groups_of: dict[str, set[Group | None]] = {}
    unknown: set[str] = set()
    foreign: dict[Group, set[str]] = {}
    for name, module in list(model.named_modules()):
        if module not in of_text and module is not output:
            if seeing is not None and name in for_pictures:
                assert isinstance(module, nn.Linear)
                targets.append(Target(name, "vision", module.in_features, module.out_features))
                model.set_submodule(name, LoraLinear(module, name, seeing))
            continue
        linear = _linear(module)
        if linear is not None:
            group = "unembed" if module is output else _group(model, name)
            groups_of.setdefault(_end(name), set()).add(group)
            if group is not None:
                targets.append(
                    Target(
                        name,
                        group,
                        linear.in_features,
                        linear.out_features,
                        tinker_name=_TIED_HEAD if module is output and is_tied else None,
                        fan_in_fan_out=linear is not module,
                    )
                )
            if replace and group in ("attn", "mlp"):  # logprobs.py computes the output layer, in chunks
                model.set_submodule(name, LoraLinear(linear, name, active, by_columns=by_columns))
        elif is_fused_experts(module):
            if replace:
                experts = LoraExperts(module, name, active)
                model.set_submodule(name, experts)
                targets += [experts.up, experts.down]
        elif isinstance(module, nn.Linear | Conv1D):
            if group := _group(model, name):
                foreign.setdefault(group, set()).add(type(module).__name__)
        elif "Expert" in type(module).__name__ and any(True for _ in module.parameters(recurse=False)):
            unknown.add(type(module).__name__)
    targets = [_named_as_hosted(target) for target in targets]
    targets = [with_values(one, ambiguous=len(groups_of.get(_end(one.name), ())) > 1) for one in targets]
    refused: dict[Group, str] = {
        group: f"this base model has {', '.join(sorted(names))} layers there; only nn.Linear and Conv1D can be adapted"
        for group, names in foreign.items()
        if not any(target.group == group for target in targets)
    }
    if not unknown:
        return targets, refused
    # train_mlp means all feed-forward layers, so none is adapted if some cannot be.
    reason = f"the experts of this base model ({', '.join(sorted(unknown))}) cannot be adapted here"
    return [target for target in targets if target.group != "mlp"], {**refused, "mlp": reason}


def quantizable(model: PreTrainedModel) -> set[str]:
    """Names of the weights that are quantised: the weights of all layers of text that `adapt` replaces. Embeddings,
    norms, routers, convolutions, the output layer and the vision tower are not quantised. Raises ValueError if a large
    part of the model cannot be quantised."""
    output, of_text = model.get_output_embeddings(), set(decoder_of(model).modules())
    names: set[str] = set()
    for name, module in model.named_modules():
        if module not in of_text or module is output:
            continue
        if type(module) is nn.Linear:
            if _group(model, name) is not None:
                names.add(f"{name}.weight")
        elif is_fused_experts(module):
            names |= {f"{name}.{key}" for key, parameter in module.named_parameters() if parameter.ndim == 3}
        elif type(module) is Conv1D or ("Expert" in type(module).__name__ and next(module.parameters(False), None)):
            raise ValueError(
                f"quantize: {name} ({type(module).__name__}) cannot be quantised, only nn.Linear layers and fused "
                "experts in the form of transformers' experts interface; leave it out for this model"
            )
    if not names:
        raise ValueError(f"quantize: {type(model).__name__} has no layers that can be quantised; leave it out")
    return names


def _named_as_hosted(target: Target) -> Target:
    """The target with its name in the hosted service's files, if it belongs to a language model beside a tower; else
    the target itself."""
    name = target.tinker_name or target.name
    if not name.startswith(_BESIDE_TOWER):
        return target
    return with_values(target, tinker_name=_TEXT_ONLY + name.removeprefix(_BESIDE_TOWER))


def _linear(module: nn.Module) -> nn.Linear | None:
    """The module if it is an nn.Linear. For GPT-2's Conv1D, a linear layer with its parameters, W transposed. None for
    any other module, also for a subclass, because it may have a forward of its own."""
    if type_before_parametrizations(module) is nn.Linear:
        assert isinstance(module, nn.Linear)
        return module
    if type(module) is not Conv1D:
        return None
    in_features, out_features = module.weight.shape
    linear = nn.Linear(in_features, out_features, device="meta")
    linear.weight = nn.Parameter(module.weight.detach().T, requires_grad=module.weight.requires_grad)
    linear.bias = module.bias
    return linear


def hand_on_layout(decoder: nn.Module, active: ActiveRuns) -> None:
    """Makes all attention modules pass the layout of the present pass on to the attention function. Needed for decoder
    layers that do not pass keyword arguments on to their attention."""
    for module in decoder.modules():
        if "Attention" in type(module).__name__ and hasattr(module, "layer_idx"):
            module.forward = partial(_with_layout, module.forward, active)


def _with_layout(forward: Callable[..., Any], active: ActiveRuns, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs) if active.layout is None else forward(*args, **kwargs, layout=active.layout)


def _group(model: PreTrainedModel, name: str) -> Group | None:
    """The group of the layer `name`, by the classes of the modules around it; None if adapters cannot change it."""
    path = name.rpartition(".")[0]
    parents = [path.rsplit(".", n)[0] for n in range(path.count(".") + 1)] if path else []
    for n, parent in enumerate(map(model.get_submodule, parents)):  # the nearest module comes first
        kind = type(parent).__name__
        if (n == 0 and hasattr(parent, "experts")) or "Router" in kind or "Indexer" in kind:
            return None  # it chooses experts, or tokens to attend to, and a choice has no gradient
        if carries_state(parent):  # such layers take the place of attention
            return None if _end(name) in _read_by_weight(model) else "attn"
        if "Attention" in kind and "Layer" not in kind:
            return "attn"
        if "MLP" in kind or "Mlp" in kind or "FeedForward" in kind:
            return "mlp"
    if _end(name) in ("fc1", "fc2"):  # as in OPT, where these layers have no parent module of their own
        return "mlp"
    return None


def _end(name: str) -> str:
    return name.rpartition(".")[2]


def _read_by_weight(model: PreTrainedModel) -> set[str]:
    """Names of linear layers in a recurrent layer whose weights it may read without calling them, so that an adapter
    would have no effect. out_proj is among them for the models for which PEFT refuses it."""
    return {"dt_proj", "out_proj"} if model.config.model_type in _PEFT_WITHOUT_OUT_PROJ else {"dt_proj"}
