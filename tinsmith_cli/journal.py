"""`tinsmith journal`: shows the journal of a running or stopped trainer, and deletes entries that are not needed."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinsmith.formatting import duration_text, size_text
from tinsmith.rpc.times import seconds_of
from tinsmith.rpc.words import word_of
from tinsmith.v1 import trainer_admin_pb2 as pb
from tinsmith_cli.base_models import UsageError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from trainer_service.durability.stopped import OfTrainer

_TIMEOUT_S = 60.0


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "journal", help="operations that a trainer has accepted, and the state from which a crash would restore them"
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    showing = actions.add_parser(
        "show",
        help="show models, snapshots, operations, bytes",
        description="Lists the models in a trainer's journal, with the snapshot from which each would be restored.",
    )
    _add_arguments(showing)
    showing.set_defaults(run=run_show)
    pruning = actions.add_parser(
        "prune",
        help="delete what is not needed",
        description="Deletes results and ended models that have expired, and requests that the newest snapshot covers. "
        "After that a model can only be restored from its newest snapshot, and is lost if that one is damaged. Without "
        "--yes, the command only shows what it would delete. The trainer does this by itself once the journal reaches "
        "journal_max_bytes.",
    )
    _add_arguments(pruning)
    pruning.add_argument("--yes", action="store_true", help="really delete")
    pruning.add_argument(
        "--expired-after", type=_age, default=3600.0, metavar="SECONDS",
        help="age at which a result, or the reason for a model's loss, expires; a running trainer uses its own setting "
        "(default: 3600)",
    )  # fmt: skip
    pruning.add_argument(
        "--model", metavar="MODEL_ID",
        help="delete only this model, with everything that was accepted for it, from the journal of a stopped trainer",
    )  # fmt: skip
    pruning.set_defaults(run=run_prune)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--trainer", metavar="ADDRESS", help="gRPC address of a running trainer, such as 127.0.0.1:8001")
    where.add_argument(
        "--state-dir", type=Path, default=Path("~/.tinsmith"), metavar="FOLDER",
        help="folder of a stopped trainer, or of `tinsmith up` (default: ~/.tinsmith)",
    )  # fmt: skip
    where.add_argument(
        "--journal", nargs="?", const=os.environ.get("TRAINER_JOURNAL", ""), metavar="URL",
        help="the journals of stopped trainers in a PostgreSQL database, postgresql://USER:PASSWORD@HOST/NAME; without "
        "URL, that of TRAINER_JOURNAL in the environment, which keeps it out of `ps`",
    )  # fmt: skip
    parser.add_argument(
        "--name", metavar="NAME", help="with --journal: only the trainer of this name (default: all in the database)"
    )
    parser.add_argument(
        "--api-key", default=os.environ.get("TRAINER_SERVICE_KEY", ""),
        help="key for a running trainer: the service key, or one with \"admin\": true (default: TRAINER_SERVICE_KEY). "
        "`tinsmith up` makes a service key of its own, which it does not show",
    )  # fmt: skip
    for name, what in (("ca", "authority"), ("cert", "certificate"), ("key", "private key")):
        parser.add_argument(f"--grpc-{name}", type=Path, metavar="FILE", help=f"{what} (PEM), if the trainer uses TLS")


def run_show(arguments: argparse.Namespace) -> int:
    if arguments.trainer:
        _print_models(arguments.trainer, _call(arguments, "ListJournal", pb.ListJournalRequest()).models)
        return 0
    from trainer_service.durability import stopped  # for a stopped trainer only

    for path in _journals(arguments):
        with _opening():
            models = stopped.summaries(path)
        _print_models(str(path), [model.to_proto() for model in models])
    return 0


def _age(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not an age in seconds")
    return value


def run_prune(arguments: argparse.Namespace) -> int:
    if arguments.model is not None:
        return _delete_model(arguments)
    if arguments.trainer:
        request = pb.PruneJournalRequest(dry_run=not arguments.yes)
        _print_pruned(arguments.trainer, _call(arguments, "PruneJournal", request), done=arguments.yes)
        return 0
    from trainer_service.durability import stopped  # for a stopped trainer only

    for path in _journals(arguments):
        expired_before = time.time() - arguments.expired_after
        with _opening():
            pruned = stopped.prune(path, expired_before=expired_before, dry_run=not arguments.yes)
        _print_pruned(str(path), pb.PruneJournalResponse(**asdict(pruned)), done=arguments.yes)
    return 0


def _delete_model(arguments: argparse.Namespace) -> int:
    """Deletes a model from the journals of stopped trainers, such as a model whose operations kill the trainer whenever
    they run. The trainer deletes the model's snapshots at its next start."""
    if arguments.trainer:
        raise UsageError("--model: a running trainer deletes a model when its session ends; stop the trainer first")
    from trainer_service.durability import stopped  # for a stopped trainer only

    num_found = 0
    for path in _journals(arguments):
        with _opening():
            is_found = stopped.delete_model(path, arguments.model, dry_run=not arguments.yes)
        if is_found:
            num_found += 1
            print(f"{path}: {'deleted' if arguments.yes else 'would delete'} {arguments.model}")
    if not num_found:
        where = arguments.state_dir if arguments.journal is None else "the database"
        raise UsageError(f"--model: no journal in {where} has a model {arguments.model!r}")
    if not arguments.yes:
        print("nothing was changed; --yes does it")
    return 0


def _print_models(where: str, models: Sequence[pb.JournalModel]) -> None:
    print(f"{where}: {len(models)} models, {size_text(sum(one.request_bytes + one.result_bytes for one in models))}")
    for one in models:
        state = word_of(pb.JournalState, one.state)
        print(
            f"{one.model_id}  {state}, {_snapshot(one)}; {one.num_accepted} accepted, {one.num_done} done, "
            f"{one.num_failed} failed; requests {size_text(one.request_bytes)}, results {size_text(one.result_bytes)}"
        )
        if one.reason:
            print(f"    {one.reason}")


def _snapshot(model: pb.JournalModel) -> str:
    if not model.HasField("snapshot_seq_id"):
        if model.cut_seq_id >= 0:
            return (
                f"no snapshot, and requests up to seq_id {model.cut_seq_id} are deleted: a crash would lose the model"
            )
        return "no snapshot, all requests are kept"
    age_s = max(0.0, time.time() - seconds_of(model.snapshot_at))
    return (
        f"snapshot after seq_id {model.snapshot_seq_id}, {duration_text(age_s)} old, {size_text(model.snapshot_bytes)}"
    )


def _print_pruned(where: str, pruned: pb.PruneJournalResponse, *, done: bool) -> None:
    verb = "deleted" if done else "would delete"
    print(
        f"{where}: {verb} {size_text(pruned.num_bytes)}: {pruned.num_results} expired results, {pruned.num_bodies} "
        f"requests behind snapshots or of ended models, {len(pruned.model_ids)} ended models"
    )
    if pruned.num_bodies:
        print(
            "    without these requests, a model can only be restored from its newest snapshot, not from an older one"
        )
    for model_id in pruned.model_ids:
        print(f"    {model_id}")
    if not done:
        print("nothing was changed; --yes does it")


def _journals(arguments: argparse.Namespace) -> Sequence[Path | OfTrainer]:
    from trainer_service.durability import stopped

    if arguments.journal is not None:
        return _journals_in(arguments.journal, arguments.name)
    if arguments.name is not None:
        raise UsageError("--name: it names a trainer in a PostgreSQL database, so --journal must be given, too")
    folder = arguments.state_dir.expanduser()
    found = stopped.find(folder)
    if not found:
        raise UsageError(f"--state-dir: {folder} holds no journal.sqlite, nor trainers/*/journal.sqlite")
    return found


def _journals_in(url: str, name: str | None) -> Sequence[OfTrainer]:
    from tinsmith.rpc.postgres import check_url
    from trainer_service.durability import stopped

    if not url:
        raise UsageError("--journal: no URL is given, and TRAINER_JOURNAL is not set")
    try:
        check_url(url)
    except ValueError as error:
        raise UsageError(f"--journal: the URL {error}") from None
    with _opening():
        found = stopped.find_in(url)
    if name is not None and name not in [one.trainer for one in found]:
        raise UsageError(f"--name: no trainer {name!r} is in the database; it has {[one.trainer for one in found]}")
    if not found:
        raise UsageError("--journal: no trainer has a journal in this database")
    return [one for one in found if name in (None, one.trainer)]


@contextlib.contextmanager
def _opening() -> Iterator[None]:
    try:
        yield
    except SystemExit as error:
        stop = "" if str(error).endswith("?") else "."
        raise UsageError(f"{error}{stop} For a running trainer use --trainer ADDRESS.") from None


def _call(arguments: argparse.Namespace, rpc: str, request: Any) -> Any:
    import grpc.aio  # not needed by the other commands

    from tinsmith.rpc.channel import connect
    from tinsmith.rpc.errors import from_rpc_error
    from tinsmith.rpc.tls import Certificates
    from tinsmith.v1.trainer_admin_pb2_grpc import TrainerAdminServiceStub

    async def call() -> Any:
        try:
            files = Certificates.given(ca=arguments.grpc_ca, cert=arguments.grpc_cert, key=arguments.grpc_key)
        except ValueError as error:
            raise UsageError(str(error)) from None
        channel = connect(arguments.trainer, api_key=arguments.api_key, certificates=files)
        stub: Any = TrainerAdminServiceStub(channel)
        method: Callable[..., Any] = getattr(stub, rpc)
        try:
            return await method(request, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise UsageError(f"the trainer at {arguments.trainer}: {from_rpc_error(error).message}") from None
        finally:
            await channel.close()

    return asyncio.run(call())
