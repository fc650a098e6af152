"""The first machine's records about the machines of a deployment: their services, and the trainers of each base model.

The records are kept in a file, so that a restarted first machine knows them at once.
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
    """The addresses of one machine's services."""

    trainers: Sequence[str] = ()
    samplers: Sequence[str] = ()


@dataclass(slots=True)
class TrainerMachines:
    """The machines of one trainer of a base model. The first one serves, and is the host of the ranks' rendezvous."""

    nodes: int
    """Number of machines that the trainer needs."""
    ranks_port: int
    """Port of the ranks' rendezvous."""
    members: list[str] = field(default_factory=list)
    """Ids of the machines, in the order of their ranks; at most `nodes`. "" for a place that was given up."""
    hosts: list[str] = field(default_factory=list)
    """Addresses of the machines, in the same order."""

    @property
    def has_free_place(self) -> bool:
        return len(self.members) < self.nodes or "" in self.members


class Members:
    """The records about all machines."""

    def __init__(self, path: Path) -> None:
        """Reads the file, if it exists. Raises ValueError for a file that cannot be used."""
        self._path = path
        self.members: dict[str, Member] = {}
        self.trainers: dict[str, TrainerMachines] = {}
        """All trainers. The key of the first trainer of a base model is the model's main name. Keys of further trainers
        have a number, too, such as "qwen 2"."""
        if not path.exists():
            return
        try:
            found = json.loads(path.read_text())
            self.members = {id_: Member(**each) for id_, each in found["members"].items()}
            self.trainers = {name: TrainerMachines(**each) for name, each in found["trainers"].items()}
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
    ) -> tuple[int, TrainerMachines]:
        """Gives a machine a place in a trainer of a base model: the place that it had, else a free one, else the first
        place of a further trainer. With `replace`, a machine without a place gets the first place of a new trainer that
        replaces the only one. Returns the rank and the trainer.

        Raises InvalidRequest if `nodes` differs from that of the trainer with a free place, and for `replace` if there
        are several trainers.
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
            self.trainers[slot] = TrainerMachines(nodes, ranks_port)
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
            trainer = self.trainers[slot] = TrainerMachines(nodes, ranks_port, [member_id], [host])
        rank = trainer.members.index(member_id)
        trainer.hosts[rank] = host
        if rank == 0:
            trainer.ranks_port = ranks_port
        self.save()
        return rank, trainer

    def list_services(
        self, member_id: str, *, trainers: Sequence[str], samplers: Sequence[str], has_place: bool
    ) -> None:
        """Records the services of a machine. `has_place`: whether the machine runs trainers. Raises FailedPrecondition
        if the machine's place in a trainer was given to another machine."""
        if has_place and not any(member_id in trainer.members for trainer in self.trainers.values()):
            raise FailedPrecondition("another machine has taken this one's place as a trainer")
        self.members[member_id] = Member(tuple(trainers), tuple(samplers))
        self.save()

    def leave(self, member_id: str, *, gives_up_trainers: bool) -> None:
        """Removes the services of a machine: its samplers, and with `gives_up_trainers` also its trainers."""
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
        """Removes a trainer, and the addresses of trainers on its machines."""
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
