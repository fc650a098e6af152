"""Finds the layers of a Hugging Face model that adapters may change, and replaces them by adapted ones."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from tinsmith.modeling.adapter import Group, Target
from tinsmith.modeling.experts import LoraExperts, is_fused_experts
from tinsmith.modeling.lora import ActiveRuns, LoraLinear


def decoder_layers(decoder: nn.Module, count: int) -> Sequence[nn.Module]:
    """The outermost list of `count` modules; empty if there is none."""
    for module in decoder.modules():  # parents come before their children
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    return []


_TIED_HEAD = "model.unembed_tokens"
"""Name of the output layer in the files of the hosted service, if it shares the embedding's weight."""


def adapt(model: PreTrainedModel, active: ActiveRuns, *, replace: bool) -> tuple[Sequence[Target], dict[Group, str]]:
    """Replaces every layer that Tinker's train_* flags select by a LoraLinear or LoraExperts.

    Returns the layers, and the groups that cannot be adapted, with the reasons. Without `replace`, it only lists the
    linear layers.
    """
    output = model.get_output_embeddings()
    is_tied = output is not None and output.weight is model.get_input_embeddings().weight
    of_text = set(model.get_decoder().modules())  # other parts, such as an encoder of images, are not run here
    targets: list[Target] = []
    unknown: set[str] = set()
    foreign: dict[Group, set[str]] = {}
    for name, module in list(model.named_modules()):
        if module not in of_text and module is not output:
            continue
        # Subclasses of Linear (quantised ones) have a forward of their own, so they stay as they are.
        if type(module) is nn.Linear:
            group = "unembed" if module is output else _group(model, name)
            if group is not None:
                tinker_name = _TIED_HEAD if module is output and is_tied else None
                targets.append(Target(name, group, module.in_features, module.out_features, tinker_name=tinker_name))
            if replace and group in ("attn", "mlp"):  # logprobs.py computes the output layer, in chunks
                model.set_submodule(name, LoraLinear(module, name, active))
        elif is_fused_experts(module):
            if replace:
                experts = LoraExperts(module, name, active)
                model.set_submodule(name, experts)
                targets += [experts.up, experts.down]
        elif "Conv1D" in type(module).__name__ or isinstance(module, nn.Linear):
            if group := _group(model, name):
                foreign.setdefault(group, set()).add(type(module).__name__)
        elif "Expert" in type(module).__name__ and any(True for _ in module.parameters(recurse=False)):
            unknown.add(type(module).__name__)
    refused: dict[Group, str] = {
        group: f"this base model has {', '.join(sorted(names))} layers there, and only nn.Linear can be adapted"
        for group, names in foreign.items()
        if not any(target.group == group for target in targets)
    }
    if not unknown:
        return targets, refused
    # train_mlp means all feed-forward layers, so none is adapted if some cannot be.
    reason = f"the experts of this base model ({', '.join(sorted(unknown))}) cannot be adapted here"
    return [target for target in targets if target.group != "mlp"], {**refused, "mlp": reason}


def _group(model: PreTrainedModel, name: str) -> Group | None:
    parents = [model.get_submodule(name.rsplit(".", n)[0]) for n in range(1, name.count(".") + 1)]
    names = [type(parent).__name__ for parent in parents]
    if any("Attention" in parent for parent in names):
        return "attn"
    if any(hasattr(parent, "experts") for parent in parents[:1]) or any("Router" in parent for parent in names):
        return None  # the router, which chooses the experts, is never adapted
    if any("MLP" in parent or "Mlp" in parent or "FeedForward" in parent for parent in names):
        return "mlp"
    if name.endswith((".fc1", ".fc2")):  # as in OPT, where these layers have no parent module of their own
        return "mlp"
    return None
