import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JournalState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOURNAL_STATE_UNSPECIFIED: _ClassVar[JournalState]
    JOURNAL_STATE_LIVE: _ClassVar[JournalState]
    JOURNAL_STATE_LOST: _ClassVar[JournalState]
    JOURNAL_STATE_FAILED: _ClassVar[JournalState]
    JOURNAL_STATE_MOVED: _ClassVar[JournalState]
JOURNAL_STATE_UNSPECIFIED: JournalState
JOURNAL_STATE_LIVE: JournalState
JOURNAL_STATE_LOST: JournalState
JOURNAL_STATE_FAILED: JournalState
JOURNAL_STATE_MOVED: JournalState

class ListJournalRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListJournalResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[JournalModel]
    def __init__(self, models: _Optional[_Iterable[_Union[JournalModel, _Mapping]]] = ...) -> None: ...

class JournalModel(_message.Message):
    __slots__ = ("model_id", "state", "reason", "created_at", "snapshot_seq_id", "snapshot_at", "snapshot_bytes", "cut_seq_id", "num_accepted", "num_done", "num_failed", "request_bytes", "result_bytes")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_AT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CUT_SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_DONE_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESULT_BYTES_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    state: JournalState
    reason: str
    created_at: _timestamp_pb2.Timestamp
    snapshot_seq_id: int
    snapshot_at: _timestamp_pb2.Timestamp
    snapshot_bytes: int
    cut_seq_id: int
    num_accepted: int
    num_done: int
    num_failed: int
    request_bytes: int
    result_bytes: int
    def __init__(self, model_id: _Optional[str] = ..., state: _Optional[_Union[JournalState, str]] = ..., reason: _Optional[str] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., snapshot_seq_id: _Optional[int] = ..., snapshot_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., snapshot_bytes: _Optional[int] = ..., cut_seq_id: _Optional[int] = ..., num_accepted: _Optional[int] = ..., num_done: _Optional[int] = ..., num_failed: _Optional[int] = ..., request_bytes: _Optional[int] = ..., result_bytes: _Optional[int] = ...) -> None: ...

class PruneJournalRequest(_message.Message):
    __slots__ = ("dry_run",)
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    dry_run: bool
    def __init__(self, dry_run: _Optional[bool] = ...) -> None: ...

class PruneJournalResponse(_message.Message):
    __slots__ = ("num_results", "num_bodies", "model_ids", "num_bytes")
    NUM_RESULTS_FIELD_NUMBER: _ClassVar[int]
    NUM_BODIES_FIELD_NUMBER: _ClassVar[int]
    MODEL_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_results: int
    num_bodies: int
    model_ids: _containers.RepeatedScalarFieldContainer[str]
    num_bytes: int
    def __init__(self, num_results: _Optional[int] = ..., num_bodies: _Optional[int] = ..., model_ids: _Optional[_Iterable[str]] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class ReleaseModelRequest(_message.Message):
    __slots__ = ("model_id", "move_id", "trainer_id")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    MOVE_ID_FIELD_NUMBER: _ClassVar[int]
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    move_id: str
    trainer_id: str
    def __init__(self, model_id: _Optional[str] = ..., move_id: _Optional[str] = ..., trainer_id: _Optional[str] = ...) -> None: ...

class ReleaseModelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdoptModelRequest(_message.Message):
    __slots__ = ("model_id", "move_id", "fenced_trainer_id")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    MOVE_ID_FIELD_NUMBER: _ClassVar[int]
    FENCED_TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    move_id: str
    fenced_trainer_id: str
    def __init__(self, model_id: _Optional[str] = ..., move_id: _Optional[str] = ..., fenced_trainer_id: _Optional[str] = ...) -> None: ...

class AdoptModelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FenceTrainerRequest(_message.Message):
    __slots__ = ("trainer_id",)
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    trainer_id: str
    def __init__(self, trainer_id: _Optional[str] = ...) -> None: ...

class FenceTrainerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ForgetMoveRequest(_message.Message):
    __slots__ = ("model_id", "move_id")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    MOVE_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    move_id: str
    def __init__(self, model_id: _Optional[str] = ..., move_id: _Optional[str] = ...) -> None: ...

class ForgetMoveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
