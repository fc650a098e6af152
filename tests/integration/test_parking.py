"""Clients that vanish keep nobody out: their runs are parked, and go on where they were when the clients come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.examples import BASE_MODEL
from tests.support.stack import Stack
from tests.support.wire import Wire, next_token_datum

pytestmark = [pytest.mark.slow]

PLACES = 3
SENTENCES = [[1, 5, 9, 2, 4], [7, 3, 8, 6, 1]]


def train(wire: Wire, model_id: str, seq_id: int) -> dict[str, float]:
    """The metrics of one batch, once its gradients are there."""
    data = [next_token_datum(tokens) for tokens in SENTENCES]
    return dict(wire.output(wire.forward_backward(model_id, seq_id, data)).metrics)


def step(wire: Wire, model_id: str, seq_id: int) -> float:
    return wire.grad_norm(wire.optim_step(model_id, seq_id, learning_rate=1e-2))


def test_clients_that_vanish_keep_nobody_out_and_find_their_runs_as_they_left_them(toy: Path, tmp_path: Path) -> None:
    env = {"TRAINER_MAX_MODELS": str(PLACES)}
    with Stack(tmp_path, base_models=[f"{BASE_MODEL}={toy}"], env=env) as stack:
        left: list[tuple[str, dict[str, float]]] = []
        for n in range(4 * PLACES):  # each asks once: none is told to come again
            with Wire(stack.base_url) as wire:
                model_id = wire.model(wire.session(), base_model=BASE_MODEL, seed=n)
                left.append((model_id, train(wire, model_id, 1)))  # and goes, in the middle of an accumulation
        with Wire(stack.base_url) as wire:
            session_id = wire.session()
            for n in (0, 1):
                plain = wire.model(session_id, base_model=BASE_MODEL, model_seq_id=n, seed=n)
                model_id, before = left[n]
                assert train(wire, plain, 1) == before
                expected = [step(wire, plain, 2), train(wire, plain, 3), step(wire, plain, 4), train(wire, plain, 5)]
                found = [
                    step(wire, model_id, 2),
                    train(wire, model_id, 3),
                    step(wire, model_id, 4),
                    train(wire, model_id, 5),
                ]
                assert found == expected
            figures = wire.metrics(stack.metrics_url("trainer"))
            assert figures["trainer_models"] == PLACES
            assert figures["trainer_parked_models"] == 4 * PLACES + 2 - PLACES
            parked = left[2][0]
            assert wire.post("get_info", model_id=parked).json()["model_data"]["model_name"] == BASE_MODEL
            saved = wire.request_id(wire.post("save_weights", model_id=parked, seq_id=2, path="parked"))
            assert wire.json_result(saved)["path"].endswith("/weights/parked")
            body = {"model_id": left[4][0], "seq_id": 2, "path": "parked"}
            published = wire.json_result(wire.request_id(wire.post("save_weights_for_sampler", **body)))
            sample = {
                "model_path": published["path"],
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 5]}]},
            }
            asked = wire.post("asample", **sample, num_samples=2, sampling_params={"max_tokens": 3})
            assert len(wire.sampled(wire.request_id(asked)).sequences) == 2
            ended = wire.request_id(wire.post("unload_model", model_id=left[3][0]))
            wire.json_result(ended)
            again = wire.metrics(stack.metrics_url("trainer"))
            assert again["trainer_models"] + again["trainer_parked_models"] == 4 * PLACES + 1


def test_clients_that_vanish_between_two_operations_keep_nobody_out(toy: Path, tmp_path: Path) -> None:
    """Their second batch has arrived, and the first one never does."""
    with Stack(tmp_path, base_models=[f"{BASE_MODEL}={toy}"], env={"TRAINER_MAX_MODELS": str(PLACES)}) as stack:
        left: list[tuple[str, str]] = []
        for n in range(2 * PLACES):
            with Wire(stack.base_url) as wire:
                model_id = wire.model(wire.session(), base_model=BASE_MODEL, seed=n)
                data = [next_token_datum(tokens) for tokens in SENTENCES]
                left.append((model_id, wire.forward_backward(model_id, 2, data)))
        with Wire(stack.base_url) as wire:
            plain = wire.model(wire.session(), base_model=BASE_MODEL)
            expected = [train(wire, plain, seq_id) for seq_id in (1, 2)]
            assert wire.metrics(stack.metrics_url("trainer"))["trainer_models"] == PLACES
            for model_id, request_id in left:  # one comes back after all
                assert train(wire, model_id, 1) == expected[0]
                assert dict(wire.output(request_id).metrics) == expected[1]
