from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BaseModel(_message.Message):
    __slots__ = ("source", "names", "digest")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    source: str
    names: _containers.RepeatedScalarFieldContainer[str]
    digest: str
    def __init__(self, source: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ..., digest: _Optional[str] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("version", "member_id", "roles", "host", "signing_request", "base_models", "settings", "trainer_nodes", "ranks_port", "replace")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    SIGNING_REQUEST_FIELD_NUMBER: _ClassVar[int]
    BASE_MODELS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    TRAINER_NODES_FIELD_NUMBER: _ClassVar[int]
    RANKS_PORT_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    version: str
    member_id: str
    roles: _containers.RepeatedScalarFieldContainer[str]
    host: str
    signing_request: bytes
    base_models: _containers.RepeatedCompositeFieldContainer[BaseModel]
    settings: _containers.ScalarMap[str, str]
    trainer_nodes: int
    ranks_port: int
    replace: bool
    def __init__(self, version: _Optional[str] = ..., member_id: _Optional[str] = ..., roles: _Optional[_Iterable[str]] = ..., host: _Optional[str] = ..., signing_request: _Optional[bytes] = ..., base_models: _Optional[_Iterable[_Union[BaseModel, _Mapping]]] = ..., settings: _Optional[_Mapping[str, str]] = ..., trainer_nodes: _Optional[int] = ..., ranks_port: _Optional[int] = ..., replace: _Optional[bool] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("ca", "certificate", "base_models", "settings", "trainer_nodes")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CA_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    BASE_MODELS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    TRAINER_NODES_FIELD_NUMBER: _ClassVar[int]
    ca: bytes
    certificate: bytes
    base_models: _containers.RepeatedCompositeFieldContainer[BaseModel]
    settings: _containers.ScalarMap[str, str]
    trainer_nodes: _containers.RepeatedCompositeFieldContainer[TrainerNode]
    def __init__(self, ca: _Optional[bytes] = ..., certificate: _Optional[bytes] = ..., base_models: _Optional[_Iterable[_Union[BaseModel, _Mapping]]] = ..., settings: _Optional[_Mapping[str, str]] = ..., trainer_nodes: _Optional[_Iterable[_Union[TrainerNode, _Mapping]]] = ...) -> None: ...

class TrainerNode(_message.Message):
    __slots__ = ("rank", "master_host", "master_port")
    RANK_FIELD_NUMBER: _ClassVar[int]
    MASTER_HOST_FIELD_NUMBER: _ClassVar[int]
    MASTER_PORT_FIELD_NUMBER: _ClassVar[int]
    rank: int
    master_host: str
    master_port: int
    def __init__(self, rank: _Optional[int] = ..., master_host: _Optional[str] = ..., master_port: _Optional[int] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("member_id", "trainers", "samplers")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    TRAINERS_FIELD_NUMBER: _ClassVar[int]
    SAMPLERS_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    trainers: _containers.RepeatedScalarFieldContainer[str]
    samplers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, member_id: _Optional[str] = ..., trainers: _Optional[_Iterable[str]] = ..., samplers: _Optional[_Iterable[str]] = ...) -> None: ...

class FollowResponse(_message.Message):
    __slots__ = ("trainers", "samplers")
    TRAINERS_FIELD_NUMBER: _ClassVar[int]
    SAMPLERS_FIELD_NUMBER: _ClassVar[int]
    trainers: _containers.RepeatedScalarFieldContainer[str]
    samplers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, trainers: _Optional[_Iterable[str]] = ..., samplers: _Optional[_Iterable[str]] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("member_id", "gives_up_trainers")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    GIVES_UP_TRAINERS_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    gives_up_trainers: bool
    def __init__(self, member_id: _Optional[str] = ..., gives_up_trainers: _Optional[bool] = ...) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
