"""Which datums share a micro-batch: deficit round robin over the models, by tokens. Knows no torch, thread or clock.

Shreedhar and Varghese (1995, "Efficient Fair Queueing Using Deficit Round Robin") let every flow with something to send
save up a deficit, and send when the deficit covers it. Here every token that is computed is a round: it is credited to
all models in the ring in equal parts, and charged to the model that it belongs to. So the deficits of the ring always
add up to zero, and a model is *owed* when its own is not negative. Of those that are owed, the model comes first whose
deficit would cover its next datum first. (With rounds that fine, this is the "earliest eligible virtual deadline first"
of Stoica and Abdel-Wahab, 1995.) What is kept for each model is not the deficit itself but what it was charged: its
deficit is the mean of the ring minus that.

A micro-batch of at most `budget` tokens is filled in two passes:

1. Shares: with n models in the ring, each one that is owed takes datums up to budget / n tokens.
2. The rest, one datum at a time, goes to the first model in the order above whose datum still fits. A datum that is
   longer than the budget goes alone.

Forward-only datums and those with a gradient never share a micro-batch. While models are owed that wait with either,
the kinds alternate.

The expected time of a custom loss counts as tokens of its datum, so that datums whose losses take long go apart, and
others wait for one of them only. A model may also be charged for more than what was taken (`charge`): the compute
thread does so for what such a loss took beyond that, when it is known. Such a charge is a debt like any other.

A model that has nothing left leaves the ring: what it was owed is dropped, so that nobody saves up for later. A debt
stays until the others have caught up, or submitting in small portions would pay. A new model begins with deficit 0.

What follows, with n models in the ring, L_max the longest datum, and q = max(L_max, budget / 4):

- A job of at most budget / n tokens whose model is owed, as a new one is, is computed in the next micro-batch of its
  kind: after the one that runs when it comes and, at most, one of the other kind.
- No model's debt exceeds q, and the largest `charge` beside it. Models with something to compute all the time have been
  charged alike, to within twice that: without such charges they have received the same number of tokens, to within 2 q.
- From when a datum of length L is the next of its model, which then has deficit d, until its micro-batch begins, at
  most W = (n - 1) (L + q) + n max(0, -d) + budget tokens of others are computed, in at most 4 W / budget + 2
  micro-batches.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Load:
    """The datums of one operation, which are taken in their order."""

    lengths: Sequence[int]
    """Tokens that each is charged for."""
    forward_only: bool
    alone: bool = False
    """No other load is in its micro-batches."""
    num_taken: int = 0
    num_tokens: int = field(init=False)
    """Tokens of the datums that have not been taken."""

    def __post_init__(self) -> None:
        self.num_tokens = sum(self.lengths)

    @property
    def num_waiting(self) -> int:
        return len(self.lengths) - self.num_taken


@dataclass(slots=True, eq=False)
class _Member:
    charged: int
    """Tokens, counted from where the mean of the ring was when it came."""
    loads: deque[Load] = field(default_factory=deque)
    """None of them is empty."""


class DeficitRoundRobin:
    """See the module's docstring."""

    def __init__(self, *, alone: bool = False) -> None:
        """`alone`: every micro-batch has datums of one load only. Then how a load is divided depends on its own lengths
        and the budget, and on nothing else."""
        self._alone = alone
        self._members: dict[str, _Member] = {}  # in the order of their last turns, the longest ago first
        self._total = 0  # of what they were charged
        self._forward_only = False  # the kind of the last micro-batch

    def __bool__(self) -> bool:
        """True when a datum waits."""
        return any(member.loads for member in self._members.values())

    def add(self, model_id: str, load: Load) -> None:
        """Behind what the model has already."""
        if not load.num_waiting:
            raise ValueError("a load without datums")
        self._settle()
        self._member(model_id).loads.append(load)

    def charge(self, model_id: str, tokens: int) -> None:
        """For what a model cost beside its tokens. It may have left the ring meanwhile, and comes back with the debt;
        nothing happens where nobody waits, who would be owed."""
        if self:
            self._member(model_id).charged += tokens
            self._total += tokens

    def _member(self, model_id: str) -> _Member:
        """A new one has deficit 0."""
        if model_id not in self._members:
            charged = self._total // max(1, len(self._members))
            self._members[model_id] = _Member(charged)
            self._total += charged
        return self._members[model_id]

    def drop(self, model_id: str, load: Load) -> None:
        """Takes back what is left of a load; nothing happens when that is nothing."""
        if model_id in self._members and load in self._members[model_id].loads:
            self._members[model_id].loads.remove(load)

    def remove(self, model_id: str) -> None:
        """Takes back all loads of a model; its debt stays."""
        if model_id in self._members:
            self._members[model_id].loads.clear()

    def deficit(self, model_id: str) -> float:
        """Tokens that the model is owed; negative when it has had more than its share, 0 for one not in the ring."""
        if model_id not in self._members:
            return 0.0
        return self._total / len(self._members) - self._members[model_id].charged

    def next_micro_batch(self, budget: int) -> list[tuple[Load, range]]:
        """What to compute next, as indices into loads, and charges for it. Empty when nothing waits."""
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
        """Models without a load leave, except those in debt while there are others that they owe to."""
        if not self:
            self._members.clear()
            self._total = 0
        while leaving := [m for m, member in self._members.items() if not member.loads and self._is_owed(member)]:
            self._total -= self._members.pop(leaving[0]).charged  # which raises the mean, if anything


class _MicroBatch:
    """One that is being put together."""

    def __init__(self, forward_only: bool, budget: int) -> None:
        self._forward_only = forward_only
        self._budget = self._room = budget
        self.taken: Counter[_Member] = Counter()
        """Tokens of each."""
        self.starts: dict[Load, int] = {}
        """Where in each load it begins."""

    def next_length(self, member: _Member) -> int:
        """Of its next datum; 0 when it has none of this kind."""
        if not member.loads or member.loads[0].forward_only != self._forward_only:
            return 0
        return member.loads[0].lengths[member.loads[0].num_taken]

    def share_allows(self, member: _Member, *, num_models: int) -> bool:
        length = self.next_length(member)
        shares = length > 0 and not member.loads[0].alone
        return shares and (self.taken[member] + length) * num_models <= self._budget

    def fits(self, member: _Member) -> bool:
        """Its next datum may join what is there."""
        return self.has_room(member) and not member.loads[0].alone

    def has_room(self, member: _Member) -> bool:
        length = self.next_length(member)
        return length > 0 and (length <= self._room or not self.starts)

    def take(self, member: _Member) -> int:
        """Returns the tokens of the datum."""
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
