"""The stand-in that `python -m benchmarks sdk_floor` measures the SDK with: the SDK takes what it says for answers."""

from __future__ import annotations

import tinker

from benchmarks.canned import stand_in
from tests.support.examples import BASE_MODEL, batch, logprobs, new_model
from tests.support.stack import Stack


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


def test_the_stand_in_gives_each_sample_the_first_ones_result_under_its_own_id(stack: Stack) -> None:
    params = tinker.SamplingParams(max_tokens=4, temperature=1.0)
    prompt = tinker.ModelInput.from_ints([1, 2, 3])
    with stand_in(stack.base_url) as (url, _), tinker.ServiceClient(base_url=url, api_key="tml-test") as service:
        sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
        first = sampler.sample(prompt, 2, params).result()
        drawn = [future.result() for future in [sampler.sample(prompt, 2, params) for _ in range(20)]]
        ids = {sequence.sequence_id for result in (first, *drawn) for sequence in result.sequences}
        assert len(ids) == 42
        for result in drawn:
            assert [list(one.tokens) for one in result.sequences] == [list(one.tokens) for one in first.sequences]
