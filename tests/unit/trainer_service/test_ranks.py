"""Ranks before they compute: their places, their division of a micro-batch, and their messages."""

from __future__ import annotations

import inspect
from collections import deque
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.trainer_service.engines import ADAM, batch, create, run
from tinsmith.errors import InvalidRequest, ServiceError
from tinsmith.modeling.base_model import BaseModel
from tinsmith.sizing import Footprint
from trainer_service.config import TrainerConfig
from trainer_service.engine.budget import Plan
from trainer_service.engine.engine import TrainingEngine
from trainer_service.engine.model_state import ModelState
from trainer_service.engine.passes import Passes
from trainer_service.ranks.calls import make, message_of
from trainer_service.ranks.leader import LeadingEngine, LeadingPasses
from trainer_service.ranks.place import Place
from trainer_service.ranks.process import num_threads
from trainer_service.ranks.roll_call import Sign, missing
from trainer_service.ranks.share import balanced
from trainer_service.ranks.team import RankTeam
from trainer_service.ranks.wire import Message


def place(rank: int = 0, world_size: int = 1, **settings: Any) -> Place:
    env = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(world_size)}
    return Place.of(TrainerConfig(base_model="m", **settings), env)


@pytest.mark.parametrize(
    ("world_size", "settings", "message"),
    [
        (1, {"tensor_parallel": 2}, "--tensor-parallel: 2 does not divide the 1 ranks .WORLD_SIZE."),
        (4, {"tensor_parallel": 3}, "--tensor-parallel: 3 does not divide the 4 ranks"),
        (1, {"shard_base": True}, "--shard-base: .* only one of them; start at least 2, with torchrun"),
        (2, {"shard_base": True, "tensor_parallel": 2}, "start at least 4, with torchrun"),
        (2, {"tensor_parallel": 2, "full_training": True}, "--tensor-parallel: does not go with --full-training"),
        (2, {"shard_base": True, "full_training": True}, "--shard-base: does not go with --full-training"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_by_name(
    world_size: int, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        place(world_size=world_size, **settings)


def test_ranks_of_a_row_are_neighbours_and_the_first_answers_for_it() -> None:
    places = [place(rank, 4, tensor_parallel=2) for rank in range(4)]
    assert [one.row for one in places] == [0, 0, 1, 1]
    assert [places[0].leads(rank) for rank in range(4)] == [True, False, True, False]
    assert place().alone
    assert not places[0].alone


def test_ranks_divide_the_cores_of_their_machine_unless_threads_are_set() -> None:
    assert num_threads(place(), 0, cores=8) == 0
    assert num_threads(place(0, 4), 0, cores=8) == 2
    assert num_threads(place(0, 4), 0, cores=2) == 1
    assert num_threads(place(0, 4), 3, cores=8) == 3


def test_shares_have_about_as_many_tokens_and_keep_the_order() -> None:
    lengths = [60, 3, 30, 31, 9, 8, 50, 2]
    shares = balanced(lengths, [0] * 8, 3)
    assert sorted(n for share in shares for n in share) == list(range(len(lengths)))
    assert all(share == sorted(share) for share in shares)
    loads = [sum(lengths[n] for n in share) for share in shares]
    assert max(loads) - min(loads) <= 9
    assert balanced([5], [0], 3) == [[0], [], []]
    assert balanced([], [], 2) == [[], []]


def computed(charges: list[int], saved: list[int], shares: list[list[int]]) -> list[int]:
    """Tokens that each share computes."""
    return [sum(charges[n] - (saved[n] if n - 1 in share else 0) for n in share) for share in shares]


PROMPT, ANSWER = 512, 64


@pytest.mark.parametrize(
    ("num_prompts", "num_shares", "largest"),
    [
        (8, 2, 4 * (PROMPT + 8 * ANSWER)),  # whole groups; datum by datum it was 8 * (PROMPT + 4 * ANSWER)
        (1, 2, PROMPT + 4 * ANSWER),  # half of the group each
        (3, 2, (PROMPT + 8 * ANSWER) + (PROMPT + 4 * ANSWER)),  # a whole one and half of the third
        (2, 4, PROMPT + 4 * ANSWER),
        (1, 8, PROMPT + ANSWER),
    ],
)
def test_groups_stay_together_or_are_divided_whichever_computes_less(
    num_prompts: int, num_shares: int, largest: int
) -> None:
    charges = [PROMPT + ANSWER] * 8 * num_prompts
    saved = [0, *[PROMPT] * 7] * num_prompts
    shares = balanced(charges, saved, num_shares)
    assert sorted(n for share in shares for n in share) == list(range(len(charges)))
    assert max(computed(charges, saved, shares)) == largest


def test_turns_of_a_conversation_stay_together_beside_other_work() -> None:
    turns = [96 * n for n in range(1, 7)]
    charges = [*turns, 576]
    saved = [0, *turns[:-1], 0]
    assert sorted(balanced(charges, saved, 2)) == [[0, 1, 2, 3, 4, 5], [6]]


@given(datums=st.lists(st.tuples(st.integers(1, 500), st.integers(0, 500)), max_size=30), num_shares=st.integers(1, 5))
def test_no_division_computes_more_in_its_largest_share_than_datum_by_datum(
    datums: list[tuple[int, int]], num_shares: int
) -> None:
    charges = [charge for charge, _ in datums]
    saved = [min(less, *charges[max(0, n - 1) : n + 1]) - 1 for n, (_, less) in enumerate(datums)]
    saved = [max(0, less) if n else 0 for n, less in enumerate(saved)]
    shares = balanced(charges, saved, num_shares)
    assert sorted(n for share in shares for n in share) == list(range(len(charges)))
    alone = balanced(charges, [0] * len(charges), num_shares)
    assert max(computed(charges, saved, shares)) <= max(sum(charges[n] for n in share) for share in alone)


def _sent(message: Message) -> Message:
    """The message as another rank receives it."""
    wire: deque[Tensor] = deque()
    message.send(lambda tensor: wire.append(tensor.clone()))

    def move(tensor: Tensor) -> None:
        tensor.copy_(wire.popleft())

    received = Message.receive(move)
    assert not wire
    return received


@pytest.mark.parametrize("size", [0, 10, 4_000, 5_000])
def test_a_message_arrives_as_it_was_sent(size: int) -> None:
    """Also a header that is longer than the first frame."""
    tensors = [torch.randn(3, 5), torch.empty(0), torch.tensor([1, 2, 3], dtype=torch.uint8), torch.randn(2).bfloat16()]
    fields = {"text": "x" * size, "rate": 0.1 + 0.2, "none": None, "nested": [[1, {"a": 2}]]}
    received = _sent(Message("run", fields, tensors))
    assert (received.name, received.fields) == ("run", fields)
    for theirs, ours in zip(received.tensors, tensors, strict=True):
        assert theirs.dtype == ours.dtype
        assert torch.equal(theirs, ours)


def test_two_looks_at_the_signs_tell_who_stands_still_and_who_lives_but_is_behind() -> None:
    def signs(*beats_and_steps: tuple[int, int]) -> dict[int, Sign]:
        return {rank: Sign("here", 1, 100 + rank, *told) for rank, told in enumerate(beats_and_steps)}

    before = signs((7, 20), (7, 20), (9, 19), (8, 20))
    after = signs((9, 20), (7, 20), (11, 19), (10, 21))
    absent = missing(before, after, rank=0, world_size=5)  # the last never gave a sign
    assert (absent.still, absent.behind) == ((1, 4), (2,))
    assert (
        str(absent)
        == "ranks 1, 4 did not answer: gone, or stopped; rank 2 did not reach the point where this rank waits"
    )
    assert str(missing(signs((7, 20), (7, 20)), signs((8, 20), (8, 20)), rank=0, world_size=2)) == (
        "another rank is lost"  # all live, and wait
    )


class Lonely:
    """A group of which only this rank is there: it sees its own votes."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.votes: list[int] = []

    def largest(self, number: int) -> int:
        self.votes.append(number)
        return number

    def broadcast(self, message: Message | None, *, source: int = 0) -> Message:
        assert message is not None
        return message

    def end(self, reason: str) -> NoReturn:
        raise SystemExit(reason)

    def lost(self, error: Exception) -> NoReturn:
        raise SystemExit(f"lost: {error}")


def test_an_error_within_a_layer_that_ranks_compute_together_ends_them_and_says_what_helps() -> None:
    team = RankTeam(Lonely(place(0, 2, tensor_parallel=2)))  # type: ignore[arg-type]
    with pytest.raises(SystemExit, match=r"MemoryError within .* lower max_tokens_per_microbatch"), team.one_pass():
        raise MemoryError
    with pytest.raises(SystemExit, match=r"lost: .* Timed out"), team.one_pass():
        raise RuntimeError("[/src/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms")
    with pytest.raises(InvalidRequest, match="not finite"), team.one_pass():
        raise InvalidRequest("not finite")  # of a loss: outside of the layers


def test_ranks_that_only_divide_the_datums_go_on_after_any_error() -> None:
    group = Lonely(place(0, 2))
    team = RankTeam(group)  # type: ignore[arg-type]
    with pytest.raises(MemoryError), team.one_pass():
        raise MemoryError
    with pytest.raises(ServiceError, match="ZeroDivisionError on rank 0; the trainer's log has the cause"):
        team.all_or_none(lambda: 1 / 0)
    with team.one_pass():
        team.halfway()
    assert len(group.votes) == 3  # one for each: halfway nobody waits for another


def test_every_change_of_an_engine_is_done_on_every_rank() -> None:
    """A new method of the engine must be told to the other ranks, or named here with the reason why not."""
    own = {
        "create_model",  # ends in add_model
        "forward_backward",  # calls the passes
        "taint",  # calls the passes
        "gather_gradient",  # `capture` tells the others
        "score_together",  # `score` tells the others
        "has_room_for",
        "weights",
        "is_tainted",
        "check_trainable",
        "version_bytes",  # computes nothing
    }
    assert _public(TrainingEngine) - vars(LeadingEngine).keys() == own
    own = {"once", "charge"}  # `probe` tells the others; they charge each batch of a micro-batch themselves
    own |= {"go_together", "is_dead", "moves_models", "token_budget"}  # read
    assert _public(Passes) - vars(LeadingPasses).keys() == own


def _public(cls: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(cls) if not name.startswith("_")}


def test_the_arguments_of_a_call_arrive_as_they_were_sent(base: BaseModel) -> None:
    leader, follower = (TrainingEngine(base, max_tokens_per_microbatch=64) for _ in range(2))
    create(leader, "m")
    run(leader, "m", batch(leader, [5, 3]))
    leader.optim_step("m", ADAM)
    run(leader, "m", batch(leader, [4]))
    state = leader.capture("m", with_optimizer=True, with_accumulation=True)
    plan = Plan(64, memory_bytes=10**9, plain=Footprint(1.0, 2.0, 3.0), longest_datum=33, picture_cost=1.5)
    for call, *arguments, named in (
        (TrainingEngine.follow, plan, {}),
        (TrainingEngine.add_model, "m", ModelState(state.adapter, "adamw"), {}),
        (TrainingEngine.restore, "m", state, {"with_optimizer": True}),
        (TrainingEngine.optim_step, "m", ADAM, {"failure_seen": 0}),
    ):
        make(_sent(message_of(call, arguments, named)), follower)
    assert follower.memory.plan == plan
    leader.optim_step("m", ADAM)
    ours, theirs = (engine.capture("m", with_optimizer=True) for engine in (leader, follower))
    assert ours.adapter.flat.equal(theirs.adapter.flat)
    assert ours.optimizer is not None
    assert theirs.optimizer is not None
    assert all(theirs.optimizer.tensors[name].equal(one) for name, one in ours.optimizer.tensors.items())


def test_a_fault_of_a_ranks_device_ends_the_rank_and_is_no_error_that_ranks_agree_on() -> None:
    group = Lonely(place(0, 2))
    team = RankTeam(group)  # type: ignore[arg-type]
    fault = torch.AcceleratorError("CUDA error: device-side assert triggered")
    with pytest.raises(SystemExit, match=r"a fault of its device, .*: CUDA error: device-side assert"), team.one_pass():
        raise fault

    def call() -> None:
        raise fault

    with pytest.raises(SystemExit, match="a fault of its device"):
        team.all_or_none(call)
    assert not group.votes
