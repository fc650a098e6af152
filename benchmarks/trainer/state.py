"""Figures of models' state: optimizer steps, and the memory of many models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch

from benchmarks.figure import Aim, Figure
from benchmarks.trainer.bench import TrainerBench
from benchmarks.trainer.memory import resident_mb
from trainer_service.engine.optimizers import AdamParams

ADAM = AdamParams(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=1.0)


def optimizer_step(bench: TrainerBench) -> Iterator[Figure]:
    """optim_step (gradient clipping, AdamW and clearing the gradients), against stock AdamW on the same tensors."""
    model_id = bench.create("step")
    adapter = bench.adapter()
    parameters = [torch.nn.Parameter(tensor) for tensor in adapter.tensors()]
    stock = torch.optim.AdamW(parameters, lr=ADAM.learning_rate)

    def stock_step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, ADAM.grad_clip_norm)
        stock.step()
        torch._foreach_zero_([parameter.grad for parameter in parameters if parameter.grad is not None])

    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    theirs, ours = bench.rounds(
        lambda: 1e3 * bench.seconds(stock_step),
        lambda: 1e3 * bench.seconds(lambda: bench.engine.optim_step(model_id, ADAM)),
    )
    size = f"{adapter.flat.numel() / 1e6:.3g} M parameters"
    yield Figure(f"optim_step, {size}", "ms", ours, "torch.optim.AdamW, tensor by tensor", theirs)
    bench.engine.delete_model(model_id)


def finite_check(bench: TrainerBench) -> Iterator[Figure]:
    """Cost of checking that a step leaves only finite values: a step with and without the check, in turns."""
    engine, model_id = bench.engine, bench.create("checked")
    model = engine.models[model_id]
    name, lengths = next(iter(bench.shapes.items()))
    batch = bench.batch(lengths)
    params = dataclasses.replace(ADAM, learning_rate=0.0)  # so that no round differs from another

    def unchecked() -> None:
        gradient = engine._prepare_step(model_id).flat
        norm = torch.linalg.vector_norm(gradient).item()
        if params.grad_clip_norm < norm:
            gradient.mul_(params.grad_clip_norm / norm)
        model.need_optimizer().step(model.adapter.flat, gradient, params)
        model.adapter.sync()
        model.clear_gradient()

    def checked() -> None:
        engine.optim_step(model_id, params)

    def whole(step: Callable[[], None]) -> float:
        return 1e3 * bench.seconds(lambda: (bench.forward_backward([(model_id, batch)]), step()))

    def alone(step: Callable[[], None], *, times: int = 20) -> float:
        return 1e3 / times * bench.seconds(lambda: [step() for _ in range(times)])

    runs = [lambda: whole(unchecked), lambda: whole(checked), lambda: alone(unchecked), lambda: alone(checked)]
    plain, with_check, plain_alone, alone_checked = bench.rounds(*runs)
    size = f"{model.adapter.flat.numel() / 1e6:.3g} M parameters"
    yield Figure(f"forward_backward and optim_step, {name}, {size}", "ms", with_check, "without the check", plain)
    yield Figure(f"optim_step alone, {size}", "ms", alone_checked, "without the check", plain_alone)
    share = [100 * (ours - theirs) / step for ours, theirs, step in zip(alone_checked, plain_alone, plain, strict=True)]
    yield Figure(f"the check, of a step of {name}", "%", share)
    engine.delete_model(model_id)


def resident_adapters(bench: TrainerBench) -> Iterator[Figure]:
    """Memory of 64 adapters that have each taken a step, against their parameters, two moments and gradients."""
    num_models, length = 64, min(64, *(min(lengths) for lengths in bench.shapes.values()))
    batch = bench.batch([length])
    warm = bench.create("warm")  # what the first call needs, it needs once
    bench.forward_backward([(warm, batch)])
    bench.engine.optim_step(warm, ADAM)
    own = 4 * num_models * bench.adapter().flat.nbytes / 1e6
    before = resident_mb(bench.device)
    for n in range(num_models):
        model_id = bench.create(f"resident-{n}")
        bench.forward_backward([(model_id, batch)])
        bench.engine.optim_step(model_id, ADAM)
        bench.forward_backward([(model_id, batch)])  # so that it has gradients too
    grown = resident_mb(bench.device) - before
    yield Figure(f"{num_models} adapters resident", "MB", [grown], "their own state", [own], [Aim(1.05, at_most=True)])
    for n in range(num_models):
        bench.engine.delete_model(f"resident-{n}")
    bench.engine.delete_model(warm)
