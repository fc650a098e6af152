"""When an optim_step may be applied although a batch before it has failed."""

from __future__ import annotations

import itertools
from contextvars import copy_context
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.received_answers import ReceivedAnswers, request_begins


def sent(received: ReceivedAnswers, seq_id: int) -> None:
    """A batch arrives, and is accepted."""
    received.sent(seq_id)
    received.accepted(seq_id, is_batch=True)


def answered(received: ReceivedAnswers, *batches: tuple[int, bool]) -> None:
    """Batches arrive one after the other, and the client gets each answer before it sends the next. `batches`: seq_id,
    and whether the batch has failed."""
    for seq_id, failed in batches:
        sent(received, seq_id)
        received.received(seq_id, failed=failed)


def step(received: ReceivedAnswers, seq_id: int) -> int:
    """An optim_step arrives, and is accepted."""
    seen = received.step(seq_id)
    received.accepted(seq_id, is_batch=False)
    return seen


def test_a_client_that_waits_for_every_answer_starts_afresh_behind_a_failure() -> None:
    received = ReceivedAnswers()
    answered(received, (1, False), (2, True), (3, False), (4, False))
    assert step(received, 5) == 2
    assert step(received, 5) == 2, "a repeat is told the same"


@pytest.mark.parametrize("late", ["batch", "step", ""])
def test_a_request_that_was_on_its_way_when_the_caller_was_told_counts_as_sent_before(late: str) -> None:
    received, early = ReceivedAnswers(), copy_context()
    early.run(request_begins)
    here = copy_context()
    sent(received, 1)
    received.received(1, failed=True)
    here.run(request_begins)
    (early if late == "batch" else here).run(sent, received, 2)
    received.received(2, failed=False)
    here.run(request_begins)
    assert (early if late == "step" else here).run(step, received, 3) == (0 if late else 1)


@pytest.mark.parametrize("late", ["batch", "step", ""])
def test_nobody_knows_when_a_request_that_is_sent_again_was_sent_first(late: str) -> None:
    received = ReceivedAnswers()
    sent(received, 1)
    received.received(1, failed=True)
    once, again = copy_context(), copy_context()
    once.run(request_begins)
    again.run(request_begins, is_retry=True)
    (again if late == "batch" else once).run(sent, received, 2)
    again.run(sent, received, 2)  # the service has had it before, so it is known when
    received.received(2, failed=False)
    once.run(request_begins)
    assert (again if late == "step" else once).run(step, received, 3) == (0 if late else 1)
    assert again.run(step, received, 3) == (0 if late else 1)


@pytest.mark.parametrize("is_fetched_before", [False, True])
def test_a_failure_that_is_fetched_again_was_perhaps_not_received_before(is_fetched_before: bool) -> None:
    received = ReceivedAnswers()
    sent(received, 1)
    received.received(1, failed=True)
    if is_fetched_before:
        received.received(1, failed=True)
    sent(received, 2)
    if not is_fetched_before:
        received.received(1, failed=True)
    received.received(2, failed=False)
    assert step(received, 3) == (1 if is_fetched_before else 0)


@pytest.mark.parametrize("is_sent_again", [False, True])
def test_a_batch_that_was_refused_for_now_is_in_flight_until_it_is_sent_again(is_sent_again: bool) -> None:
    received = ReceivedAnswers()
    sent(received, 1)
    sent(received, 2)  # and refused, because a queue is full
    received.received(1, failed=True)
    if is_sent_again:
        sent(received, 2)
        received.received(2, failed=False)
    assert step(received, 3) == 0


def test_a_number_whose_batch_was_refused_for_now_may_go_to_the_step() -> None:
    received = ReceivedAnswers()
    answered(received, (1, True), (2, False))
    sent(received, 3)  # and refused, because a queue is full
    assert step(received, 3) == 1


def failed_batch_and_one_refused_for_now(seq_id: int) -> ReceivedAnswers:
    received = ReceivedAnswers()
    sent(received, 1)
    received.received(1, failed=True)
    received.sent(seq_id)
    return received


def test_a_number_that_another_kind_of_operation_takes_is_no_new_batch() -> None:
    received = failed_batch_and_one_refused_for_now(2)
    received.accepted(2, is_batch=False)
    received.received(2, failed=False)
    assert step(received, 3) == 0, "no batch came after the failed one"


def test_a_number_far_ahead_that_is_refused_for_now_protects_one_step_only() -> None:
    received = failed_batch_and_one_refused_for_now(10**9)
    assert step(received, 2) == 0
    answered(received, (3, True), (4, False))
    assert step(received, 5) == 3


@pytest.mark.parametrize(
    ("took_s", "num_pauses"),
    [
        ([0.05] * 4, 4),
        ([0.05, 0.05, 0.6, 0.06, 0.05, 0.05, 0.05], 7),
        ([0.05, 60, 0.05, 0.05, 0.05, 0.05], 6),
        ([0.6] * 40, 9 + 4),
    ],
    ids=["idle", "stopped once", "stopped for long", "always busy"],
)
async def test_the_time_for_which_a_failure_is_held_back_begins_anew_when_the_process_was_busy(
    took_s: list[float], num_pauses: int
) -> None:
    """Such a process has yet to read the batches that were sent together with the failed one."""
    received, clock, pauses = ReceivedAnswers(), mock.Mock(monotonic=mock.Mock(return_value=0.0)), iter(took_s)
    sent(received, 1)

    async def pause(_: float) -> None:
        clock.monotonic.return_value += next(pauses)

    with mock.patch("tinsmith.received_answers.sleep", pause), mock.patch("tinsmith.received_answers.time", clock):
        await received.hold_back(1)
    assert len(took_s) - len(list(pauses)) == num_pauses


def test_a_batch_that_is_sent_again_because_its_connection_was_lost_is_one_batch() -> None:
    received = ReceivedAnswers()
    sent(received, 1)
    sent(received, 1)
    received.received(1, failed=True)
    sent(received, 2)
    sent(received, 2)
    received.received(2, failed=False)
    sent(received, 2)  # late, and nobody fetches its answer again
    assert step(received, 3) == 1
    sent(received, 4)
    received.received(4, failed=True)
    sent(received, 5)
    sent(received, 6)
    sent(received, 5)
    received.received(5, failed=False)
    received.received(6, failed=False)
    assert step(received, 7) == 0, "5 and 6 were sent at once"


def test_a_call_that_is_refused_for_its_number_does_not_hide_the_batch_that_has_it() -> None:
    received = ReceivedAnswers()
    sent(received, 1)
    received.received(1, failed=True)
    sent(received, 2)
    sent(received, 2)  # another batch of the same number
    received.unsent(2)
    sent(received, 3)
    received.received(2, failed=False)
    received.received(3, failed=False)
    assert step(received, 4) == 0, "2 and 3 were sent at once"


def test_a_step_that_was_refused_for_its_own_parameters_leaves_the_caller_afresh() -> None:
    received = ReceivedAnswers()
    answered(received, (1, True), (2, False))
    assert step(received, 3) == 1
    received.received(3, failed=True)  # a negative learning rate, say: nothing was applied or dropped
    assert step(received, 4) == 1
    received.received(4, failed=False)
    assert step(received, 5) == 0, "that failure is over"


def test_a_late_repeat_of_an_answered_batch_is_nothing_new() -> None:
    """Nobody fetches its answer: a proxy has delivered a request late that its client has given up."""
    received = ReceivedAnswers()
    sent(received, 1)
    received.received(1, failed=False)
    sent(received, 1)
    assert step(received, 2) == 0
    received.received(2, failed=False)
    sent(received, 1)
    answered(received, (3, True), (4, False))
    assert step(received, 5) == 3


@pytest.mark.parametrize("order", list(itertools.permutations((1, 2, 3))))
def test_batches_that_were_in_flight_together_are_protected_in_whatever_order_they_are_told(
    order: tuple[int, ...],
) -> None:
    for failed in (1, 2):  # nothing is lost when the last one has failed: the step is refused in any case
        received = ReceivedAnswers()
        for seq_id in (1, 2, 3):
            sent(received, seq_id)
        for seq_id in order:
            received.received(seq_id, failed=seq_id == failed)
        assert step(received, 4) == 0


def test_a_batch_that_was_not_accepted_is_not_the_one_behind_a_failure() -> None:
    received = ReceivedAnswers()
    answered(received, (1, False), (2, True))
    received.sent(50_000)
    received.unsent(50_000)  # too far ahead
    assert step(received, 3) == 0


def test_batches_without_a_step_take_bounded_memory() -> None:
    received = ReceivedAnswers()
    for seq_id in range(1, 20_000):
        sent(received, seq_id)
        received.received(seq_id, failed=seq_id == 19_998)
    assert len(received._answered) <= 4096
    assert step(received, 20_000) == 19_998


def test_batches_that_are_refused_for_now_take_bounded_memory() -> None:
    received = ReceivedAnswers()
    for seq_id in range(1, 20_000):
        received.sent(seq_id)
    assert len(received._waiting) <= 4096
    received.received(19_999, failed=True)
    assert step(received, 20_000) == 0


def test_a_step_without_a_batch_behind_the_failure_is_not_afresh() -> None:
    received = ReceivedAnswers()
    sent(received, 1)
    received.received(1, failed=True)
    assert step(received, 2) == 0


def test_a_pipelined_step_is_protected_also_when_the_failure_was_told_before_the_next_part_came() -> None:
    received = ReceivedAnswers()
    sent(received, 1)
    received.received(1, failed=True)  # it crosses with 2
    sent(received, 2)
    assert step(received, 3) == 0, "2 has not been answered"
    received.received(2, failed=False)
    received.received(3, failed=True)  # the step was refused for that failure
    sent(received, 4)
    received.received(4, failed=False)
    assert step(received, 5) == 1, "harmless: no gradients of that failure are left"


def test_a_batch_that_was_in_flight_when_the_failure_was_told_makes_the_next_step_fail() -> None:
    received = ReceivedAnswers()
    sent(received, 1)
    sent(received, 2)
    received.received(1, failed=True)
    received.received(2, failed=False)
    sent(received, 3)
    received.received(3, failed=False)
    assert step(received, 4) == 0


def test_an_answer_that_nobody_asks_for_holds_up_no_batch_behind_the_next_step() -> None:
    received = ReceivedAnswers()
    sent(received, 1)  # its answer is never asked for: the client has left, or waits for the step alone
    assert step(received, 2) == 0
    sent(received, 3)
    received.received(3, failed=True)
    sent(received, 4)
    received.received(4, failed=False)
    assert step(received, 5) == 3


def test_a_batch_that_comes_before_a_step_of_a_smaller_number_still_counts() -> None:
    received = ReceivedAnswers()
    sent(received, 3)
    assert step(received, 2) == 0
    received.received(3, failed=True)
    sent(received, 4)
    assert step(received, 5) == 0, "4 has not been answered"


@pytest.mark.parametrize("elsewhere", [0, 1, 2, 3, 4, 5])
def test_a_step_is_not_afresh_if_another_gateway_accepted_an_operation_before_it(elsewhere: int) -> None:
    received = ReceivedAnswers()
    for seq_id, failed in ((1, False), (2, True), (3, False), (5, False)):
        if seq_id != elsewhere:
            sent(received, seq_id)
            received.received(seq_id, failed=failed)
        if seq_id == 3 and elsewhere != 4:
            received.accepted(4, is_batch=False)
    assert step(received, 6) == (0 if elsewhere else 2)


def test_an_operation_that_another_gateway_accepted_does_not_matter_behind_a_step_that_was_applied() -> None:
    received = ReceivedAnswers()
    step(received, 3)  # 1 and 2 went elsewhere
    received.received(3, failed=False)
    answered(received, (4, True), (5, False))
    assert step(received, 6) == 4


def test_numbers_behind_one_that_another_gateway_accepted_take_bounded_memory() -> None:
    received = ReceivedAnswers()
    for seq_id in range(2, 20_000):
        received.accepted(seq_id, is_batch=False)
    assert len(received._beyond) <= 4096
    assert step(received, 20_000) == 0


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=12))
def test_a_step_is_never_afresh_behind_a_failure_that_nobody_was_told_of(batches: list[tuple[bool, bool]]) -> None:
    received = ReceivedAnswers()
    newest_failed, all_told = 0, True
    for seq_id, (failed, is_told) in enumerate(batches, start=1):
        sent(received, seq_id)
        if is_told:
            received.received(seq_id, failed=failed)
        newest_failed = seq_id if failed else newest_failed
        all_told &= is_told
    seen = step(received, len(batches) + 1)
    assert seen == 0 or (all_told and seen == newest_failed)
