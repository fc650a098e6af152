"""Limits of callers: requests and tokens per minute for each key, tokens and stored bytes in total for each owner.

A **budget** is never exceeded. Work in progress counts with the most that it may still use.
- Work that cannot fit is refused. Work that would fit if the work in progress used less than its most is told to try
  again. So is work that fits by the count in the database, because unwritten tokens may be counted twice for a moment.
- The size of a save is not known before the first of its shape is stored. That first save may take all the room there
  is, and others wait for it.
- The tokens of other gateways are known once these gateways have written them, which they do every second.
- A refusal by a budget is final for the SDK (403, or a future that fails with category "user"), because nothing changes
  until somebody raises the budget. 402 would make the SDK retry for an hour without a word to its user.

A **rate** makes work wait: 429 with Retry-After, on which the SDK backs off. A training operation that has waited for
PATIENCE_S is let through anyway, and its usage is taken from the minutes to come. Its client gives up after 300 s, and
later operations of the run would wait for it for ever. Each gateway counts rates for itself.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import islice

from cachetools import LRUCache

from gateway.convert import num_tokens
from gateway.database.tables.tenants import Budget
from gateway.tenants.access import Caller
from gateway.tenants.keys import Keys
from gateway.tenants.ledger import Ledger
from tinsmith.errors import BudgetExceeded, RateLimited
from tinsmith.pictures.counting import Counting
from tinsmith.v1 import sampler_pb2

Size = int | None | Callable[[], Awaitable[int | None]]
"""Size of a checkpoint in bytes, or a function that returns the size. None means that it is not known yet."""

PATIENCE_S = 120.0
"""Time for which an operation is told to try again, in seconds. After that a rate lets it through, and a budget refuses
it."""
_MAX_WAITING = 100_000
"""Most operations that were told to try again and are kept in memory."""
_MAX_PATHS = 10_000
"""Most paths of saves in work that are left out of a sum."""
_LONGEST_RETRY_S = 60
"""Longest Retry-After that the SDK obeys, in seconds."""
_FREE = (
    "/api/v1/auth/token",
    "/api/v1/client/",
    "/api/v1/telemetry",
    "/api/v1/session_heartbeat",
    "/api/v1/retrieve_future",
    "/api/v1/cancel_future",
    "/dashboard/api/overview",
    "/dashboard/api/services",
    "/dashboard/api/sessions",
    "/dashboard/api/runs/",
)
"""Beginnings of paths to which requests do not count. Clients repeat these requests on their own, a wait would help
nobody, and none of them writes a row."""
_LATER = {
    ("POST", f"/api/v1/{name}")
    for name in (
        "forward",
        "forward_backward",
        "optim_step",
        "save_weights",
        "save_weights_for_sampler",
        "save_weights_external",
        "load_weights",
    )
}
"""Requests that count only once their body is read: in `operation`, or in `count` when they are no valid operation."""


class Bucket:
    """A token bucket: it holds a minute's units, and refills all the time. Its level may become negative, as a debt."""

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = time.monotonic()

    def wait_s(self) -> float:
        """Seconds until a unit can be taken; 0 means at once."""
        self._fill()
        return max(0.0, 1 - self._level) * 60 / self.per_minute

    def take(self, units: int) -> None:
        self._fill()
        self._level -= units

    def _fill(self) -> None:
        now = time.monotonic()
        self._level = min(float(self.per_minute), self._level + (now - self._at) * self.per_minute / 60)
        self._at = now


@dataclass(slots=True, eq=False)
class Hold:
    """A reservation of the most that a piece of work may still use of its owner's budgets. It is released when the work
    is over."""

    limits: Limits
    owner: str
    key_id: str = ""
    least: int = 0
    """Tokens that the work uses in any case."""
    most: int = 0
    """Tokens that the work uses at most."""
    path: str = ""
    """Path of the checkpoint that is being stored."""
    num_bytes: int | None = 0
    """Size of that checkpoint in bytes. None means that the size is not known, so that the checkpoint may take all the
    room there is."""
    _is_released: bool = field(default=False, repr=False)

    @property
    def is_budgeted(self) -> bool:
        """Whether the owner has a token budget. Usage must then be in the database before the client gets its
        answer."""
        return self.limits.has_budget(self.owner)

    def drawn(self, tokens: int) -> None:
        """Counts sampled tokens against the rate of the key."""
        self.limits.took(self.key_id, tokens)

    def release(self) -> None:
        """Gives the reservation back; a repeat does nothing."""
        if not self._is_released:
            self._is_released = True
            self.limits.release(self)


class Limits:
    """Counts requests and work against rates and budgets."""

    def __init__(
        self,
        keys: Keys,
        ledger: Ledger,
        *,
        context_length: Callable[[str], int],
        counting: Callable[[str], Counting | None],
        max_checkpoints: int,
    ) -> None:
        """`context_length`: gives the context length of a base model, in tokens. `counting`: gives the rule by which
        pictures count as tokens of a base model. `max_checkpoints`: most checkpoints of each owner."""
        self._max_checkpoints = max_checkpoints
        self._context_length = context_length
        self._counting = counting
        self._keys = keys
        self._ledger = ledger
        self._budgets: dict[str, Budget] = {}
        self._held_least: Counter[str] = Counter()
        self._held_most: Counter[str] = Counter()
        self._saves: defaultdict[str, set[Hold]] = defaultdict(set)
        """owner -> the reservations of saves in work."""
        self._storing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}
        self._waiting: LRUCache[str, float] = LRUCache(_MAX_WAITING)
        """request_id of a training operation that was told to try again -> when it first came, on the monotonic
        clock."""

    async def refresh(self) -> None:
        """Reads budgets, and the tokens that other gateways have counted."""
        self._budgets = await self._keys.budgets()
        limited = [owner for owner, budget in self._budgets.items() if budget.tokens is not None]
        if limited:
            self._ledger.heard(await self._keys.token_counts(limited))

    # Rates

    def request(self, caller: Caller, method: str, path: str) -> None:
        """Counts a request, unless it is free or counts later. Raises RateLimited."""
        if not path.startswith(_FREE) and (method, path) not in _LATER:
            self.count(caller)

    def count(self, caller: Caller) -> None:
        """Counts a request. Raises RateLimited."""
        if caller.requests_per_minute is None:
            return
        bucket = self._bucket(self._requests, caller.key_id, caller.requests_per_minute)
        _check(bucket, "requests_per_minute")
        bucket.take(1)

    def _rates(self, caller: Caller, *, tokens: int) -> list[tuple[str, Bucket]]:
        """Name and bucket of each rate that applies to a training operation with this number of tokens."""
        found = []
        if caller.requests_per_minute is not None:
            bucket = self._bucket(self._requests, caller.key_id, caller.requests_per_minute)
            found.append(("requests_per_minute", bucket))
        if tokens and caller.tokens_per_minute is not None:
            found.append(("tokens_per_minute", self._bucket(self._tokens, caller.key_id, caller.tokens_per_minute)))
        return found

    @staticmethod
    def _bucket(buckets: dict[str, Bucket], key_id: str, per_minute: int) -> Bucket:
        bucket = buckets.get(key_id)
        if bucket is None or bucket.per_minute != per_minute:
            bucket = buckets[key_id] = Bucket(per_minute)
        return bucket

    def took(self, key_id: str, tokens: int) -> None:
        """Counts tokens against the rate of a key."""
        if (bucket := self._tokens.get(key_id)) is not None:
            bucket.take(tokens)

    # Work

    def operation(self, caller: Caller, request_id: str, *, owner: str, tokens: int, hold: Hold | None = None) -> Hold:
        """Lets a training operation in, and reserves the tokens that it trains on in the budget of the run's owner.

        `hold`: a reservation to extend, such as that of a save. Raises RateLimited, after which the client has to send
        the operation again, and BudgetExceeded.
        """
        rates = self._rates(caller, tokens=tokens)
        try:
            for name, bucket in rates:
                _check(bucket, name)
        except RateLimited:
            if self._is_patient(request_id):
                raise
        try:
            hold = self._hold(owner, caller.key_id, least=tokens, most=tokens, hold=hold)
        except RateLimited as error:
            if self._is_patient(request_id):
                raise
            raise BudgetExceeded(error.message, budget="tokens") from error
        self._waiting.pop(request_id, None)
        for name, bucket in rates:
            bucket.take(1 if name == "requests_per_minute" else tokens)
        return hold

    def _is_patient(self, request_id: str) -> bool:
        """Whether the operation may still be told to try again. This is so for PATIENCE_S after it first came."""
        since = self._waiting.setdefault(request_id, time.monotonic())
        return time.monotonic() - since < PATIENCE_S

    def sample(self, caller: Caller, request: sampler_pb2.SampleRequest, *, base_model: str) -> Hold:
        """Lets a sample in, and reserves the tokens of its prompt and the most that it may generate.

        Raises RateLimited, after which the client has to send it again, and BudgetExceeded.
        """
        bucket = None
        if caller.tokens_per_minute is not None:
            bucket = self._bucket(self._tokens, caller.key_id, caller.tokens_per_minute)
            _check(bucket, "tokens_per_minute")
        prompt = num_tokens(request.prompt, self._counting(base_model))
        longest = self._context_length(base_model) - prompt
        if request.sampling_params.HasField("max_tokens"):
            longest = min(longest, request.sampling_params.max_tokens)
        most = prompt + max(0, longest) * request.num_samples
        hold = self._hold(caller.owner, caller.key_id, least=prompt, most=most)
        if bucket is not None:
            bucket.take(prompt)
        return hold

    def _hold(self, owner: str, key_id: str, *, least: int, most: int, hold: Hold | None = None) -> Hold:
        budget = self._budgets.get(owner)
        if budget is not None and budget.tokens is not None and most > 0:
            used = self._ledger.tokens(owner) - budget.tokens_from
            written = self._ledger.written(owner) - budget.tokens_from
            # Tokens that work in progress uses in any case count as used. Operations of a run may wait for this one to
            # fill a gap in their order, so a wait for their end would not help.
            surely = written + self._held_least[owner]
            if surely + least > budget.tokens or (not self._held_most[owner] and written + most > budget.tokens):
                raise BudgetExceeded(
                    f"the token budget of {owner!r} does not allow this request: {surely} of {budget.tokens} tokens "
                    f"are used or in work, and it may use {most}; the operator of the server can raise the budget",
                    budget="tokens",
                    used=surely,
                    limit=budget.tokens,
                )
            if used + self._held_most[owner] + most > budget.tokens:
                raise RateLimited(
                    f"the token budget of {owner!r} may not last for this request and for those in work: {used} of "
                    f"{budget.tokens} tokens are used, those in work may use {self._held_most[owner]}, and this one "
                    f"{most}; try again when they are over",
                    retry_after_s=1,
                )
        self._held_least[owner] += least
        self._held_most[owner] += most
        hold = hold or self.start(owner)
        hold.key_id, hold.least, hold.most = key_id, least, most
        return hold

    def start(self, owner: str) -> Hold:
        """A reservation that holds nothing yet."""
        return Hold(self, owner)

    def has_budget(self, owner: str) -> bool:
        budget = self._budgets.get(owner)
        return budget is not None and budget.tokens is not None

    def has_quota(self, owner: str) -> bool:
        budget = self._budgets.get(owner)
        return budget is not None and budget.storage_bytes is not None

    async def store(self, hold: Hold, path: str, *, num_bytes: Size, request_id: str | None = None) -> int | None:
        """Reserves storage for a checkpoint at this path, in place of what `hold` had reserved before.

        `num_bytes`: the expected size in bytes; None when it is not known. A function is called while no other save of
        the owner can be let in, because an earlier save may tell the size. Returns the bytes that the checkpoint may
        have, or None when there is no quota.

        Raises RateLimited, after which the client has to send the request again, and BudgetExceeded. The training
        operation `request_id` gets BudgetExceeded also once it has tried again for PATIENCE_S.
        """
        async with self._storing[hold.owner]:  # no other save may be let in while the sum is read
            if callable(num_bytes):
                num_bytes = await num_bytes()
            try:
                room = await self._check_room(hold, path, num_bytes)
            except RateLimited as error:
                if request_id is None or self._is_patient(request_id):
                    raise
                raise BudgetExceeded(error.message, budget="storage_bytes") from error
            hold.path, hold.num_bytes = path, num_bytes
            self._saves[hold.owner].add(hold)
            return room

    async def _check_room(self, hold: Hold, path: str, num_bytes: int | None) -> int | None:
        owner = hold.owner
        number = await self._keys.num_checkpoints(owner, without=path)
        if number >= self._max_checkpoints:
            raise BudgetExceeded(
                f"{owner!r} has {number} checkpoints, and may have at most {self._max_checkpoints} (max_owner_rows); "
                "delete some, or give them a TTL or a retention policy",
                budget="checkpoints",
                used=number,
                limit=self._max_checkpoints,
            )
        budget = self._budgets.get(owner)
        if budget is None or (quota := budget.storage_bytes) is None:
            return None
        # A save in work may end while the sum is read. It counts as work only, and its path is left out of the sum.
        in_work = [save for save in self._saves[owner] if save is not hold]
        unknown = any(save.num_bytes is None for save in in_work)
        sizes: dict[str, int] = {}
        for save in in_work:
            sizes[save.path] = max(save.num_bytes or 0, sizes.get(save.path, 0))
        # A query may have about 32,000 parameters. Paths beyond _MAX_PATHS may count twice.
        without = {path, *islice(sizes, _MAX_PATHS)}
        stored = await self._keys.stored_bytes(owner, without=without)
        needs = "nobody knows yet how many" if num_bytes is None else f"about {num_bytes}"
        if stored >= quota or stored + (num_bytes or 0) > quota:
            raise BudgetExceeded(
                f"the storage quota of {owner!r} does not allow this save: {stored} of {quota} bytes are used, and it "
                f"needs {needs}; delete checkpoints, or ask the operator of the server to raise the quota",
                budget="storage_bytes",
                used=stored,
                limit=quota,
            )
        held = sum(sizes.values())
        room = quota - stored - sum(size for other, size in sizes.items() if other != path)
        sizes[path] = max(num_bytes or 0, sizes.get(path, 0))
        total = stored + sum(sizes.values())
        if unknown or total > quota or (num_bytes is None and total >= quota):
            held_text = "any number, because the first of its shape is among them" if unknown else str(held)
            raise RateLimited(
                f"the storage quota of {owner!r} may not last for this save and for those in work: {stored} of {quota} "
                f"bytes are used, those in work may need {held_text}, and this one needs {needs}; try again when they "
                "are over",
                retry_after_s=1,
            )
        return room

    def release(self, hold: Hold) -> None:
        for held, amount in ((self._held_least, hold.least), (self._held_most, hold.most)):
            held[hold.owner] -= amount
            if not held[hold.owner]:
                del held[hold.owner]
        saves = self._saves[hold.owner]
        saves.discard(hold)
        if not saves:
            del self._saves[hold.owner]


def _check(bucket: Bucket, name: str) -> None:
    if (wait_s := bucket.wait_s()) > 0:
        raise RateLimited(
            f"this key may have {bucket.per_minute} {name.removesuffix('_per_minute')} a minute ({name}); "
            f"try again in {wait_s:.0f} s",
            retry_after_s=min(math.ceil(wait_s), _LONGEST_RETRY_S),
        )
