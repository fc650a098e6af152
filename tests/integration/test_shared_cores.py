"""`tinsmith up` divides the cores among services that compute, and leaves all of them to one that is alone; a pass of
few tokens has one."""

from __future__ import annotations

from itertools import count

from tests.integration.conftest import KEY
from tests.support.examples import BASE_MODEL
from tests.support.stack import Stack
from tests.support.waiting import wait_until
from tests.support.wire import Wire, next_token_datum
from tinsmith.cores import usable_cores
from tinsmith_cli.stack import Threads, divide_cores


def test_one_that_computes_alone_has_all_cores_and_two_have_their_shares(second_stack: Stack) -> None:
    cores = usable_cores()
    shares = divide_cores(cores, groups=1, samplers=1, most=Threads(0, 0))
    with Wire(second_stack.base_url, api_key=KEY) as wire:
        seq_ids = count(1)

        def threads_of_a_batch(*, num_datums: int = 3 * cores) -> float:
            """Threads of a forward_backward of datums of 99 tokens; three of them are enough work for a thread. They
            begin differently, because what they have in common would be computed once."""
            data = [next_token_datum([1 + n, 2, 3] * 33) for n in range(num_datums)]
            wire.output(wire.forward_backward(model_id, next(seq_ids), data))
            return wire.metrics(second_stack.metrics_url("trainer"))["trainer_threads"]

        def sampling(seq_id: int, prompt: list[int], *, num_samples: int, max_tokens: int) -> str:
            return wire.request_id(
                wire.post(
                    "asample",
                    sampling_session_id=sampling_session_id,
                    seq_id=seq_id,
                    num_samples=num_samples,
                    prompt={"chunks": [{"type": "encoded_text", "tokens": prompt}]},
                    sampling_params={"max_tokens": max_tokens, "stop": []},
                )
            )

        session_id = wire.session()
        model_id = wire.model(session_id, base_model=BASE_MODEL)
        # On a busy machine the trainer first makes micro-batches that are too small for two threads.
        wait_until(lambda: threads_of_a_batch() == cores, what="a micro-batch is large enough for all cores")
        assert threads_of_a_batch(num_datums=1) == 1
        ids = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
        sampling_session_id = wire.post("create_sampling_session", **ids).json()["sampling_session_id"]
        sample = sampling(0, [1, 2, 3], num_samples=8, max_tokens=500)
        sampler = second_stack.metrics_url("sampler")
        wait_until(lambda: wire.metrics(sampler)["sampler_threads"] > 0, what="the sampler computes")
        assert threads_of_a_batch() == shares.trainer
        wire.json_result(sample)
        assert wire.metrics(second_stack.metrics_url("sampler"))["sampler_threads"] == 1
        wire.json_result(sampling(1, [1, 2, 3] * 100, num_samples=1, max_tokens=1))
        assert wire.metrics(second_stack.metrics_url("sampler"))["sampler_threads"] >= min(2, cores)
        wait_until(lambda: threads_of_a_batch() == cores, what="a micro-batch is large enough for all cores")
