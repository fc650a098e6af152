"""The machines of a deployment, as the first one knows them: which services they run, and which trainers each base
model has.

They are kept in a file, so that a first machine that was restarted knows them at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, count
from pathlib import Path

from tinsmith.errors import FailedPrecondition, InvalidRequest
from tinsmith.rpc.addresses import Addresses


@dataclass(slots=True)
class Member:
    """The services of one machine that others call."""

    trainers: Sequence[str] = ()
    samplers: Sequence[str] = ()


@dataclass(slots=True)
class Trainer:
    """The machines of a base model's trainer. The first one serves, and the ranks meet there."""

    nodes: int
    """Number of machines."""
    ranks_port: int
    members: list[str] = field(default_factory=list)
    """Ids, in the order of their ranks; at most `nodes`. Empty for a place that was given up."""
    hosts: list[str] = field(default_factory=list)

    @property
    def has_free_place(self) -> bool:
        return len(self.members) < self.nodes or "" in self.members


class Members:
    def __init__(self, path: Path) -> None:
        """Reads the file, if it exists. Raises ValueError for one that cannot be used."""
        self._path = path
        self.members: dict[str, Member] = {}
        self.trainers: dict[str, Trainer] = {}
        """The first trainer of a base model by the model's principal name, further ones by that name and a number,
        such as "qwen 2"."""
        if not path.exists():
            return
        try:
            found = json.loads(path.read_text())
            self.members = {id_: Member(**each) for id_, each in found["members"].items()}
            self.trainers = {name: Trainer(**each) for name, each in found["trainers"].items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} cannot be used ({error}); remove it, and have all machines join again") from None

    @property
    def addresses(self) -> Addresses:
        members = self.members.values()
        return Addresses(
            tuple(dict.fromkeys(address for member in members for address in member.trainers)),
            tuple(dict.fromkeys(address for member in members for address in member.samplers)),
        )

    def take_place(
        self, base_model: str, member_id: str, *, host: str, nodes: int, ranks_port: int, replace: bool
    ) -> tuple[int, Trainer]:
        """Gives a machine its place in a trainer of a base model: the one that it had, else a free one, else the first
        place of a further trainer. `replace`: that of the only trainer instead. Returns the rank and the trainer.

        Raises InvalidRequest for another number of machines than that of a trainer with a free place, and when it is
        not clear which trainer to replace.
        """
        own = self._slots(base_model)
        slot = next((slot for slot in own if member_id in self.trainers[slot].members), None)
        if slot is None and replace and own:
            if len(own) > 1:
                hosts = "; ".join(", ".join(self.trainers[each].hosts) for each in own)
                raise InvalidRequest(
                    f"--replace: {base_model} has several trainers, on {hosts}. Leave --replace out: this machine then "
                    "runs a further one",
                    field="replace",
                )
            self._end(own[0])
            own = []
        if slot is None:
            slot = next((each for each in own if self.trainers[each].has_free_place), None)
        if slot is None:
            slots = chain([base_model], (f"{base_model} {number}" for number in count(2)))
            slot = next(each for each in slots if each not in self.trainers)
            self.trainers[slot] = Trainer(nodes, ranks_port)
        trainer = self.trainers[slot]
        if member_id not in trainer.members:
            if nodes != trainer.nodes:
                raise InvalidRequest(
                    f"--trainer-nodes: {nodes} here, and {trainer.nodes} on the first machine of the trainer of "
                    f"{base_model}, {trainer.hosts[0]}",
                    field="trainer_nodes",
                )
            if "" not in trainer.members:
                trainer.members.append("")
                trainer.hosts.append("")
            trainer.members[trainer.members.index("")] = member_id
        elif nodes != trainer.nodes:
            self._end(slot)
            trainer = self.trainers[slot] = Trainer(nodes, ranks_port, [member_id], [host])
        rank = trainer.members.index(member_id)
        trainer.hosts[rank] = host
        if rank == 0:
            trainer.ranks_port = ranks_port
        self.save()
        return rank, trainer

    def list_services(
        self, member_id: str, *, trainers: Sequence[str], samplers: Sequence[str], has_place: bool
    ) -> None:
        """Lists the services of a machine. `has_place`: the machine runs trainers. Raises FailedPrecondition when its
        places in them were given to another."""
        if has_place and not any(member_id in trainer.members for trainer in self.trainers.values()):
            raise FailedPrecondition("another machine has taken this one's place as a trainer")
        self.members[member_id] = Member(tuple(trainers), tuple(samplers))
        self.save()

    def leave(self, member_id: str, *, gives_up_trainers: bool) -> None:
        """Takes the services of a machine out of the list: its samplers, and also its trainers if it gives them up."""
        if gives_up_trainers:
            self.members.pop(member_id, None)
            for name, trainer in list(self.trainers.items()):
                trainer.members = ["" if each == member_id else each for each in trainer.members]
                if not any(trainer.members):
                    del self.trainers[name]
        elif (member := self.members.get(member_id)) is not None:
            member.samplers = ()
        self.save()

    def _slots(self, base_model: str) -> list[str]:
        """Keys of the base model's trainers."""
        return [slot for slot in self.trainers if re.fullmatch(rf"{re.escape(base_model)}( \d+)?", slot)]

    def _end(self, slot: str) -> None:
        """Ends a trainer: calls go to its machines no more."""
        for member_id in self.trainers.pop(slot).members:
            if member_id in self.members:
                self.members[member_id].trainers = ()

    def save(self) -> None:
        found = {
            "members": {id_: asdict(member) for id_, member in self.members.items()},
            "trainers": {name: asdict(trainer) for name, trainer in self.trainers.items()},
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(found, indent=1) + "\n")
        new.replace(self._path)
