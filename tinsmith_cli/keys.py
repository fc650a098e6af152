"""`tinsmith keys`: manages the keys of a server, and the budgets of their owners, in the database of its gateways.

The commands access the database directly, so they also work while no gateway runs. They need no key: whoever can write
to the database can do everything anyway. A running gateway applies changes within seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinsmith.errors import ServiceError
from tinsmith.formatting import columns
from tinsmith_cli.base_models import UsageError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from gateway.database.tables.tenants import StoredKey
    from gateway.tenants.keys import Keys

DATABASE_URL = "GATEWAY_DATABASE_URL"
DEFAULT_STATE_DIR = Path("~/.tinsmith")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MULTIPLES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_NONE = "none"


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "keys",
        help="keys of a server, and the budgets of their owners",
        description="Works on the gateway's database: that of `tinsmith up` in --state-dir, or the one of "
        "--database-url. A running gateway applies changes within seconds.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    creating = actions.add_parser(
        "create",
        help="make a key; it is printed once",
        description="Prints the new key. The database holds only its digest.",
    )
    creating.add_argument(
        "--owner", required=True, help="owner of everything that is made with the key; keys of one owner share it"
    )
    creating.add_argument("--name", default="", help="name of the key, such as laptop")
    creating.add_argument("--note", default="", help="free text about the key")
    creating.add_argument("--email", default="", help="address of the key's holder, for `tinker auth whoami`")
    creating.add_argument(
        "--admin", action="store_true", help="the key sees and changes the objects and the usage of every owner"
    )
    creating.add_argument("--expires", type=_seconds, metavar="TIME", help="validity of the key: 90m, 12h, 30d")
    creating.add_argument(
        "--requests-per-minute",
        type=_positive,
        metavar="N",
        help="most HTTP requests in a minute; further ones get 429",
    )
    creating.add_argument(
        "--tokens-per-minute",
        type=_positive,
        metavar="N",
        help="most tokens trained on, read and sampled in a minute; beyond that 429",
    )
    _add_budget(creating)
    _add_database(creating, run_create)
    listing = actions.add_parser("list", help="all keys, and their usage")
    listing.add_argument("--json", action="store_true", help="print JSON")
    _add_database(listing, run_list)
    revoking = actions.add_parser("revoke", help="end a key's validity forever")
    revoking.add_argument("key_id", metavar="ID", help="id of the key in `tinsmith keys list`")
    _add_database(revoking, run_revoke)
    budgeting = actions.add_parser("budget", help="show or set the total that an owner may use")
    budgeting.add_argument("owner", metavar="OWNER")
    _add_budget(budgeting)
    budgeting.add_argument("--restart", action="store_true", help="count tokens from now on only")
    _add_database(budgeting, run_budget)


def _add_budget(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens-budget", "--tokens", type=_amount, default=argparse.SUPPRESS, metavar="N",
        help="tokens that the owner may train on, read and sample in total, such as 50M; none: any number",
    )  # fmt: skip
    parser.add_argument(
        "--storage-quota", "--storage", type=_amount, default=argparse.SUPPRESS, metavar="BYTES",
        help="bytes of the owner's checkpoints, such as 20G; none: any number",
    )  # fmt: skip


def _add_database(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> None:
    parser.add_argument(
        "--state-dir", type=Path, default=DEFAULT_STATE_DIR, metavar="DIR",
        help="state directory of `tinsmith up` (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--database-url", default=os.environ.get(DATABASE_URL, ""), metavar="URL",
        help=f"SQLAlchemy URL of the gateway's database (default: {DATABASE_URL}, else SQLite in --state-dir)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def _seconds(text: str) -> int:
    match = re.fullmatch(r"([1-9]\d{0,8})([smhd])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write 90m, 12h or 30d")
    return int(match[1]) * _SECONDS[match[2]]


def _positive(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,14}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _amount(text: str) -> int | None:
    if text == _NONE:
        return None
    match = re.fullmatch(r"(\d{1,15})([kMGT]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount; write 500000, 50M, 20G or none")
    return min(int(match[1]) * _MULTIPLES[match[2]], 2**62)


# The database


def _file(state_dir: Path) -> Path:
    """File of the database of `tinsmith up`."""
    return state_dir.expanduser().absolute() / "gateway" / "gateway.db"


def _work(url: str, work: Callable[[Keys], Awaitable[int]], *, makes: bool) -> int:
    """Runs `work` on the database and returns its result. `makes`: whether a missing SQLite file is made; if not, it
    raises UsageError. Raises UsageError for a database that cannot be used, and with the message of a ServiceError."""
    # Imported here, because the other commands need no database.
    from sqlalchemy.exc import SQLAlchemyError

    from gateway.database.outages import in_words
    from gateway.database.store import Store
    from gateway.database.urls import parse, without_secrets
    from gateway.metrics import Metrics
    from gateway.tenants.keys import Keys

    async def run(store: Store) -> int:
        try:
            await store.migrate()
            return await work(Keys(store))
        finally:
            await store.close()

    try:
        address = parse(url)
        store = Store(url, Metrics())
    except ValueError as error:
        raise UsageError(f"--database-url ({DATABASE_URL}): {error}") from None
    try:
        if address.get_backend_name() == "sqlite" and address.database:
            file = Path(address.database)
            if not makes and not file.exists():
                raise UsageError(f"there is no database {file}; `tinsmith up` and `tinsmith keys create` make one")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600)  # it holds the secrets with which the gateway signs
        return asyncio.run(run(store))
    except BrokenPipeError:
        raise  # from stdout
    except (OSError, SQLAlchemyError) as error:
        raise UsageError(f"the database {without_secrets(url)} cannot be used: {in_words(error)}") from error
    except ServiceError as error:
        raise UsageError(error.message) from None


def _run(arguments: argparse.Namespace, work: Callable[[Keys], Awaitable[int]], *, makes: bool = False) -> int:
    url = arguments.database_url or f"sqlite+aiosqlite:///{_file(arguments.state_dir)}"
    return _work(url, work, makes=makes)


def has_keys(state_dir: Path) -> bool:
    """Whether callers need a key because the database of `tinsmith up` has one, even if it is revoked. Raises
    UsageError."""
    url = os.environ.get(DATABASE_URL, "")
    if not url and not _file(state_dir).exists():
        return False
    found: list[StoredKey] = []

    async def work(keys: Keys) -> int:
        found.extend(await keys.all())
        return 0

    _work(url or f"sqlite+aiosqlite:///{_file(state_dir)}", work, makes=True)
    return bool(found)


# The actions


def _limits(arguments: argparse.Namespace) -> dict[str, int | None]:
    """The limits that were given on the command line."""
    names = {"tokens_budget": "tokens", "storage_quota": "storage_bytes"}
    return {column: getattr(arguments, name) for name, column in names.items() if hasattr(arguments, name)}


def _print_changes(owner: str, before: Mapping[str, int | None], now: Mapping[str, int | None]) -> None:
    """Prints the changes of an owner's limits, to stderr, because scripts read the key from stdout."""
    names = {"tokens": "token budget", "storage_bytes": "storage quota"}
    for column, limit in now.items():
        print(
            f"the {names[column]} of {owner}, for all keys of {owner}, was {_or_any(before[column])} and is now "
            f"{_or_any(limit)}",
            file=sys.stderr,
        )


def run_create(arguments: argparse.Namespace) -> int:
    async def work(keys: Keys) -> int:
        if limits := _limits(arguments):  # before the key, which is valid at once
            _print_changes(arguments.owner, await keys.set_budget(arguments.owner, limits), limits)
        key, _ = await keys.create(
            arguments.owner,
            name=arguments.name,
            note=arguments.note,
            email=arguments.email,
            admin=arguments.admin,
            expires_at=None if arguments.expires is None else time.time() + arguments.expires,
            requests_per_minute=arguments.requests_per_minute,
            tokens_per_minute=arguments.tokens_per_minute,
        )
        print(key)
        print("This is the only time that the key is shown. Clients set TINKER_API_KEY to it.", file=sys.stderr)
        return 0

    return _run(arguments, work, makes=True)


def run_revoke(arguments: argparse.Namespace) -> int:
    async def work(keys: Keys) -> int:
        row = await keys.revoke(arguments.key_id)
        print(f"key {arguments.key_id} of {row.owner} is revoked")
        return 0

    return _run(arguments, work)


def run_budget(arguments: argparse.Namespace) -> int:
    async def work(keys: Keys) -> int:
        if (limits := _limits(arguments)) or arguments.restart:
            before = await keys.set_budget(arguments.owner, limits, restart=arguments.restart)
            _print_changes(arguments.owner, before, limits)
        account = (await keys.accounts()).get(arguments.owner)
        if account is None:
            raise UsageError(f"{arguments.owner!r} has no key and no budget, and has used nothing")
        print(f"tokens  {account.tokens} of {_or_any(account.token_budget)}")
        print(f"storage {account.stored_bytes} of {_or_any(account.storage_quota)}, in bytes")
        return 0

    return _run(arguments, work)


def run_list(arguments: argparse.Namespace) -> int:
    from gateway.tenants.keys import id_of

    async def work(keys: Keys) -> int:
        rows, accounts = await keys.all(), await keys.accounts()
        used = {(count.owner, count.key_id): count.amount for count in await keys.token_counts()}
        listed = [_view(row, used.get((row.owner, id_of(row.key_hash)), 0)) for row in rows]
        owners = [
            {
                "owner": one.owner,
                "tokens": one.tokens,
                "token_budget": one.token_budget,
                "stored_bytes": one.stored_bytes,
                "storage_quota": one.storage_quota,
            }
            for one in accounts.values()
        ]
        if arguments.json:
            print(json.dumps({"keys": listed, "owners": owners}, indent=2))
            return 0
        print(_table(listed, ("id", "owner", "name", "state", "created", "last_used", "expires", "tokens")))
        if owners:
            print()
            print(_table(owners, ("owner", "tokens", "token_budget", "stored_bytes", "storage_quota")))
        return 0

    return _run(arguments, work)


def _view(row: StoredKey, tokens: int) -> dict[str, Any]:
    from gateway.tenants.keys import id_of, is_active

    state = "revoked" if row.revoked_at is not None else "valid" if is_active(row) else "expired"
    return {
        "id": id_of(row.key_hash),
        "owner": row.owner,
        "name": row.name,
        "state": state,
        "admin": row.admin,
        "created": _time(row.created_at),
        "last_used": _time(row.last_used_at),
        "expires": _time(row.expires_at),
        "revoked": _time(row.revoked_at),
        "requests_per_minute": row.requests_per_minute,
        "tokens_per_minute": row.tokens_per_minute,
        "tokens": tokens,
    }


def _time(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _or_any(limit: int | None) -> str:
    return "any number" if limit is None else str(limit)


def _table(rows: Iterable[dict[str, Any]], names: Sequence[str]) -> str:
    texts = [[name.replace("_", " ").upper() for name in names]]
    texts += [["-" if row[name] in (None, "") else str(row[name]) for name in names] for row in rows]
    return columns(texts)
