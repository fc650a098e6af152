"""Any Hugging Face causal LM, frozen, run over packed sequences with many adapters.

Shapes: T packed tokens, H hidden.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from tinsmith.modeling import attention
from tinsmith.modeling.adapter import Group, Target
from tinsmith.modeling.attention import Layout, Packed
from tinsmith.modeling.logprobs import Head, logits
from tinsmith.modeling.lora import ActiveRuns, LoraLinear, Run

logger = logging.getLogger(__name__)

_SELF_CHECK_LENGTHS = (5, 3, 3)
_SELF_CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}


class UnsupportedModel(Exception):
    """This base model cannot be run here; the message says why."""


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A frozen model whose linear layers take adapters.

    Not safe for use by several threads at once: the services run it on one compute thread.
    """

    path: str
    decoder: nn.Module
    head: Head
    targets: Sequence[Target]
    """Every layer that an adapter may change, in the model's order."""
    config: PretrainedConfig
    active: ActiveRuns

    @classmethod
    def load(cls, path: str | Path, *, device: torch.device, dtype: torch.dtype) -> BaseModel:
        """Loads a folder or a Hugging Face id.

        Raises UnsupportedModel when the model's own forward and the packed one disagree, or it has no plain output
        layer.
        """
        transformers_logging.disable_progress_bar()  # it would break up the service's log lines
        config = AutoConfig.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype, attn_implementation="eager")
        model.to(device)  # type: ignore[arg-type]  # transformers' decorated signature
        return cls.of(model, path=str(path))

    @classmethod
    def of(cls, model: PreTrainedModel, *, path: str) -> BaseModel:
        """Takes over a causal LM with eager attention, on its device and in its dtype; `path` is what it is called.

        Raises UnsupportedModel as `load` does.
        """
        model = model.eval().requires_grad_(False)
        probe = _Probe.run(model)  # with its own attention
        model.set_attn_implementation(attention.NAME)
        active = ActiveRuns()
        targets = _adapt(model, active)
        base = cls(
            path=path,
            decoder=model.get_decoder(),
            head=_head(model),
            targets=targets,
            config=model.config.get_text_config(),
            active=active,
        )
        probe.check(base, tolerance=_SELF_CHECK_TOLERANCE[base.dtype])
        return base

    @property
    def device(self) -> torch.device:
        return self.head.weight_V_H.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight_V_H.dtype

    @property
    def vocab_size(self) -> int:
        return self.head.vocab_size

    @property
    def max_context_length(self) -> int:
        return self.config.max_position_embeddings

    @property
    def architecture(self) -> str:
        return (self.config.architectures or [type(self.config).__name__])[0]

    def hidden_states(self, tokens_T: Tensor, positions_T: Tensor, layout: Layout, runs: Sequence[Run]) -> Tensor:
        """The decoder's last hidden states [T, H], in the model's dtype.

        tokens_T and positions_T are int64 [T] on the model's device. Each run's rows get that run's adapter; rows of no
        run get the base model.
        """
        self.active.runs = runs
        try:
            output = self.decoder(
                input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False, layout=layout
            )
        finally:
            self.active.runs = ()
        return output.last_hidden_state[0]


def positions_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """int64 [T]: 0, 1, 2, ... for each sequence, end to end."""
    return torch.cat([torch.arange(length) for length in lengths]).to(device)


def _adapt(model: PreTrainedModel, active: ActiveRuns) -> list[Target]:
    """Puts a LoraLinear in the place of every linear layer that Tinker's train_* flags speak of."""
    output = model.get_output_embeddings()
    found: list[tuple[str, nn.Linear, Group]] = []
    for name, module in model.named_modules():
        # Subclasses of Linear (quantised ones) have another forward; they stay as they are.
        if type(module) is nn.Linear:
            group = "unembed" if module is output else _group(model, name)
            if group is not None:
                found.append((name, module, group))
    targets = []
    for name, module, group in found:
        if group != "unembed":  # the head is run by logprobs.py, in chunks
            model.set_submodule(name, LoraLinear(module, name, active))
        targets.append(Target(name, group, module.in_features, module.out_features))
    return targets


def _group(model: PreTrainedModel, name: str) -> Group | None:
    parents = [type(model.get_submodule(name.rsplit(".", n)[0])).__name__ for n in range(1, name.count(".") + 1)]
    if any("Attention" in parent for parent in parents):
        return "attn"
    if any("MLP" in parent or "Mlp" in parent or "FeedForward" in parent for parent in parents):
        return "mlp"
    return None


def _head(model: PreTrainedModel) -> Head:
    output = model.get_output_embeddings()
    if type(output) is not nn.Linear:
        raise UnsupportedModel(f"the output layer of {type(model).__name__} is not a plain linear layer: {output}")
    config = model.config.get_text_config().to_dict()
    names = {id(module): name for name, module in model.named_modules()}
    scale = 1.0
    if config.get("logit_scale") is not None:  # Cohere
        scale = float(config["logit_scale"])
    elif config.get("logits_scaling") is not None:  # Granite
        scale = 1.0 / float(config["logits_scaling"])
    return Head(
        name=names[id(output)],
        weight_V_H=output.weight,
        bias_V=output.bias,
        softcap=config.get("final_logit_softcapping"),
        scale=scale,
    )


@dataclass(frozen=True, slots=True)
class _Probe:
    """Logits of the model's own forward, one sequence at a time, kept to hold the packed forward against."""

    sequences: Sequence[Tensor]
    logits: Sequence[Tensor]

    @classmethod
    @torch.no_grad()
    def run(cls, model: PreTrainedModel) -> _Probe:
        generator = torch.Generator().manual_seed(0)
        vocab_size = model.config.get_text_config().vocab_size
        sequences = [
            torch.randint(vocab_size, (length,), generator=generator).to(model.device) for length in _SELF_CHECK_LENGTHS
        ]
        return cls(sequences, [model(tokens[None], use_cache=False).logits[0].float() for tokens in sequences])

    @torch.no_grad()
    def check(self, base: BaseModel, *, tolerance: float) -> None:
        lengths = [len(tokens) for tokens in self.sequences]
        hidden = base.hidden_states(
            torch.cat(list(self.sequences)), positions_of(lengths, base.device), Packed(lengths), []
        )
        packed = logits(base.head, hidden, []).log_softmax(-1)
        gap = (packed - torch.cat(list(self.logits)).log_softmax(-1)).abs().max().item()
        logger.info("self-check of %s: packed and plain forward differ by %.2g at most", base.path, gap)
        if not gap <= tolerance:
            raise UnsupportedModel(
                f"{base.architecture} cannot be packed: its logprobs differ by {gap:.3g} (limit {tolerance:g}) from "
                "its own forward. Sequences probably see each other through a layer that is no attention"
            )
