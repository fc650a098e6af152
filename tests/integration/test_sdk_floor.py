"""The stand-in that benchmarks/bench_sdk_floor.py measures the SDK with: the SDK takes what it says for answers."""

from __future__ import annotations

import tinker

from benchmarks.canned import stand_in
from tests.integration.examples import batch, logprobs, new_model
from tests.stack import Stack


def test_the_stand_in_gives_each_kind_of_request_its_first_answer_again(stack: Stack) -> None:
    adam = tinker.AdamParams(learning_rate=1e-2)
    with stand_in(stack.base_url) as (url, _), tinker.ServiceClient(base_url=url, api_key="tml-test") as service:
        trainer = new_model(service)
        first = trainer.forward_backward(batch(1), "cross_entropy").result()
        step = trainer.optim_step(adam).result()
        # Other texts, after a step: the service, which is not asked any more, would give other answers.
        later = [trainer.forward_backward(batch(2), "cross_entropy") for _ in range(10)]
        for future in later:
            again = future.result()
            assert again.metrics == first.metrics
            assert [one.tolist() for one in logprobs(again)] == [one.tolist() for one in logprobs(first)]
        assert trainer.optim_step(adam).result() == step
