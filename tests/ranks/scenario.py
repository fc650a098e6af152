"""A script that trainers with any number of ranks play, and the comparison of their records of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from tests.support.batches import random_datum, request
from tests.support.models import CONTEXT, VOCAB_SIZE
from tests.unit.trainer_service.custom_losses import custom_loss, graph, node, ref
from tinsmith.errors import NotFinite, ServiceError
from tinsmith.lora_config import config_to_proto
from tinsmith.modeling.adapter import AdapterConfig
from tinsmith.rpc.words import value_of
from tinsmith.v1 import types_pb2
from trainer_service.engine.batch import Batch, Output
from trainer_service.engine.engine import TrainingEngine
from trainer_service.engine.optimizers import AdamParams, DimuonParams, Params
from trainer_service.metrics import Metrics
from trainer_service.requests import batch_of
from trainer_service.storage.checkpoints import CheckpointStore
from trainer_service.storage.locations import Location
from trainer_service.weight_sync.canary import canary

BUDGET = 48
"""Tokens of one rank's micro-batch: most works need several."""
CONFIGS: Mapping[str, tuple[AdapterConfig, str]] = {
    "all:train:0": (AdapterConfig(rank=4, seed=1), "adamw"),
    "attn:train:0": (AdapterConfig(rank=7, seed=2, train_mlp=False, train_unembed=False), "dimuon"),
    "head:train:0": (AdapterConfig(rank=3, seed=3, train_attn=False, train_mlp=False), "adamw"),
    "any:train:0": (AdapterConfig(rank=2), "adamw"),  # drawn by rank 0
}
# An eps so large that a gradient's last digits, which the order of sums changes, move no weight by the learning rate.
ADAM = AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-3, weight_decay=0.01, grad_clip_norm=1.0)
DIMUON = DimuonParams(learning_rate=1e-2, beta1=0.9, grad_clip_norm=0.0)
RAGGED = (31, 5, 17, 2, 40, 9, 9, 60)


class Script:
    """Runs steps on an engine and keeps what they give, by name."""

    def __init__(self, engine: TrainingEngine) -> None:
        self.engine = engine
        self.seen: dict[str, Any] = {}

    def create(self, *model_ids: str) -> None:
        for model_id in model_ids:
            self.engine.create_model(model_id, *CONFIGS[model_id])

    def batch(self, data: Sequence[types_pb2.Datum], loss_fn: str = "cross_entropy", **settings: Any) -> Batch:
        return batch_of(request(data, loss_fn, **settings), self.engine.limits)

    def forward_backward(self, name: str, works: Sequence[tuple[str, Batch]]) -> None:
        for n, output in enumerate(self.engine.forward_backward(works)):
            self._keep(f"{name} {n}", output)

    def in_pieces(self, name: str, model_id: str, batch: Batch) -> None:
        """As the scheduler does it: a batch's datums in several calls."""
        batch = replace(batch, model_id=model_id)
        for index in range(0, len(batch.datums), 3):
            self.engine.passes.run([(batch, range(index, min(index + 3, len(batch.datums))))])
        self._keep(name, self.engine.passes.finish(batch))

    def _keep(self, name: str, output: Output | ServiceError) -> None:
        if isinstance(output, ServiceError):
            self.seen[f"{name} error"] = f"{type(output).__name__}: {output.message}"
            return
        self.seen[f"{name} logprobs"] = np.concatenate([one.ravel() for one in output.logprobs])
        self.seen[f"{name} metrics"] = np.array([output.metrics[key] for key in sorted(output.metrics)])

    def optim_step(self, name: str, model_id: str) -> None:
        params = ADAM if CONFIGS[model_id][1] == "adamw" else DIMUON
        try:
            self.seen[f"{name} norm"] = np.array(self.engine.optim_step(model_id, params)["grad_norm:mean"])
        except ServiceError as error:
            self.seen[f"{name} error"] = f"{type(error).__name__}: {error.message}"

    def weights(self, name: str, model_id: str) -> None:
        self.seen[f"{name} weights"] = self.engine.capture(model_id, with_optimizer=False).adapter.flat.numpy()


def datums(seed: int, lengths: Sequence[int] = RAGGED, *, policy: bool = False) -> list[types_pb2.Datum]:
    return [random_datum(n, 100 * seed + i, vocab_size=VOCAB_SIZE, policy=policy) for i, n in enumerate(lengths)]


def tenants(script: Script) -> None:
    """Several steps of tenants that differ in everything, together and alone."""
    script.create("all:train:0", "attn:train:0", "head:train:0")
    for step in range(2):
        script.forward_backward(
            f"step {step}",
            [
                ("all:train:0", script.batch(datums(step))),
                ("attn:train:0", script.batch(datums(step + 10, policy=True), "ppo")),
                ("head:train:0", script.batch(datums(step + 20, (3, 12), policy=True), "dro")),
            ],
        )
        script.forward_backward(f"look {step}", [("all:train:0", script.batch(datums(7), forward_only=True))])
        for model_id in ("all:train:0", "attn:train:0", "head:train:0"):
            script.optim_step(f"step {step} {model_id}", model_id)
            script.weights(f"step {step} {model_id}", model_id)
    script.forward_backward("one datum", [("all:train:0", script.batch(datums(3, (11,))))])
    script.in_pieces("pieces", "attn:train:0", script.batch(datums(4)))
    script.forward_backward("head alone", [("head:train:0", script.batch(datums(5, (8, 3, 21))))])
    for model_id in ("all:train:0", "attn:train:0", "head:train:0"):
        script.optim_step(f"last {model_id}", model_id)
        script.weights(f"last {model_id}", model_id)


def custom(script: Script) -> None:
    """A traced loss, with a metric of its own."""
    calls = [node("call_method", "square", "mul", ref("logprobs"), ref("logprobs"))]
    calls.append(node("call_method", "total", "sum", ref("square")))
    loss = custom_loss(graph(*calls, loss="total", metrics={"custom/squares:mean": ref("total")}), {"logprobs": 1})
    asked = request(datums(6, (5, 14, 30)), "custom", model_id="all:train:0")
    for one in asked.data:
        del one.loss_fn_inputs["weights"]
    asked.custom_loss.CopyFrom(loss)
    script.forward_backward("custom", [("all:train:0", batch_of(asked, script.engine.limits))])
    script.optim_step("custom", "all:train:0")
    script.weights("custom", "all:train:0")


def failure(script: Script) -> None:
    """A batch whose loss is not finite, in company: the others have their results, and its own next step is refused."""
    bad = datums(8, (6, 30, 4), policy=True)
    one = bad[1].loss_fn_inputs["logprobs"]
    one.dense = np.full(30, -1e4, np.float32).tobytes()
    script.forward_backward(
        "failure",
        [
            ("attn:train:0", script.batch(bad, "importance_sampling")),
            ("all:train:0", script.batch(datums(9))),
            ("head:train:0", script.batch(datums(9, (3, 3)))),
        ],
    )
    for name in ("refused", "after"):
        for model_id in ("all:train:0", "attn:train:0", "head:train:0"):
            script.optim_step(f"failure {name} {model_id}", model_id)
            script.weights(f"failure {name} {model_id}", model_id)


def too_far(script: Script, model_id: str) -> None:
    """A step that would lead out of float32 is refused by all ranks alike; a gradient of infinite norm, too."""
    params: Params = ADAM if model_id.startswith(("all", "full")) else DIMUON
    for name, scale, changed in (("rate", 1.0, {"learning_rate": 1e30}), ("norm", 1e25, {"grad_clip_norm": 0.0})):
        data = datums(14)
        for one in data:
            weights = np.frombuffer(one.loss_fn_inputs["weights"].dense, "<f4")
            one.loss_fn_inputs["weights"].dense = (scale * weights).astype("<f4").tobytes()
        script.engine.forward_backward([(model_id, script.batch(data))])
        try:
            script.engine.optim_step(model_id, dataclasses.replace(params, **changed))
        except NotFinite as error:
            script.seen[f"too far, {name} {model_id} error"] = error.reason
        script.weights(f"too far, {name} {model_id}", model_id)
    script.forward_backward(f"not too far {model_id}", [(model_id, script.batch(datums(15)))])
    script.engine.optim_step(model_id, params)
    script.weights(f"not too far {model_id}", model_id)


def checkpoints(script: Script, root: Path) -> None:
    """Written here; read back into a new model, which goes on as the old one does."""
    store = CheckpointStore(root, Metrics(CollectorRegistry()))
    for model_id in ("all:train:0", "attn:train:0"):
        config, optimizer = CONFIGS[model_id]
        state = script.engine.capture(model_id, with_optimizer=True)
        store.save(info(model_id, state.step, optimizer, config), state, overwrite=False)
        goes_on(script, store, model_id, name=f"saved {model_id}")


def goes_on(script: Script, store: CheckpointStore, model_id: str, *, name: str) -> None:
    _, state = store.load(Location(model_id, "weights", "one"), script.engine.base, with_optimizer=True)
    again = f"{model_id.split(':')[0]}2:train:0"
    config, optimizer = CONFIGS[model_id]
    script.engine.create_model(again, config, optimizer)
    script.engine.restore(again, state, with_optimizer=True)
    script.forward_backward(name, [(again, script.batch(datums(11)))])
    params = ADAM if optimizer == "adamw" else DIMUON
    script.seen[f"{name} norm"] = np.array(script.engine.optim_step(again, params)["grad_norm:mean"])
    script.weights(name, again)
    script.engine.delete_model(again)


def info(model_id: str, step: int, optimizer: str, config: AdapterConfig) -> types_pb2.CheckpointInfo:
    return types_pb2.CheckpointInfo(
        location=f"{model_id}/weights/one",
        kind=types_pb2.CHECKPOINT_KIND_TRAINING,
        model_id=model_id,
        base_model="tiny",
        lora_config=config_to_proto(config),
        version_id=f"{model_id}@9",
        step=step,
        has_optimizer=True,
        optimizer=value_of(types_pb2.Optimizer, optimizer),
    )


def play(engine: TrainingEngine, root: Path, *, others: Path | None = None) -> dict[str, Any]:
    """All of it. `others` are checkpoints that another layout has written."""
    script = Script(engine)
    tenants(script)
    custom(script)
    failure(script)
    too_far(script, "all:train:0")
    too_far(script, "attn:train:0")
    checkpoints(script, root)
    if others is not None:
        store = CheckpointStore(others, Metrics(CollectorRegistry()))
        for model_id in ("all:train:0", "attn:train:0"):
            goes_on(script, store, model_id, name=f"of others {model_id}")
    # Without a seed each rank would draw its own.
    script.create("any:train:0")
    twice = [("any:train:0", script.batch([one] * 8, forward_only=True)) for one in datums(12, (9,))]
    (output,) = engine.forward_backward(twice)
    assert isinstance(output, Output)
    script.seen["one model, drawn by rank 0"] = np.ptp(np.stack(output.logprobs), axis=0)
    scores(script, "all:train:0")
    scores(script, "attn:train:0")
    return script.seen


def play_full(engine: TrainingEngine) -> dict[str, Any]:
    """Steps of a model that trains all parameters."""
    script = Script(engine)
    engine.create_model("full:train:0", AdapterConfig(rank=0), "adamw")
    for step in range(2):
        script.forward_backward(f"step {step}", [("full:train:0", script.batch(datums(step)))])
        script.seen[f"norm {step}"] = np.array(engine.optim_step("full:train:0", ADAM)["grad_norm:mean"])
    state = engine.capture("full:train:0", with_optimizer=True)
    engine.restore("full:train:0", state, with_optimizer=True)
    script.forward_backward("restored", [("full:train:0", script.batch(datums(2)))])
    script.seen["norm"] = np.array(engine.optim_step("full:train:0", ADAM)["grad_norm:mean"])
    script.weights("last", "full:train:0")
    too_far(script, "full:train:0")
    scores(script, "full:train:0")
    return script.seen


def play_starved(engine: TrainingEngine) -> dict[str, Any]:
    """The part that a rank which runs out of memory now and then must get through as if it had enough."""
    script = Script(engine)
    tenants(script)
    script.seen["token budget"] = np.array(float(engine.passes.token_budget))
    return script.seen


def scores(script: Script, model_id: str) -> None:
    """Scores that a publish needs: with the live weights, and with a copy of them after the live ones have changed."""
    engine = script.engine
    sequences = canary(4, vocab_size=VOCAB_SIZE, max_context_length=CONTEXT)
    copied = engine.capture(model_id, with_optimizer=False).adapter
    script.seen[f"scores {model_id}"] = engine.score(engine.weights(model_id), sequences)
    engine.forward_backward([(model_id, script.batch(datums(13)))])
    engine.optim_step(model_id, ADAM if model_id.startswith(("all", "full")) else DIMUON)
    script.seen[f"scores {model_id}, moved on"] = engine.score(engine.weights(model_id), sequences)
    script.seen[f"scores {model_id}, copied"] = engine.score(copied, sequences)


def write(seen: Mapping[str, Any], folder: Path) -> None:
    np.savez(folder / "seen.npz", **{name: value for name, value in seen.items() if not isinstance(value, str)})
    (folder / "seen.json").write_text(
        json.dumps({name: value for name, value in seen.items() if isinstance(value, str)})
    )


def read(folder: Path) -> dict[str, Any]:
    with np.load(folder / "seen.npz") as arrays:
        return {**dict(arrays), **json.loads((folder / "seen.json").read_text())}


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], *, limit: float) -> list[str]:
    """Names of values that differ by more than `limit`, relative to the larger of 1 and the value."""
    found = [f"{name}: on one side only" for name in set(ours) ^ set(theirs)]
    for name in set(ours) & set(theirs):
        if isinstance(ours[name], str):
            if ours[name] != theirs[name]:
                found.append(f"{name}: {ours[name]!r}, not {theirs[name]!r}")
        elif ours[name].shape != theirs[name].shape:
            found.append(f"{name}: shape {ours[name].shape}, not {theirs[name].shape}")
        else:
            gap = np.abs(ours[name] - theirs[name]) / np.maximum(1, np.abs(theirs[name]))
            if not (gap.size and gap.max() <= limit):
                found.append(f"{name}: differs by {gap.max():.3g}")
    return sorted(found)
