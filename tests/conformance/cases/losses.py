"""Each loss that the SDK can name, against its formula, computed here in numpy from what `forward` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import tinker
from tinker import types

from tests.conformance.kit import Absent, case
from tests.conformance.world import CLOSE, TEXTS, Floats, World, assert_close, datum, logprobs, need, settle

LOW, HIGH = 0.9, 1.1
BETA = 0.05

Loss = Callable[[Floats, Floats, Floats, Floats], float]


def _clip(ratio: Floats) -> Floats:
    return np.clip(ratio, LOW, HIGH)


def importance_sampling(p: Floats, q: Floats, a: Floats, mask: Floats) -> float:
    return -float((np.exp(p - q) * a).sum())


def ppo(p: Floats, q: Floats, a: Floats, mask: Floats) -> float:
    ratio = np.exp(p - q)
    return -float(np.minimum(ratio * a, _clip(ratio) * a).sum())


def cispo(p: Floats, q: Floats, a: Floats, mask: Floats) -> float:
    return -float((_clip(np.exp(p - q)) * p * a).sum())


def dro(p: Floats, q: Floats, a: Floats, mask: Floats) -> float:
    return -float((p * a - BETA / 2 * (p - q) ** 2).sum())


def gspo(p: Floats, q: Floats, a: Floats, mask: Floats) -> float:
    ratio = np.exp((mask * (p - q)).sum() / mask.sum())
    return -float(np.minimum(ratio * a, _clip(ratio) * a).sum())


CLIPS = {"clip_low_threshold": LOW, "clip_high_threshold": HIGH}
POLICY_LOSSES: dict[str, tuple[Loss, dict[str, float]]] = {
    "importance_sampling": (importance_sampling, {}),
    "ppo": (ppo, CLIPS),
    "cispo": (cispo, CLIPS),
    "dro": (dro, {"beta": BETA}),
    "gspo": (gspo, CLIPS),
}
OTHER_LOSSES = {"cross_entropy", "stable_reinforce", "custom"}


def known() -> tuple[str, ...]:
    """The losses that the SDK names."""
    return get_args(types.LossFnType)


@case("loss: every one that the SDK names has a row here")
def every_loss(world: World) -> None:
    unseen = set(known()) - set(POLICY_LOSSES) - OTHER_LOSSES
    assert not unseen, f"no case for {sorted(unseen)}"


@case("loss: cross_entropy")
def cross_entropy(world: World) -> None:
    weights = [np.linspace(-0.5, 1.5, len(text) - 1).astype(np.float32) for text in TEXTS]
    data = [datum(text, weights=w) for text, w in zip(TEXTS, weights, strict=True)]
    expected = logprobs(world.forward(world.fresh))
    result = settle(world.fresh.forward_backward(data, "cross_entropy"))
    for found, wanted in zip(logprobs(result), expected, strict=True):
        assert_close(found, wanted, "logprobs")
    loss = -sum((w * p).sum() for w, p in zip(weights, expected, strict=True))
    assert_close(result.metrics["loss:sum"], loss, "loss")


def _policy_case(name: str, formula: Loss, config: dict[str, float]) -> None:
    @case(f"loss: {name}")
    def run(world: World) -> None:
        if name not in known():
            raise Absent
        random = np.random.default_rng(3)
        expected, data, loss = logprobs(world.forward(world.fresh)), [], 0.0
        for text, p in zip(TEXTS, expected, strict=True):
            q = (p + random.normal(0, 0.3, p.shape)).astype(np.float32)
            advantages = random.normal(0, 1, p.shape).astype(np.float32)
            mask = (np.arange(len(p)) >= 2).astype(np.float32)
            only_gspo = {"sequence_ratio_mask": mask} if name == "gspo" else {}
            data.append(datum(text, logprobs=q, advantages=advantages, **only_gspo))
            loss += formula(p, q, advantages, mask)
        result = settle(world.fresh.forward_backward(data, name, loss_fn_config=config or None))
        for found, wanted in zip(logprobs(result), expected, strict=True):
            assert_close(found, wanted, "logprobs")
        assert_close(result.metrics["loss:sum"], loss, "loss")


for _name, (_formula, _config) in POLICY_LOSSES.items():
    _policy_case(_name, _formula, _config)


@case("loss: stable_reinforce")
def stable_reinforce(world: World) -> None:
    """Drawn from the weights that are trained, so every ratio is 1 and nothing is truncated or penalised."""
    if "stable_reinforce" not in known():
        raise Absent
    create = need(world.service, "create_sampling_client", "record_stability_info")
    sampler = settle(create(base_model=world.base_model, record_stability_info=True))
    params = types.SamplingParams(max_tokens=8, seed=5, temperature=1.0, stop=[])
    prompt = TEXTS[0]
    drawn = settle(sampler.sample(prompt=types.ModelInput.from_ints(prompt), num_samples=2, sampling_params=params))
    data = []
    for sequence in drawn.sequences:
        tokens = [*prompt, *sequence.tokens]
        of_prompt = tinker.PromptProvenanceSpan(sequence_id=sequence.sequence_id, offset=0, length=len(prompt))
        num_inputs = len(sequence.tokens) - 1
        of_inputs = tinker.SampledProvenanceSpan(sequence_id=sequence.sequence_id, offset=0, length=num_inputs)
        advantages = np.where(np.arange(len(tokens) - 1) < len(prompt) - 1, 0.0, 1.0).astype(np.float32)
        data.append(
            datum(tokens, advantages=advantages).with_provenance(
                model_input=[of_prompt, of_inputs],
                loss_fn_inputs=[
                    tinker.PromptProvenanceSpan(sequence_id=sequence.sequence_id, offset=1, length=len(prompt) - 1),
                    tinker.SampledProvenanceSpan(sequence_id=sequence.sequence_id, offset=0, length=num_inputs + 1),
                ],
            )
        )
    model = world.model()
    result = settle(model.forward_backward(data, "stable_reinforce"))
    assert np.isfinite(result.metrics["loss:sum"]), result.metrics
    for found, sequence in zip(logprobs(result), drawn.sequences, strict=True):
        assert_close(found[len(prompt) - 1 :], sequence.logprobs, "logprobs of what was drawn", within=0.05)
    settle(model.optim_step(types.AdamParams(learning_rate=1e-3)))


def _soft_targets() -> tuple[np.ndarray, np.ndarray]:
    """Three candidates for each position, and their weights: cells of both are 0, not at the same places."""
    num_tokens = len(TEXTS[0]) - 1
    random = np.random.default_rng(4)
    targets = random.integers(1, 2000, (num_tokens, 3))
    targets[:, 0] = TEXTS[0][1:]
    targets[1, 2] = 0
    weights = random.random((num_tokens, 3)).astype(np.float32)
    weights[2, 1] = 0.0
    return targets.astype(np.int64), weights


def _two_dimensional(world: World, targets: Any, weights: Any) -> None:
    tokens = types.ModelInput.from_ints(TEXTS[0][:-1])
    data = [types.Datum(model_input=tokens, loss_fn_inputs={"target_tokens": targets, "weights": weights})]
    found = settle(world.fresh.forward_backward(data, "cross_entropy"))
    assert_close(logprobs(found)[0][:, 0], logprobs(world.forward(world.fresh))[0], "logprobs of the first targets")
    loss = -float((np.asarray(weights) * logprobs(found)[0]).sum())
    assert_close(found.metrics["loss:sum"], loss, "loss", within=CLOSE)


@case("cross_entropy with several targets for a token: dense")
def dense_targets(world: World) -> None:
    _two_dimensional(world, *_soft_targets())


@case("cross_entropy with several targets for a token: sparse")
def sparse_targets(world: World) -> None:
    import torch

    targets, weights = _soft_targets()
    need(types.TensorData, "from_torch_sparse")
    _two_dimensional(world, torch.from_numpy(targets), torch.from_numpy(weights))


def _squares(world: World, model: Any, loss: Any) -> Any:
    """A step on the sum of squared logprobs; the result of its forward_backward."""
    data = [datum(text) for text in TEXTS]
    result = settle(model.forward_backward_custom(data, loss))
    settle(model.optim_step(types.AdamParams(learning_rate=1e-2)))
    return result


def _check_squares(world: World, before: list[Floats], model: Any) -> None:
    """Against the same step in two halves: the gradient of sum p^2 is 2p, given to cross_entropy as weights of -2p."""
    twin = world.model()
    data = [datum(text, weights=-2 * p) for text, p in zip(TEXTS, before, strict=True)]
    settle(twin.forward_backward(data, "cross_entropy"))
    settle(twin.optim_step(types.AdamParams(learning_rate=1e-2)))
    for found, wanted, old in zip(logprobs(world.forward(model)), logprobs(world.forward(twin)), before, strict=True):
        assert np.abs(wanted - old).max() > 0.01, "the step did nothing"
        assert_close(found, wanted, "logprobs after the step", within=5e-3)


@case("custom loss: computed by the client")
def client_side(world: World) -> None:
    def squares(data: Any, outputs: Any) -> Any:
        loss = sum((p**2).sum() for p in outputs)
        return loss, {"squares": float(loss)}

    model = world.model()
    before = logprobs(world.forward(model))
    result = _squares(world, model, squares)
    assert_close(result.metrics["squares"], sum((p**2).sum() for p in before), "the user's metric")
    _check_squares(world, before, model)


@case("custom loss: computed by the server")
def server_side(world: World) -> None:
    create = need(world.service, "create_custom_loss")
    world.set_flags(custom_loss_server_side=True)

    def squares(logprobs: Any, weights: Any) -> Any:
        loss = (weights * logprobs**2).sum()
        return loss, {"custom/squares:sum": loss}

    handle = settle(create(squares, input_ranks={"logprobs": 1, "weights": 1}))
    assert handle.loss_id, "the loss was not taken by the server"
    model = world.model()
    before = logprobs(world.forward(model))
    result = _squares(world, model, handle)
    expected = sum((p**2).sum() for p in before)
    assert_close(result.metrics["custom/squares:sum"], expected, "the user's metric")
    assert_close(result.metrics["loss:sum"], expected, "loss")
    _check_squares(world, before, model)
