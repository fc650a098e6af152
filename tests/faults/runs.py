"""A training run as a user writes it, all of it submitted ahead; and what is left of it, to be held against another."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import fsspec
import numpy as np
import tinker
from safetensors.numpy import load
from tinker import ModelInput, SamplingParams

from tests.support.examples import Floats, batch, new_model, random_tokens
from trainer_service.storage.manifest import Manifest

SEEDS = (1, 2)
"""One for each of the concurrent runs."""
ADAM = tinker.AdamParams(learning_rate=1e-4)
ROUNDS = 4
STEPS = 5
"""Steps of a round. It ends with two saves and a sample."""
_LENGTHS = (9, 17, 5, 33)
TOKENS = ROUNDS * STEPS * sum(_LENGTHS)
"""Tokens that a run trains on."""
LARGEST_GAP = 1e-6
"""Largest gap between the weights of a disturbed and an undisturbed run; weights are of the order of 0.01 to 1."""
ROUNDING = 1e-5
"""Largest gap of losses, and of moments relative to the largest one. Gradients are sums, and the other runs in a
micro-batch change the order of their terms."""
_ADAPTER = "adapter_model.safetensors"
_SAMPLING = SamplingParams(max_tokens=12, stop=[], seed=7)


@dataclass(frozen=True, slots=True)
class Outcome:
    losses: list[float]
    """One for each step."""
    tensors: list[dict[str, Floats]]
    """Adapter and optimizer of every round, as they lie in the files of its checkpoint."""
    sampled: list[list[int]]
    """Tokens of every round, drawn from its version."""
    seconds: float

    def check(self, expected: Outcome, *, exactly: bool) -> None:
        """Everything is that of the other run, bit for bit or up to rounding."""
        np.testing.assert_allclose(self.losses, expected.losses, rtol=0 if exactly else ROUNDING, atol=0)
        for mine, theirs in zip(self.tensors, expected.tensors, strict=True):
            check_tensors(mine, theirs, exactly=exactly)
        assert self.sampled == expected.sampled


def check_tensors(mine: dict[str, Floats], theirs: dict[str, Floats], *, exactly: bool) -> None:
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        gap = LARGEST_GAP if name.startswith(_ADAPTER) else ROUNDING * np.abs(theirs[name]).max()
        np.testing.assert_allclose(tensor, theirs[name], rtol=0, atol=0 if exactly else gap, err_msg=name)


def run(service: tinker.ServiceClient, checkpoints: Path | str, *, seed: int) -> Outcome:
    """Raises what the SDK raises. `checkpoints` is the trainer's folder, or the URL of its bucket."""
    began = time.monotonic()
    client = new_model(service, seed=seed)
    steps, states, samplers = [], [], []
    for n in range(ROUNDS):
        data = batch(10 * seed + n, lengths=_LENGTHS)
        for _ in range(STEPS):
            steps.append((client.forward_backward(data, "cross_entropy"), client.optim_step(ADAM)))
        states.append(client.save_state(f"round-{n}"))
        samplers.append(client.save_weights_and_get_sampling_client())
    prompt = ModelInput.from_ints(random_tokens(11, seed))
    drawing = [sampler.result().sample(prompt, 2, _SAMPLING) for sampler in samplers]
    losses = []
    for forward_backward, step in steps:
        losses.append(forward_backward.result().metrics["loss:sum"])
        step.result()
    return Outcome(
        losses=losses,
        tensors=[tensors_of(checkpoints, state.result().path) for state in states],
        sampled=[list(sequence.tokens) for drawn in drawing for sequence in drawn.result().sequences],
        seconds=time.monotonic() - began,
    )


def run_all(service: tinker.ServiceClient, checkpoints: Path | str, *, seeds: Sequence[int] = SEEDS) -> list[Outcome]:
    """One run for each of the seeds, at the same time."""
    with under_way(service, checkpoints, seeds=seeds) as outcomes:
        return outcomes()


@contextmanager
def under_way(
    service: tinker.ServiceClient, checkpoints: Path | str, *, seeds: Sequence[int] = SEEDS
) -> Iterator[Callable[[], list[Outcome]]]:
    """The runs go on during the block; calling what it gives waits for them."""
    with ThreadPoolExecutor(len(seeds)) as threads:
        futures = [threads.submit(run, service, checkpoints, seed=seed) for seed in seeds]
        yield lambda: [future.result() for future in futures]


def check_all(outcomes: Sequence[Outcome], expected: Sequence[Outcome], *, exactly: bool) -> None:
    for mine, theirs in zip(outcomes, expected, strict=True):
        mine.check(theirs, exactly=exactly)


@contextmanager
def disturbed(
    service: tinker.ServiceClient,
    checkpoints: Path,
    undisturbed: Sequence[Outcome],
    rng: random.Random,
    *,
    exactly: bool,
) -> Iterator[None]:
    """The block begins at a random moment of the runs; after it they must end as the undisturbed ones."""
    longest_s = max(outcome.seconds for outcome in undisturbed)
    with under_way(service, checkpoints) as outcomes:
        moment_s = rng.uniform(0, longest_s)
        print(f"disturbed after {moment_s:.2f} s of {longest_s:.2f} s")
        time.sleep(moment_s)
        yield
        check_all(outcomes(), undisturbed, exactly=exactly)


def tensors_of(checkpoints: Path | str, path: str) -> dict[str, Floats]:
    """Adapter and optimizer of a saved state, from its files."""
    found: dict[str, Floats] = {}
    files, root = fsspec.url_to_fs(str(checkpoints), use_listings_cache=False)
    place = f"{root}/{path.removeprefix('tinker://')}"
    folder = Manifest.parse(files.cat_file(f"{place}/manifest.json"), location=path).folder
    for file in (_ADAPTER, "optimizer.safetensors"):
        with files.open("/".join(part for part in (place, folder, file) if part)) as stream:
            found |= {f"{file}: {name}": tensor for name, tensor in load(stream.read()).items()}
    return found
