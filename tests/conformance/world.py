"""A server, through one SDK: what the cases start from, and where SDKs spell the same thing differently."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import httpx
import numpy as np
import tinker
from tinker import types

from tests.conformance.kit import Absent

Floats = np.ndarray

NUM_WORDS = 2000
"""Token ids below this are words in every vocabulary."""
CLOSE = 1e-3
"""Largest gap between two ways to compute a number in one engine."""
NEAR = 0.05
"""Largest gap between the trainer's and the sampler's logprob of a token; the sampler may compute in bfloat16."""


def settle(value: Any) -> Any:
    """The value behind a future of a newer SDK; older SDKs return the value itself."""
    return value.result() if hasattr(value, "result") else value


def need(owner: Any, name: str, *parameters: str) -> Callable[..., Any]:
    """The method; raises Absent unless it is there and has the parameters."""
    method = getattr(owner, name, None)
    if method is None or any(p not in inspect.signature(method).parameters for p in parameters):
        raise Absent
    return method


def random_tokens(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(NUM_WORDS, size=length).tolist()


PROMPT = random_tokens(11, 7)


def prompt(tokens: Sequence[int] = PROMPT) -> types.ModelInput:
    return types.ModelInput.from_ints(list(tokens))


def datum(tokens: Sequence[int], **inputs: Any) -> types.Datum:
    """Predict each token from those before it. `inputs`: arrays; weights of one unless there are any."""
    weights = {"weights": np.ones(len(tokens) - 1, np.float32)}
    targets = {"target_tokens": np.array(tokens[1:], np.int64)}
    loss_fn_inputs: Any = {**targets, **(inputs or weights)}
    return types.Datum(model_input=prompt(tokens[:-1]), loss_fn_inputs=loss_fn_inputs)


TEXTS = [random_tokens(length, length) for length in (9, 17, 5)]
"""Their lengths differ, so that no server passes that pads or truncates."""


def logprobs(output: Any) -> list[Floats]:
    return [one["logprobs"].to_numpy() for one in output.loss_fn_outputs]


def assert_close(left: Any, right: Any, what: str, *, within: float = CLOSE) -> None:
    left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
    assert left.shape == right.shape, f"{what}: shape {left.shape} instead of {right.shape}"
    gap = float(np.abs(left - right).max()) if left.size else 0.0
    # Not `gap > ...`: a NaN must not pass.
    assert gap <= within * max(1.0, float(np.abs(right).max(initial=0.0))), f"{what}: {left} instead of {right}"[:300]


def raises(kind: type[Exception], act: Callable[[], Any], what: str) -> Exception:
    try:
        act()
    except kind as error:
        return error
    raise AssertionError(f"{what} was not refused")


class World:
    def __init__(self, *, base_url: str, api_key: str, base_model: str) -> None:
        self.base_url = base_url
        self.api_key = api_key
        self._base_model = base_model
        self._holders: list[Any] = []

    def new_service(self, **settings: Any) -> tinker.ServiceClient:
        service = tinker.ServiceClient(base_url=self.base_url, api_key=self.api_key, **settings)
        self._holders.append(service.holder)
        return service

    def post(self, path: str, **body: Any) -> httpx.Response:
        """Past the SDK."""
        return httpx.post(f"{self.base_url}/api/v1/{path}", json=body, headers={"X-API-Key": self.api_key}, timeout=30)

    def close(self) -> None:
        """Frees what the server holds for the sessions. Older SDKs cannot say that they are done."""
        for holder in self._holders:
            self.post(f"sessions/{holder.get_session_id()}/finish", reason={"type": "success"})

    @cached_property
    def service(self) -> tinker.ServiceClient:
        return self.new_service()

    @cached_property
    def rest(self) -> Any:
        return self.service.create_rest_client()

    @cached_property
    def base_model(self) -> str:
        """The one that was asked for, else the first that the server names."""
        return self._base_model or settle(self.service.get_server_capabilities()).supported_models[0].model_name

    def model(self, *, rank: int = 8, seed: int = 1, **settings: Any) -> Any:
        """A new one."""
        create = self.service.create_lora_training_client
        return settle(create(base_model=self.base_model, rank=rank, seed=seed, **settings))

    @cached_property
    def fresh(self) -> Any:
        """A model that nobody trains: it is the base model."""
        return self.model()

    @cached_property
    def trained(self) -> Any:
        """A model that has taken steps, and takes no more."""
        model = self.model()
        for _ in range(2):
            self.step(model)
        return model

    def step(self, model: Any, *, learning_rate: float = 1e-2) -> Any:
        """One step on TEXTS; the result of its forward_backward."""
        future = model.forward_backward([datum(text) for text in TEXTS], "cross_entropy")
        settle(model.optim_step(types.AdamParams(learning_rate=learning_rate)))
        return settle(future)

    def forward(self, model: Any, data: Sequence[types.Datum] | None = None, loss_fn: Any = "cross_entropy") -> Any:
        return settle(model.forward(list(data or [datum(text) for text in TEXTS]), loss_fn))

    @cached_property
    def base_sampler(self) -> Any:
        return settle(self.service.create_sampling_client(base_model=self.base_model))

    @cached_property
    def saved_state(self) -> str:
        """Path of `trained`, with its optimizer."""
        return settle(self.trained.save_state("conformance-state")).path

    @cached_property
    def saved_sampler(self) -> str:
        """Path of `trained`, to sample from."""
        return settle(self.trained.save_weights_for_sampler("conformance-sampler")).path

    @cached_property
    def sampler(self) -> Any:
        return settle(self.service.create_sampling_client(model_path=self.saved_sampler))

    def set_flags(self, **flags: Any) -> None:
        """Sets flags of client/config, as a server would that leaves these abilities to the client."""
        config = getattr(self.service.holder, "_client_config", None)
        if config is None or any(name not in type(config).model_fields for name in flags):
            raise Absent
        self.service.holder._client_config = config.model_copy(update=flags)


def sample(client: Any, *, num_samples: int = 1, tokens: Sequence[int] = PROMPT, **settings: Any) -> Any:
    """`settings`: of SamplingParams, or of sample() itself."""
    names = inspect.signature(client.sample).parameters
    own = {name: settings.pop(name) for name in list(settings) if name in names}
    unknown = [name for name in settings if name not in types.SamplingParams.model_fields]
    if unknown:
        raise Absent
    params = types.SamplingParams(**{"max_tokens": 6, **settings})
    return settle(client.sample(prompt=prompt(tokens), num_samples=num_samples, sampling_params=params, **own))


def scores(client: Any, tokens: Sequence[int]) -> Floats:
    """The sampler's log P of each token but the first."""
    found = settle(client.compute_logprobs(prompt(tokens)))
    assert len(found) == len(tokens), f"{len(found)} logprobs for {len(tokens)} tokens"
    assert found[0] is None, f"the first token has logprob {found[0]}"
    return np.array(found[1:], np.float64)
