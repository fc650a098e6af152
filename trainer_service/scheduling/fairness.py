"""Chooses the datums of a micro-batch: deficit round robin over the models, by tokens. Knows no torch, thread or clock.

In deficit round robin (Shreedhar and Varghese 1995, "Efficient Fair Queueing Using Deficit Round Robin") every flow
with something to send saves up a deficit, and sends when the deficit covers it. Here every computed token is a round:
it is credited to all models in the ring in equal parts, and charged to its own model. So the deficits always add up to
zero. A model is *owed* tokens when its deficit is not negative. Among the owed models, the one comes first whose
deficit would cover its next datum first. (With such fine rounds, this is the "earliest eligible virtual deadline first"
of Stoica and Abdel-Wahab, 1995.) The code keeps what each model was charged; its deficit is the ring's mean minus that.

A micro-batch of at most `budget` tokens is filled in two passes:

1. Shares: with n models in the ring, each owed model takes datums up to budget / n tokens.
2. The rest, one datum at a time, goes to the first model in the order above whose datum still fits. A datum longer than
   the budget is a micro-batch by itself.

Forward-only datums and those with a gradient never share a micro-batch. The two kinds alternate while owed models wait
with both.

The expected time of a custom loss counts as tokens of its datum. So datums with slow losses go into different
micro-batches, and others wait for only one of them. A model may be charged for more (`charge`): the compute thread does
so when a custom loss has taken longer than expected. Such a charge is a debt like any other.

A model without datums leaves the ring. Its credit is dropped, so that no model saves up for later. Its debt stays until
the others have caught up, so that submitting in small portions does not pay. A new model begins with deficit 0.

These guarantees hold, with n models in the ring, L_max the longest datum, and q = max(L_max, budget / 4):

- A job of at most budget / n tokens of an owed model, as every new one is, runs in the next micro-batch of its kind:
  after the micro-batch that runs when it comes and at most one of the other kind.
- A model's debt is at most q plus the largest `charge`. Models that always have something to compute have been charged
  equally, to within twice that. Without such charges they have received equally many tokens, to within 2 q.
- Between the moment when a datum of length L is the next of its model, whose deficit then is d, and the beginning of
  its micro-batch, at most W = (n - 1) (L + q) + n max(0, -d) + budget tokens of others are computed, in at most
  4 W / budget + 2 micro-batches.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Load:
    """The datums of one operation, which are taken in their order."""

    lengths: Sequence[int]
    """Tokens that each datum is charged for."""
    forward_only: bool
    alone: bool = False
    """True when its micro-batches may have no datums of another load."""
    num_taken: int = 0
    """Number of datums that have been taken."""
    num_tokens: int = field(init=False)
    """Tokens of the datums that have not been taken."""

    def __post_init__(self) -> None:
        self.num_tokens = sum(self.lengths)

    @property
    def num_waiting(self) -> int:
        return len(self.lengths) - self.num_taken


@dataclass(slots=True, eq=False)
class _Member:
    """A model in the ring."""

    charged: int
    """Tokens that the model was charged for, on top of the ring's mean when it came."""
    loads: deque[Load] = field(default_factory=deque)
    """Loads with datums to take, in order."""


class DeficitRoundRobin:
    """See the module's docstring."""

    def __init__(self, *, alone: bool = False) -> None:
        """`alone`: every micro-batch has datums of one load only, so that the division of a load depends only on its
        own lengths and the budget."""
        self._alone = alone
        self._members: dict[str, _Member] = {}  # in the order of their last turns, the latest at the end
        self._total = 0  # sum of the members' charges
        self._forward_only = False  # the kind of the last micro-batch

    def __bool__(self) -> bool:
        """True when a datum waits."""
        return any(member.loads for member in self._members.values())

    def add(self, model_id: str, load: Load) -> None:
        """Adds a load behind the model's other loads. Raises ValueError for a load without datums."""
        if not load.num_waiting:
            raise ValueError("a load without datums")
        self._settle()
        self._member(model_id).loads.append(load)

    def charge(self, model_id: str, tokens: int) -> None:
        """Charges a model for costs beside its tokens. A model that has left the ring comes back with the debt.

        Does nothing when no datum waits, because then no other model has a claim.
        """
        if self:
            self._member(model_id).charged += tokens
            self._total += tokens

    def _member(self, model_id: str) -> _Member:
        """The model's member, which is added with deficit 0 if it is not in the ring."""
        if model_id not in self._members:
            charged = self._total // max(1, len(self._members))
            self._members[model_id] = _Member(charged)
            self._total += charged
        return self._members[model_id]

    def drop(self, model_id: str, load: Load) -> None:
        """Removes a load's remaining datums, if there are any."""
        if model_id in self._members and load in self._members[model_id].loads:
            self._members[model_id].loads.remove(load)

    def remove(self, model_id: str) -> None:
        """Removes all loads of a model. Its debt stays."""
        if model_id in self._members:
            self._members[model_id].loads.clear()

    def deficit(self, model_id: str) -> float:
        """Tokens that the model is owed. Negative when it has had more than its share; 0 when it is not in the ring."""
        if model_id not in self._members:
            return 0.0
        return self._total / len(self._members) - self._members[model_id].charged

    def next_micro_batch(self, budget: int) -> list[tuple[Load, range]]:
        """Takes the datums of the next micro-batch, and charges for them. Returns loads with indices of their datums;
        an empty list when nothing waits."""
        self._settle()
        ready = {model_id: member for model_id, member in self._members.items() if member.loads}
        if not ready:
            return []
        owed = [member for member in ready.values() if self._is_owed(member)]
        self._forward_only = self._choose_kind(owed)
        batch = _MicroBatch(self._forward_only, budget)
        of_kind = [member for member in owed if batch.next_length(member)]
        first = min(of_kind, key=lambda one: one.charged + batch.next_length(one))
        load = first.loads[0]
        if self._alone or load.alone:
            while first.loads and first.loads[0] is load and batch.has_room(first):
                self._total += batch.take(first)
            return self._taken(batch, ready)
        for member in owed:
            while batch.share_allows(member, num_models=len(self._members)):
                self._total += batch.take(member)
        while candidates := [member for member in ready.values() if self._is_owed(member) and batch.fits(member)]:
            self._total += batch.take(min(candidates, key=lambda one: one.charged + batch.next_length(one)))
        return self._taken(batch, ready)

    def _taken(self, batch: _MicroBatch, ready: Mapping[str, _Member]) -> list[tuple[Load, range]]:
        for model_id in [model_id for model_id, member in ready.items() if batch.taken[member]]:
            self._members[model_id] = self._members.pop(model_id)  # to the end
        return [(load, range(start, load.num_taken)) for load, start in batch.starts.items()]

    def _choose_kind(self, owed: list[_Member]) -> bool:
        kinds = {member.loads[0].forward_only for member in owed}
        return not self._forward_only if len(kinds) == 2 else kinds.pop()

    def _is_owed(self, member: _Member) -> bool:
        return member.charged * len(self._members) <= self._total

    def _settle(self) -> None:
        """Removes models without a load from the ring. A model in debt stays while other models have datums."""
        if not self:
            self._members.clear()
            self._total = 0
        while leaving := [m for m, member in self._members.items() if not member.loads and self._is_owed(member)]:
            self._total -= self._members.pop(leaving[0]).charged  # so the mean of the others does not fall


class _MicroBatch:
    """A micro-batch that is being filled."""

    def __init__(self, forward_only: bool, budget: int) -> None:
        self._forward_only = forward_only
        self._budget = self._room = budget
        self.taken: Counter[_Member] = Counter()
        """Tokens taken from each member."""
        self.starts: dict[Load, int] = {}
        """Index of the first datum taken from each load."""

    def next_length(self, member: _Member) -> int:
        """Length of the member's next datum, in tokens; 0 when it has none of this kind."""
        if not member.loads or member.loads[0].forward_only != self._forward_only:
            return 0
        return member.loads[0].lengths[member.loads[0].num_taken]

    def share_allows(self, member: _Member, *, num_models: int) -> bool:
        """True when the member's next datum fits into its share of the budget."""
        length = self.next_length(member)
        shares = length > 0 and not member.loads[0].alone
        return shares and (self.taken[member] + length) * num_models <= self._budget

    def fits(self, member: _Member) -> bool:
        """True when the member's next datum may join the micro-batch."""
        return self.has_room(member) and not member.loads[0].alone

    def has_room(self, member: _Member) -> bool:
        """True when there are tokens left for the member's next datum. Any datum fits into an empty micro-batch."""
        length = self.next_length(member)
        return length > 0 and (length <= self._room or not self.starts)

    def take(self, member: _Member) -> int:
        """Takes and charges the member's next datum. Returns its length in tokens."""
        load = member.loads[0]
        length = load.lengths[load.num_taken]
        self.starts.setdefault(load, load.num_taken)
        load.num_taken += 1
        load.num_tokens -= length
        if load.num_taken == len(load.lengths):
            member.loads.popleft()
        member.charged += length
        self.taken[member] += length
        self._room -= length
        return length
