"""Syntax of tinker:// paths, of the ids and names in them, and of version ids."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tinsmith.errors import InvalidRequest

SCHEME = "tinker://"
KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""Maps each kind, the second segment of a path, to the checkpoint_type of the public API."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SAVE = re.compile(r"([0-9]{1,18})(?:\.([0-9a-f]+|(?=\.)))?(?:\.[0-9a-f]+)?")
"""Text after the "@" of the version id of a save: seq_id, creation id and save id. The creation id is empty for a run
that an earlier release created."""
_RUN_ID = re.compile(r"[A-Za-z0-9._-]+(:[A-Za-z0-9._-]+)*")


def check_name(name: str, *, field: str) -> str:
    """Raises InvalidRequest for a checkpoint name that could leave its folder or would need quoting in a URL."""
    if not _NAME.fullmatch(name) or set(name) <= {"."}:
        raise InvalidRequest(
            f"{field}: {name!r} is not a checkpoint name; use 1 to 128 of A-Z a-z 0-9 . _ - (and not only dots)",
            field=field,
        )
    return name


def check_run_id(run_id: str, *, field: str) -> str:
    """Raises InvalidRequest for a training run id that could not be a folder name."""
    if not _RUN_ID.fullmatch(run_id) or len(run_id) > 200 or any(set(part) <= {"."} for part in run_id.split(":")):
        raise InvalidRequest(
            f"{field}: {run_id!r} is not a training run id, which is 1 to 200 of A-Z a-z 0-9 . _ - in parts that are "
            "joined by ':' (and no part only dots), such as 5f0c:train:0",
            field=field,
        )
    return run_id


RETIRED = "retired"
"""Name of the folder for files that outlive their checkpoint. The folder lies among those of the runs, so no model may
have this id."""


def check_model_id(model_id: str, *, field: str) -> str:
    """Raises InvalidRequest for an id that is not a run id, or that is the name of the folder RETIRED."""
    if model_id == RETIRED:
        raise InvalidRequest(f"{field}: {model_id!r} is kept for files without a run", field=field)
    return check_run_id(model_id, field=field)


def version_of(run_id: str, seq_id: int, creation_id: str, save_id: str = "") -> str:
    """The version id of a save. The creation id distinguishes runs that had the same run id one after the other. The
    save id distinguishes two saves of a run at the same seq_id, such as before and after the run's journal was restored
    from a backup. Both are empty for saves of an earlier release of Tinsmith."""
    if save_id:
        return f"{run_id}@{seq_id}.{creation_id}.{save_id}"
    return f"{run_id}@{seq_id}.{creation_id}" if creation_id else f"{run_id}@{seq_id}"


def version_number(version_id: str, *, run_id: str, field: str) -> int:
    """The seq_id in the version id of a run; later saves have larger ones. -1 for the base model, whose version id is
    empty.

    Raises InvalidRequest, naming `field`, if `version_id` is not a version of this run.
    """
    if not version_id:
        return -1
    run, _, save = version_id.rpartition("@")
    match = _SAVE.fullmatch(save)
    if run != run_id or match is None:
        raise InvalidRequest(
            f"{field}: {version_id!r} is not a version of run {run_id!r}, RUN_ID@SEQ_ID.CREATION.SAVE", field=field
        )
    return int(match[1])


def creation_of(version_id: str) -> str:
    """The creation id in a version id; empty if it has none."""
    match = _SAVE.fullmatch(version_id.rpartition("@")[2])
    return "" if match is None else match[2] or ""


def is_newer(version_id: str, than: str, *, run_id: str) -> bool:
    """Whether `version_id` is newer than `than`, both versions of the run `run_id`. The base model is older than all
    versions. Neither of two versions with different creation ids is newer. Raises InvalidRequest for a version of
    another run."""
    one, other = (version_number(each, run_id=run_id, field="version_id") for each in (version_id, than))
    return one > other and (not than or creation_of(version_id) == creation_of(than))


def run_of(version_id: str) -> str:
    """The run id in a version id "RUN_ID@...". Empty for a text of any other form, and for the base model, whose
    version id is empty."""
    return version_id.rpartition("@")[0]


@dataclass(frozen=True, slots=True)
class TinkerPath:
    """tinker://{run_id}/{kind}/{name}"""

    run_id: str
    kind: str
    name: str

    @classmethod
    def parse(cls, path: str, *, field: str) -> TinkerPath:
        """The path of a text. Raises InvalidRequest, naming `field`, unless the text has exactly three safe segments
        and a known kind."""
        segments = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(segments) != 3:
            raise InvalidRequest(f"{field}: {path!r} is not of the form tinker://RUN_ID/KIND/NAME", field=field)
        run_id, kind, name = segments
        if kind not in KINDS:
            raise InvalidRequest(f"{field}: kind {kind!r} of {path!r} is not one of {', '.join(KINDS)}", field=field)
        return cls(check_run_id(run_id, field=field), kind, check_name(name, field=field))

    @property
    def location(self) -> str:
        """The checkpoint's folder, relative to the checkpoint root."""
        return f"{self.run_id}/{self.kind}/{self.name}"

    def __str__(self) -> str:
        return f"{SCHEME}{self.location}"


def check_checkpoint_root(root: str) -> str:
    """Returns `root`. Raises ValueError unless it is a path or the URL of a supported object store."""
    protocol, separator, rest = root.partition("://")
    is_url = separator or root.startswith(("s3:", "gs:"))  # such as s3:/BUCKET, which lacks a slash
    if is_url and (protocol not in ("s3", "gs") or not rest.strip("/")):
        raise ValueError(f"{root!r} is neither a path, nor s3://BUCKET/PREFIX, nor gs://BUCKET/PREFIX")
    return root
