"""Chooses the next work of the compute thread. The only code that packs micro-batches. Knows no thread and no clock.

A lane holds a model's batches and calls in order. The batches before its first call are open: their datums share
micro-batches with other models', fairly (DeficitRoundRobin). A call runs when everything before it in its lane is over,
and everything behind it waits. So a step sees all gradients before it and none after it. A pipelined step is in the
lane before its turn comes, so the compute thread need not wait for the event loop between a batch and its step.

Calls run between micro-batches, at most one of each model in a row. So a micro-batch waits for at most one call of each
model, and a call for at most one micro-batch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from trainer_service.engine.batch import Batch
from trainer_service.operation import Call, Operation

Selection = Sequence[tuple[Operation, range]]
"""The datums of a micro-batch: operations with indices of their batches' datums."""

_UNCUT = 4
"""The rest of a batch is taken as one if it is at most one part in so many of a micro-batch."""


@dataclass(slots=True)
class _Lane:
    operations: deque[Operation] = field(default_factory=deque)
    num_calls: int = 0


class Lanes:
    """All models' lanes; see the module's docstring. Not thread safe."""

    def __init__(self, *, alone: bool = False) -> None:
        """`alone`: no two batches share a micro-batch."""
        self._lanes: dict[str, _Lane] = {}
        self._ring = DeficitRoundRobin(alone=alone)
        self._of_batch: dict[Batch, Operation] = {}
        """Operations with batches in the ring, and those of the current micro-batch."""
        self._calls: deque[Call] = deque()
        """Calls that may run now: the first ones of their lanes, and those of `put_first`."""
        self._calls_before_batch = 0
        """Number of calls that run before the next micro-batch."""

    def put(self, operation: Operation) -> None:
        """Adds an operation at the end of its model's lane."""
        lane = self._lanes.setdefault(operation.model_id, _Lane())
        lane.operations.append(operation)
        if operation.call is not None:
            lane.num_calls += 1
            if len(lane.operations) == 1:
                self._calls.append(operation.call)
        elif not lane.num_calls:
            self._open(operation)

    def put_first(self, call: Call) -> None:
        """Adds a call outside the lanes, which runs next."""
        self._calls.appendleft(call)
        self._calls_before_batch += 1

    def next(
        self, budget: int, go_together: Callable[[Sequence[str]], bool] = lambda _: True
    ) -> Call | Selection | None:
        """Takes the next work of the compute thread; None when nothing is ready. `budget`: most tokens of a
        micro-batch. `go_together`: see DeficitRoundRobin.next_micro_batch.

        `end` must be called for each operation that is over.
        """
        if self._calls and (self._calls_before_batch > 0 or not self._ring):
            self._calls_before_batch = max(0, self._calls_before_batch - 1)
            return self._calls.popleft()
        taken = self._ring.next_micro_batch(budget, go_together)
        return [(self._of_batch[batch], indices) for batch, indices in taken] or None

    def charge(self, model_id: str, tokens: int) -> None:
        """Charges a model for costs beyond the tokens of its datums."""
        self._ring.charge(model_id, tokens)

    @property
    def is_crowded(self) -> bool:
        """True when a model did not fit on the device beside those in the last micro-batch."""
        return self._ring.is_crowded

    def end_micro_batch(self) -> None:
        """Records the end of a micro-batch. The calls that wait now run before the next micro-batch."""
        self._calls_before_batch = len(self._calls)

    def end(self, operation: Operation) -> None:
        """Removes an operation that is computed or has failed from its lane. A batch's remaining datums are dropped."""
        operation.is_computed = True
        if operation.batch is not None:
            self._of_batch.pop(operation.batch, None)
            self._ring.drop(operation.batch)
        lane = self._lanes.get(operation.model_id)
        if lane is None or operation not in lane.operations:  # its lane was withdrawn
            return
        lane.operations.remove(operation)
        if not lane.operations:
            del self._lanes[operation.model_id]
        elif operation.call is not None:
            lane.num_calls -= 1
            for following in lane.operations:
                if following.call is not None:
                    break
                self._open(following)
        if lane.operations and (first := lane.operations[0].call) is not None:
            self._calls.append(first)

    def withdraw(self, model_id: str) -> list[Operation]:
        """Removes a model's lane. Returns the operations that the compute thread will not end after its current
        work."""
        lane = self._lanes.pop(model_id, None)
        if lane is None:
            return []
        self._ring.remove(model_id)
        withdrawn = [operation for operation in lane.operations if operation.is_waiting]
        for operation in withdrawn:
            if operation.batch is not None:
                self._of_batch.pop(operation.batch, None)
            elif operation.call in self._calls:
                self._calls.remove(operation.call)
        return withdrawn

    def withhold(self, model_id: str) -> list[Operation]:
        """Removes a model's operations that have not begun, and returns them. Those that have begun go on: they are the
        first ones of the lane."""
        lane = self._lanes.get(model_id)
        if lane is None:
            return []
        withheld = [operation for operation in lane.operations if not operation.has_begun]
        for operation in withheld:
            lane.operations.remove(operation)
            if operation.batch is not None:
                self._of_batch.pop(operation.batch, None)
                self._ring.drop(operation.batch)
            else:
                lane.num_calls -= 1
                if operation.call in self._calls:
                    self._calls.remove(operation.call)
        if not lane.operations:
            del self._lanes[model_id]
        return withheld

    def withdraw_all(self) -> list[Operation | Call]:
        """Removes all lanes and calls. Returns operations as `withdraw` does, and calls that belong to none."""
        withdrawn = [operation for model_id in list(self._lanes) for operation in self.withdraw(model_id)]
        without, self._calls = self._calls, deque()
        return [*withdrawn, *without]

    def waiting(self) -> dict[str, list[Operation]]:
        """The operations of each model that have not ended, in order. Copies lists only, so it is fast."""
        return {model_id: list(lane.operations) for model_id, lane in self._lanes.items()}

    def next_of_each(self) -> list[Operation]:
        """For each model with waiting operations, the one that begins next."""
        following = (
            next((operation for operation in lane.operations if not operation.has_begun), None)
            for lane in self._lanes.values()
        )
        return [operation for operation in following if operation is not None]

    def _open(self, operation: Operation) -> None:
        """Lets a batch's datums join micro-batches."""
        assert operation.batch is not None
        self._of_batch[operation.batch] = operation
        self._ring.add(operation.batch)


@dataclass(slots=True, eq=False)
class _Member:
    """A model in the ring."""

    charged: int
    """Tokens that the model was charged for, on top of the ring's mean when it came."""
    batches: deque[Batch] = field(default_factory=deque)
    """Batches with datums to take, in order."""


class DeficitRoundRobin:
    """Chooses the datums of a micro-batch: deficit round robin over the models, by tokens.

    In deficit round robin (Shreedhar and Varghese 1995, "Efficient Fair Queueing Using Deficit Round Robin") every flow
    with something to send saves up a deficit, and sends when the deficit covers it. Here every computed token is a
    round: it is credited to all models in the ring in equal parts, and charged to its own model. So the deficits always
    add up to zero. A model is *owed* tokens when its deficit is not negative. Among the owed models, the one comes
    first whose deficit would cover its next datum first. (With such fine rounds, this is the "earliest eligible virtual
    deadline first" of Stoica and Abdel-Wahab, 1995.) The code keeps what each model was charged; its deficit is the
    ring's mean minus that.

    A micro-batch of at most `budget` tokens is filled in two passes:

    1. Shares: with n models in the ring, each owed model takes datums up to budget / n tokens.
    2. The rest, one datum at a time, goes to the first model in the order above whose datum still fits. A datum longer
       than the budget is a micro-batch by itself.

    What is left of a batch counts as one datum if it has at most budget / 4 tokens. Otherwise the batches of many
    models would all be cut into as many micro-batches as each has datums, none of them would end before the last of
    these, and each micro-batch would have to apply the adapters of all models.

    Forward-only datums and those with a gradient never share a micro-batch. The two kinds alternate while owed models
    wait with both.

    The expected time of a custom loss counts as tokens of its datum. So datums with slow losses go into different
    micro-batches, and others wait for only one of them. A model may be charged for more (`charge`): the compute thread
    does so when a custom loss has taken longer than expected. Such a charge is a debt like any other.

    Models that do not fit on the device at once share no micro-batch. The one that has to wait stays before the others.
    The room that it leaves is not lost: models that fit may take it before they are owed it. A model that was moved to
    the device then computes more than one datum for the time of its move.

    A model without datums leaves the ring. Its credit is dropped, so that no model saves up for later. Its debt stays
    until the others have caught up, so that submitting in small portions does not pay. A new model begins with deficit
    0.

    These guarantees hold where all models fit on the device, with n models in the ring, L_max the longest datum, and q
    = max(L_max, budget / 4):

    - A job of at most budget / n tokens of an owed model, as every new one is, runs in the next micro-batch of its
      kind: after the micro-batch that runs when it comes and at most one of the other kind.
    - A model's debt is at most q plus the largest `charge`. Models that always have something to compute have been
      charged equally, to within twice that. Without such charges they have received equally many tokens, to within 2 q.
    - Between the moment when a datum of length L, or such a rest, is the next of its model, whose deficit then is d,
      and the beginning of its micro-batch, at most W = (n - 1) (L + q) + n max(0, -d) + budget tokens of others are
      computed, in at most 4 W / budget + 2 micro-batches.
    """

    def __init__(self, *, alone: bool = False) -> None:
        """`alone`: every micro-batch has datums of one batch only, so that the division of a batch depends only on its
        own costs and the budget."""
        self._alone = alone
        self._members: dict[str, _Member] = {}  # in the order of their last turns, the latest at the end
        self._total = 0  # sum of the members' charges
        self._forward_only = False  # the kind of the last micro-batch
        self.is_crowded = False
        """True when a model did not fit on the device beside those in the last micro-batch."""

    def __bool__(self) -> bool:
        """True when a datum waits."""
        return any(member.batches for member in self._members.values())

    def add(self, batch: Batch) -> None:
        """Adds a batch behind its model's other batches. Raises ValueError for a batch without datums."""
        if not batch.num_waiting:
            raise ValueError("a batch without datums")
        self._settle()
        self._member(batch.model_id).batches.append(batch)

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

    def drop(self, batch: Batch) -> None:
        """Removes a batch's remaining datums, if there are any."""
        member = self._members.get(batch.model_id)
        if member is not None and batch in member.batches:
            member.batches.remove(batch)

    def remove(self, model_id: str) -> None:
        """Removes all batches of a model. Its debt stays."""
        if model_id in self._members:
            self._members[model_id].batches.clear()

    def deficit(self, model_id: str) -> float:
        """Tokens that the model is owed. Negative when it has had more than its share; 0 when it is not in the ring."""
        if model_id not in self._members:
            return 0.0
        return self._total / len(self._members) - self._members[model_id].charged

    def next_micro_batch(
        self, budget: int, go_together: Callable[[Sequence[str]], bool] = lambda _: True
    ) -> list[tuple[Batch, range]]:
        """Takes the datums of the next micro-batch, and charges for them. `go_together`: whether all these models fit
        on the device at once.

        Returns batches with indices of their datums; an empty list when nothing waits.
        """
        self._settle()
        ready = {model_id: member for model_id, member in self._members.items() if member.batches}
        if not ready:
            return []
        owed = [member for member in ready.values() if self._is_owed(member)]
        self._forward_only = self._choose_kind(owed)
        filling = _MicroBatch(self._forward_only, budget, go_together, cuts_all=self._alone)
        of_kind = [member for member in owed if filling.next_cost(member)]
        first = min(of_kind, key=lambda one: one.charged + filling.next_cost(one))
        batch = first.batches[0]
        if self._alone or batch.alone:
            while first.batches and first.batches[0] is batch and filling.has_room(first):
                self._total += filling.take(first)
            return self._taken(filling, ready)
        for member in owed:
            while filling.share_allows(member, num_models=len(self._members)):
                self._total += filling.take(member)
        self._fill_rest(filling, ready)
        return self._taken(filling, ready)

    def _fill_rest(self, filling: _MicroBatch, ready: Mapping[str, _Member]) -> None:
        """The second pass, in O(log n) for each datum and O(n) once.

        Members move from a heap by their charges to one by their turns when they become owed, or a model has no place
        on the device. A member whose datum does not fit is left out for good, because the room only shrinks.
        """
        members = [member for member in ready.values() if filling.next_cost(member)]
        by_charge = [(member.charged, place) for place, member in enumerate(members)]
        by_turn: list[tuple[int, int]] = []
        heapify(by_charge)
        while True:
            while by_charge and (filling.is_crowded or self._is_owed(members[by_charge[0][1]])):
                charged, place = heappop(by_charge)
                heappush(by_turn, (charged + filling.next_cost(members[place]), place))
            if not by_turn:
                return
            _, place = heappop(by_turn)
            member = members[place]
            if filling.fits(member):
                self._total += filling.take(member)
                if filling.next_cost(member):
                    heappush(by_charge, (member.charged, place))

    def _taken(self, filling: _MicroBatch, ready: Mapping[str, _Member]) -> list[tuple[Batch, range]]:
        self.is_crowded = filling.is_crowded
        for model_id in [model_id for model_id, member in ready.items() if filling.taken[member]]:
            self._members[model_id] = self._members.pop(model_id)  # to the end
        return [(batch, range(start, batch.num_taken)) for batch, start in filling.starts.items()]

    def _choose_kind(self, owed: list[_Member]) -> bool:
        kinds = {member.batches[0].forward_only for member in owed}
        return not self._forward_only if len(kinds) == 2 else kinds.pop()

    def _is_owed(self, member: _Member) -> bool:
        return member.charged * len(self._members) <= self._total

    def _settle(self) -> None:
        """Removes models without a batch from the ring. A model in debt stays while other models have datums."""
        if not self:
            self._members.clear()
            self._total = 0
        idle = [(member.charged, model_id) for model_id, member in self._members.items() if not member.batches]
        heapify(idle)
        while idle and self._is_owed(self._members[idle[0][1]]):
            charged, model_id = heappop(idle)
            del self._members[model_id]
            self._total -= charged  # so that the mean of the others does not fall


class _MicroBatch:
    """A micro-batch that is being filled."""

    def __init__(
        self, forward_only: bool, budget: int, go_together: Callable[[Sequence[str]], bool], *, cuts_all: bool
    ) -> None:
        """`cuts_all`: the rest of a small batch is not taken as one datum."""
        self._forward_only = forward_only
        self._most_uncut = 0 if cuts_all else budget // _UNCUT
        self._budget = self._left = budget
        self._go_together = go_together
        self._refused: set[str] = set()
        """Models that do not fit on the device beside those in the micro-batch."""
        self.taken: Counter[_Member] = Counter()
        """Tokens taken from each member."""
        self.starts: dict[Batch, int] = {}
        """Index of the first datum taken from each batch."""

    @property
    def is_crowded(self) -> bool:
        """True when a model does not fit on the device beside those in the micro-batch."""
        return bool(self._refused)

    def next_cost(self, member: _Member) -> int:
        """Cost of the member's next datum, or of the rest of its batch if that is taken as one, in tokens; 0 when it
        has none of this kind."""
        if not member.batches or member.batches[0].forward_only != self._forward_only:
            return 0
        batch = member.batches[0]
        begins = batch not in self.starts
        rest = batch.rest_cost(begins=begins)
        return rest if rest <= self._most_uncut else batch.next_cost(begins=begins)

    def share_allows(self, member: _Member, *, num_models: int) -> bool:
        """True when the member's next datum fits into its share of the budget."""
        cost = self.next_cost(member)
        shares = cost > 0 and not member.batches[0].alone
        return shares and (self.taken[member] + cost) * num_models <= self._budget and self._has_place(member)

    def fits(self, member: _Member) -> bool:
        """True when the member's next datum may join the micro-batch."""
        return self.has_room(member) and not member.batches[0].alone and self._has_place(member)

    def has_room(self, member: _Member) -> bool:
        """True when there are tokens left for the member's next datum. Any datum fits into an empty micro-batch."""
        cost = self.next_cost(member)
        return cost > 0 and (cost <= self._left or not self.starts)

    def _has_place(self, member: _Member) -> bool:
        """True when the member's model fits on the device beside the models in the micro-batch."""
        if not self.starts or member in self.taken:
            return True
        model_id = member.batches[0].model_id
        if model_id in self._refused:
            return False
        if self._go_together([*dict.fromkeys(batch.model_id for batch in self.starts), model_id]):
            return True
        self._refused.add(model_id)
        return False

    def take(self, member: _Member) -> int:
        """Takes the datums whose cost is `next_cost`, and charges for them. Returns the cost, in tokens."""
        batch = member.batches[0]
        begins = batch not in self.starts
        num_datums = batch.num_waiting if batch.rest_cost(begins=begins) <= self._most_uncut else 1
        self.starts.setdefault(batch, batch.num_taken)
        cost = sum(batch.take(begins=begins and not n) for n in range(num_datums))
        if not batch.num_waiting:
            member.batches.popleft()
        member.charged += cost
        self.taken[member] += cost
        self._left -= cost
        return cost
