"""Locations of checkpoints: "<training run>/<kind>/<name>" below the storage's root."""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith.errors import InvalidRequest
from tinsmith.rpc.paths import check_name, check_run_id
from tinsmith.v1 import types_pb2 as pb

KINDS = {
    pb.CHECKPOINT_KIND_TRAINING: "weights",
    pb.CHECKPOINT_KIND_SAMPLER: "sampler_weights",
    pb.CHECKPOINT_KIND_EPHEMERAL: "ephemeral",
    pb.CHECKPOINT_KIND_EXTERNAL: "external_weights",
}


@dataclass(frozen=True, slots=True)
class Location:
    """A checkpoint's place below the storage's root."""

    run_id: str
    kind: str
    name: str

    @classmethod
    def parse(cls, text: str, *, field: str) -> Location:
        """Raises InvalidRequest unless the text is RUN_ID/KIND/NAME with a known kind and safe names."""
        segments = text.split("/")
        if len(segments) != 3:
            raise InvalidRequest(f"{field}: {text!r} is not of the form RUN_ID/KIND/NAME", field=field)
        run_id, kind, name = segments
        if kind not in KINDS.values():
            raise InvalidRequest(
                f"{field}: kind {kind!r} of {text!r} is not one of {', '.join(KINDS.values())}", field=field
            )
        return cls(check_run_id(run_id, field=field), kind, check_name(name, field=field))

    def __str__(self) -> str:
        return f"{self.run_id}/{self.kind}/{self.name}"

    @property
    def kind_number(self) -> pb.CheckpointKind:
        return next(number for number, name in KINDS.items() if name == self.kind)
