"""Sampling with record_stability_info, and batches that name what was sampled."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from sqlalchemy import delete, select, update

from gateway.database.tables.samples import SequenceRecord
from gateway.training import provenance
from tests.support import batches
from tests.support.batches import sparse
from tests.unit.gateway.stack import Client, Stack, sample_body
from tinsmith.errors import InvalidRequest, Unsupported
from tinsmith.rpc.tensors import to_numpy
from tinsmith.v1 import trainer_pb2, types_pb2

Span = tuple[str, str, int, int]
"""prompt_tokens or sampled_tokens, sequence id, offset, length."""


def int32(values: Sequence[int]) -> bytes:
    return np.array(values, "<i4").tobytes()


def record(sequence_id: str, *, prompt: Sequence[int], tokens: Sequence[int]) -> SequenceRecord:
    logprobs = -np.arange(1, len(tokens) + 1, dtype="<f4") / 4
    return SequenceRecord(
        sequence_id=sequence_id, prompt=int32(prompt), tokens=int32(tokens), logprobs=logprobs.tobytes()
    )


RECORDS = {
    "a": record("a", prompt=[1, 2, 3], tokens=[4, 5, 6]),
    "b": record("b", prompt=[1, 2, 3, 4, 5, 6, 7], tokens=[8, 9]),
}
WHOLE: tuple[list[Span], list[Span]] = (
    [("prompt_tokens", "a", 0, 3), ("sampled_tokens", "a", 0, 2)],
    [("prompt_tokens", "a", 1, 2), ("sampled_tokens", "a", 0, 3)],
)
"""Spans of the whole of sequence a, each token predicted from those before it."""


def datum(
    tokens: Sequence[int],
    targets: Sequence[int],
    spans: tuple[Sequence[Span], Sequence[Span]],
    **inputs: Sequence[float],
) -> types_pb2.Datum:
    def proto(runs: Sequence[Span]) -> list[types_pb2.ProvenanceSpan]:
        return [
            types_pb2.ProvenanceSpan(**{kind: {"sequence_id": name, "offset": offset, "length": length}})  # type: ignore[arg-type]
            for kind, name, offset, length in runs
        ]

    made = batches.datum(
        tokens, target_tokens=targets, **{name: np.array(given, "<f4") for name, given in inputs.items()}
    )
    made.model_input_spans.extend(proto(spans[0]))
    made.loss_fn_input_spans.extend(proto(spans[1]))
    return made


def resolved(*data: types_pb2.Datum) -> list[tuple[list[float], list[float]]]:
    """logprobs and sampled_mask of each datum."""
    message = trainer_pb2.ForwardBackwardRequest(data=data)
    provenance.resolve(message, RECORDS)
    names = ("logprobs", "sampled_mask")
    return [tuple(to_numpy(each.loss_fn_inputs[n], field=n).tolist() for n in names) for each in message.data]  # type: ignore[misc]


# Spans


def test_targets_of_a_sequence_get_what_the_sampler_recorded() -> None:
    (whole,) = resolved(datum([1, 2, 3, 4, 5], [2, 3, 4, 5, 6], WHOLE))
    assert whole == ([0, 0, -0.25, -0.5, -0.75], [0, 0, 1, 1, 1])


def test_targets_of_a_prompt_may_be_filled_with_zeros() -> None:
    """As the cookbook's rl_loop does: there is nothing to learn at them."""
    assert resolved(datum([1, 2, 3, 4, 5], [0, 0, 4, 5, 6], WHOLE)) == resolved(
        datum([1, 2, 3, 4, 5], [2, 3, 4, 5, 6], WHOLE)
    )


def test_spans_may_mix_sequences_and_take_parts_of_them() -> None:
    """A second turn: what was sampled in the first is in its prompt."""
    turns = (
        [("sampled_tokens", "a", 0, 3), ("prompt_tokens", "b", 6, 1), ("sampled_tokens", "b", 0, 1)],
        [("sampled_tokens", "a", 1, 2), ("prompt_tokens", "b", 6, 1), ("sampled_tokens", "b", 0, 2)],
    )
    first, second = resolved(
        datum([4, 5, 6, 7, 8], [5, 6, 7, 8, 9], turns), datum([1, 2, 3, 4, 5], [2, 3, 4, 5, 6], WHOLE)
    )
    assert first == ([-0.5, -0.75, 0, -0.25, -0.5], [1, 1, 0, 1, 1])
    assert second[1] == [0, 0, 1, 1, 1]


def test_logprobs_that_the_client_sends_must_be_the_recorded_ones() -> None:
    args = ([1, 2, 3, 4, 5], [2, 3, 4, 5, 6], WHOLE)
    assert resolved(datum(*args, logprobs=[9, 9, -0.2505, -0.5, -0.75]))[0][0] == [0, 0, -0.25, -0.5, -0.75]
    with pytest.raises(InvalidRequest, match=r"logprobs\[3\]: -0.502 is not -0.5"):
        resolved(datum(*args, logprobs=[0, 0, -0.25, -0.502, -0.75]))
    with pytest.raises(InvalidRequest, match=r"logprobs\[4\]: nan"):
        resolved(datum(*args, logprobs=[0, 0, -0.25, -0.5, float("nan")]))
    with pytest.raises(InvalidRequest, match=r"shape \[2\]"):
        resolved(datum(*args, logprobs=[0, 0]))


@pytest.mark.parametrize(
    ("spans", "part"),
    [
        (([], []), r"data\[0\].model_input_spans: .*record_stability_info=True"),
        ((WHOLE[0], []), r"loss_fn_input_spans: .*record_stability_info=True"),
        ((WHOLE[0][:1], WHOLE[1]), r"model_input_spans: lengths \[3\] make 3 positions; there are 5"),
        (([("prompt_tokens", "a", 0, -1), *WHOLE[0]], WHOLE[1]), "make 4 positions"),
        (([("prompt_tokens", "a", 0, 6), ("prompt_tokens", "a", 0, -1)], WHOLE[1]), "make 5 positions"),
        (([WHOLE[0][0], ("sampled_tokens", "c", 0, 2)], WHOLE[1]), r"model_input_spans\[1\]: .*no record of.*'c'"),
        (([WHOLE[0][0], ("sampled_tokens", "a", 2, 2)], WHOLE[1]), "positions 2 to 4 .*output.*has 3 tokens"),
        (([WHOLE[0][0], ("sampled_tokens", "a", -1, 2)], WHOLE[1]), "positions -1 to 1"),
        (([WHOLE[0][0], ("sampled_tokens", "a", 1, 2)], WHOLE[1]), "position 3 holds token 4, but token 1 .* is 5"),
        (
            (WHOLE[0], [WHOLE[1][0], ("sampled_tokens", "a", 0, 2), ("sampled_tokens", "a", 1, 1)]),
            "position 4 holds token",
        ),
    ],
)
def test_spans_that_do_not_hold_are_refused_by_name(spans: tuple[list[Span], list[Span]], part: str) -> None:
    with pytest.raises(InvalidRequest, match=part):
        resolved(datum([1, 2, 3, 4, 5], [2, 3, 4, 5, 6], spans))


def test_datums_that_cannot_be_resolved_are_refused_by_name() -> None:
    good = datum([1, 2, 3, 4, 5], [2, 3, 4, 5, 6], WHOLE)
    masked = datum([1, 2, 3, 4, 5], [2, 3, 4, 5, 6], WHOLE, sampled_mask=[1] * 5)
    with pytest.raises(InvalidRequest, match=r"data\[1\].loss_fn_inputs.sampled_mask"):
        resolved(good, masked)
    bare = types_pb2.Datum(model_input=good.model_input)
    with pytest.raises(InvalidRequest, match="target_tokens: is missing"):
        resolved(bare)
    wide = datum([1, 2], [2, 3], WHOLE)
    wide.loss_fn_inputs["target_tokens"].shape[:] = [1, 2]
    with pytest.raises(InvalidRequest, match="2 dimensions"):
        resolved(wide)
    picture = types_pb2.Datum(loss_fn_inputs=good.loss_fn_inputs, model_input=[{"image": {}}])
    with pytest.raises(Unsupported, match="tokens only"):
        resolved(picture)
    torn = types_pb2.Datum(loss_fn_inputs=good.loss_fn_inputs, model_input=[{"encoded_text": {"tokens": b"123"}}])
    with pytest.raises(InvalidRequest, match="not int32"):
        resolved(torn)
    nothing = datum([1, 2, 3, 4, 5], [2, 3, 4, 5, 6], WHOLE)
    nothing.model_input_spans.add()
    with pytest.raises(InvalidRequest, match="neither prompt_tokens nor sampled_tokens"):
        resolved(nothing)


def test_sparse_targets_and_logprobs_are_refused_before_they_take_memory() -> None:
    for name in ("target_tokens", "logprobs"):
        one = datum([1, 2, 3, 4, 5], [2, 3, 4, 5, 6], WHOLE)
        one.loss_fn_inputs[name].CopyFrom(sparse(1, 2**26))
        tracemalloc.start()
        try:
            with pytest.raises(InvalidRequest, match=f"{name}: has 2 dimensions"):
                resolved(one)
            assert tracemalloc.get_traced_memory()[1] < 2**20
        finally:
            tracemalloc.stop()


# Records


async def sampled(client: Client, session_id: str, *, is_recorded: bool = True) -> list[str]:
    """Ids of two sequences of prompt 1 2 3 and output 5 6, whose logprobs are -0.5 -0.25."""
    sampler_id = await client.sampling_session(session_id)
    receipt = await client.call("asample", sample_body(sampler_id, 0, record_stability_info=is_recorded))
    assert isinstance(await client.result(receipt), bytes)
    return receipt["sample_sequence_ids"]


def about(
    model_id: str, seq_id: int, sequence_id: str, **inputs: Sequence[float]
) -> trainer_pb2.ForwardBackwardRequest:
    spans = (
        [("prompt_tokens", sequence_id, 0, 3), ("sampled_tokens", sequence_id, 0, 1)],
        [("prompt_tokens", sequence_id, 1, 2), ("sampled_tokens", sequence_id, 0, 2)],
    )
    data = [datum([1, 2, 3, 5], [2, 3, 5, 6], spans, advantages=[0, 0, 1, 1], **inputs)]
    return trainer_pb2.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, data=data, loss_fn="stable_reinforce")


async def submit(client: Client, message: trainer_pb2.ForwardBackwardRequest, *, status: int = 200) -> Any:
    reply = await client.post(
        "/api/v1/forward_backward",
        content=message.SerializeToString(),
        headers={"content-type": "application/x-protobuf"},
    )
    assert reply.status_code == status, reply.text
    return reply.json()


async def train(client: Client, message: trainer_pb2.ForwardBackwardRequest) -> Any:
    return await client.result(await submit(client, message))


async def set_expiry(stack: Stack, expires_at: float) -> None:
    assert stack.server is not None
    async with stack.server.app.state.gateway.store.begin() as db:
        await db.execute(update(SequenceRecord).values(expires_at=expires_at))


async def test_the_trainer_gets_what_was_recorded(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    _, sequence_id = await sampled(client, session_id)
    await stack.restart_gateway()
    assert isinstance(await train(client, about(model_id, 1, sequence_id)), bytes)
    request = trainer_pb2.ForwardBackwardRequest.FromString(stack.trainer.models[model_id].requests[1])
    inputs = request.data[0].loss_fn_inputs
    assert to_numpy(inputs["logprobs"], field="").tolist() == [0, 0, -0.5, -0.25]
    assert to_numpy(inputs["sampled_mask"], field="").tolist() == [0, 0, 1, 1]


async def test_a_record_that_is_missing_foreign_or_expired_is_refused(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    unrecorded = await sampled(client, session_id, is_recorded=False)
    foreign = await sampled(client, await client.session())
    for seq_id, sequence_id in enumerate((unrecorded[0], foreign[0], "nobody"), start=1):
        failure = await train(client, about(model_id, seq_id, sequence_id))
        assert failure["category"] == "user"
        assert f"{sequence_id!r} in this session" in failure["error"]
        assert "record_stability_info=True" in failure["error"]
    receipt = await client.call(
        "asample", sample_body(f"{session_id}:sample:0", 1, record_stability_info=True, num_samples=1)
    )
    await client.result(receipt)
    (sequence_id,) = receipt["sample_sequence_ids"]
    await set_expiry(stack, time.time() - 1)
    assert "expired" in (await train(client, about(model_id, 4, sequence_id)))["error"]


async def test_another_owners_sequences_are_as_unknown_as_those_that_never_were(stack: Stack) -> None:
    keys = [{"key": f"tml-{name}", "owner": name} for name in ("ann", "ben")]
    await stack.restart_gateway(api_keys=keys)
    ann = Client(base_url=stack.url, timeout=20, headers={"x-api-key": "tml-ann"})
    ben = Client(base_url=stack.url, timeout=20, headers={"x-api-key": "tml-ben"})
    async with ann, ben:
        sequence_id, _ = await sampled(ann, await ann.session())
        soon = time.time() + 100
        await set_expiry(stack, soon)
        model_id = await ben.model(await ben.session())
        answers = []
        for guess in (sequence_id, f"{'0' * 32}:sample:0:0:0"):
            for inputs in ({}, {"logprobs": [0.0, 0.0, -9.0, -9.0]}):
                message = about(model_id, len(answers) + 1, guess, **inputs)
                answers.append((await train(ben, message))["error"].replace(guess, "ID"))
        assert len(set(answers)) == 1, "nothing tells which of them there is"
        assert "there is no record of sequence 'ID' in this session" in answers[0]
        assert stack.server is not None
        async with stack.server.app.state.gateway.store.begin() as db:
            record = await db.get(SequenceRecord, sequence_id)
        assert record is not None
        assert record.expires_at == soon, "whoever guesses it does not keep it either"
        # In a mixed batch nothing of the foreign sequence is given, and the trainer never sees a datum.
        own, _ = await sampled(ben, model_id.partition(":")[0])
        message = about(model_id, 5, own)
        message.data.extend(about(model_id, 5, sequence_id).data)
        assert "data[1]." in (await train(ben, message))["error"]
        assert b"loss_fn" not in stack.trainer.models[model_id].requests[5]
        # A sampler of another owner's cannot be asked, so nobody writes a record under its ids.
        body = sample_body(sequence_id.rpartition(":sample:")[0] + ":sample:0", 0, record_stability_info=True)
        assert "error" in await ben.result(await ben.call("asample", body))
        async with stack.server.app.state.gateway.store.begin() as db:
            assert (await db.get_one(SequenceRecord, sequence_id)).expires_at == soon


async def test_a_use_keeps_a_record_and_expired_ones_are_deleted(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    used, unused = await sampled(client, session_id)
    await set_expiry(stack, time.time() + 100)
    await train(client, about(model_id, 1, used))
    assert stack.server is not None
    gateway = stack.server.app.state.gateway
    async with gateway.store.begin() as db:
        expiry = {row.sequence_id: row.expires_at for row in [await db.get(SequenceRecord, i) for i in (used, unused)]}
    assert expiry[used] > time.time() + 86000
    assert expiry[unused] < time.time() + 101
    await set_expiry(stack, time.time() - 1)
    await gateway.sampling.records.delete_expired()
    async with gateway.store.begin() as db:
        assert await db.get(SequenceRecord, used) is None


async def test_a_repeat_is_answered_alike_after_the_records_have_gone(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    sequence_id, _ = await sampled(client, session_id)
    message = about(model_id, 1, sequence_id)
    answer = await train(client, message)
    for _ in range(2):
        await set_expiry(stack, time.time() - 1)
        assert await train(client, message) == answer
        await stack.restart_gateway()
    assert stack.trainer.orders[model_id] == [0, 1]
    await submit(client, about(model_id, 1, sequence_id, weights=[1, 1, 1, 1]), status=422)
    assert await train(client, message) == answer


async def test_a_refused_batch_stays_refused(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    message = about(model_id, 1, f"{session_id}:sample:0:0:0")
    failure = await train(client, message)
    await stack.restart_gateway()
    assert (await sampled(client, session_id))[0] == f"{session_id}:sample:0:0:0"
    assert await train(client, message) == failure
    assert stack.trainer.orders[model_id] == [0, 1]


async def test_a_conflict_is_a_conflict_also_the_second_time(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    sequence_id, _ = await sampled(client, session_id)
    await client.result((await client.forward_backward(model_id, 1)).json())
    await stack.restart_gateway()
    for _ in range(2):
        await submit(client, about(model_id, 1, sequence_id), status=422)


async def rows(stack: Stack) -> dict[str, SequenceRecord]:
    async with stack.gateway.store.begin() as db:
        return {row.sequence_id: row for row in await db.scalars(select(SequenceRecord))}


async def test_the_sequences_of_a_request_store_their_prompt_once(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    first, second = await sampled(client, session_id)
    assert {name: row.prompt for name, row in (await rows(stack)).items()} == {first: int32([1, 2, 3]), second: b""}
    for seq_id, sequence_id in enumerate((second, first), start=1):
        assert isinstance(await train(client, about(model_id, seq_id, sequence_id)), bytes)


async def test_a_prompt_stays_as_long_as_any_sequence_of_its_request(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    first, second = await sampled(client, session_id)
    for seq_id, passed_s in enumerate((86_300.0, 59.0, 86_300.0), start=1):
        async with stack.gateway.store.begin() as db:  # time passes
            await db.execute(update(SequenceRecord).values(expires_at=SequenceRecord.expires_at - passed_s))
        assert isinstance(await train(client, about(model_id, seq_id, second)), bytes)
        expiry = {name: row.expires_at for name, row in (await rows(stack)).items()}
        assert expiry[first] >= expiry[second]


async def test_a_record_of_an_earlier_form_has_its_own_prompt(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    for sequence_id in await sampled(client, session_id):
        async with stack.gateway.store.begin() as db:
            is_this = SequenceRecord.sequence_id == sequence_id
            await db.execute(update(SequenceRecord).where(is_this).values(prompt=int32([1, 2, 3])))
    assert isinstance(await train(client, about(model_id, 1, sequence_id)), bytes)


async def test_a_sequence_without_its_prompt_counts_as_none(stack: Stack, client: Client) -> None:
    session_id = await client.session()
    model_id = await client.model(session_id)
    first, second = await sampled(client, session_id)
    async with stack.gateway.store.begin() as db:
        await db.execute(delete(SequenceRecord).where(SequenceRecord.sequence_id == first))
    assert f"no record of sequence {second!r}" in (await train(client, about(model_id, 1, second)))["error"]
