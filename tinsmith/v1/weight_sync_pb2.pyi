from tinsmith.v1 import sampler_pb2 as _sampler_pb2
from tinsmith.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ProbeWeightTransferRequest(_message.Message):
    __slots__ = ("trainer_id", "epoch", "socket")
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    trainer_id: str
    epoch: int
    socket: str
    def __init__(self, trainer_id: _Optional[str] = ..., epoch: _Optional[int] = ..., socket: _Optional[str] = ...) -> None: ...

class ProbeWeightTransferResponse(_message.Message):
    __slots__ = ("connected", "gpu_uuid")
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    connected: bool
    gpu_uuid: str
    def __init__(self, connected: _Optional[bool] = ..., gpu_uuid: _Optional[str] = ...) -> None: ...

class InitWeightTransferRequest(_message.Message):
    __slots__ = ("trainer_id", "epoch", "store_host", "store_port", "rank", "world_size", "backend", "ring")
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STORE_HOST_FIELD_NUMBER: _ClassVar[int]
    STORE_PORT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    RING_FIELD_NUMBER: _ClassVar[int]
    trainer_id: str
    epoch: int
    store_host: str
    store_port: int
    rank: int
    world_size: int
    backend: str
    ring: SharedRing
    def __init__(self, trainer_id: _Optional[str] = ..., epoch: _Optional[int] = ..., store_host: _Optional[str] = ..., store_port: _Optional[int] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., backend: _Optional[str] = ..., ring: _Optional[_Union[SharedRing, _Mapping]] = ...) -> None: ...

class SharedRing(_message.Message):
    __slots__ = ("num_slots", "slot_bytes", "cuda")
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CUDA_FIELD_NUMBER: _ClassVar[int]
    num_slots: int
    slot_bytes: int
    cuda: CudaIpcHandle
    def __init__(self, num_slots: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., cuda: _Optional[_Union[CudaIpcHandle, _Mapping]] = ...) -> None: ...

class CudaIpcHandle(_message.Message):
    __slots__ = ("gpu_uuid", "handle", "size_bytes", "offset_bytes", "ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required")
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    REF_COUNTER_HANDLE_FIELD_NUMBER: _ClassVar[int]
    REF_COUNTER_OFFSET_FIELD_NUMBER: _ClassVar[int]
    EVENT_HANDLE_FIELD_NUMBER: _ClassVar[int]
    EVENT_SYNC_REQUIRED_FIELD_NUMBER: _ClassVar[int]
    gpu_uuid: str
    handle: bytes
    size_bytes: int
    offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool
    def __init__(self, gpu_uuid: _Optional[str] = ..., handle: _Optional[bytes] = ..., size_bytes: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., ref_counter_handle: _Optional[bytes] = ..., ref_counter_offset: _Optional[int] = ..., event_handle: _Optional[bytes] = ..., event_sync_required: _Optional[bool] = ...) -> None: ...

class InitWeightTransferResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StartWeightUpdateRequest(_message.Message):
    __slots__ = ("trainer_id", "epoch", "version_id", "base_model", "lora_config", "tensors", "dtype", "bucket_bytes", "quantize")
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    LORA_CONFIG_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUANTIZE_FIELD_NUMBER: _ClassVar[int]
    trainer_id: str
    epoch: int
    version_id: str
    base_model: str
    lora_config: _types_pb2.LoraConfig
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    dtype: _types_pb2.Dtype
    bucket_bytes: int
    quantize: str
    def __init__(self, trainer_id: _Optional[str] = ..., epoch: _Optional[int] = ..., version_id: _Optional[str] = ..., base_model: _Optional[str] = ..., lora_config: _Optional[_Union[_types_pb2.LoraConfig, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., dtype: _Optional[_Union[_types_pb2.Dtype, str]] = ..., bucket_bytes: _Optional[int] = ..., quantize: _Optional[str] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class StartWeightUpdateResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("trainer_id", "version_id", "epoch")
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    trainer_id: str
    version_id: str
    epoch: int
    def __init__(self, trainer_id: _Optional[str] = ..., version_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class UpdateWeightsResponse(_message.Message):
    __slots__ = ("num_bytes",)
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    def __init__(self, num_bytes: _Optional[int] = ...) -> None: ...

class FinishWeightUpdateRequest(_message.Message):
    __slots__ = ("trainer_id", "version_id", "checksum", "epoch")
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    trainer_id: str
    version_id: str
    checksum: str
    epoch: int
    def __init__(self, trainer_id: _Optional[str] = ..., version_id: _Optional[str] = ..., checksum: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class FinishWeightUpdateResponse(_message.Message):
    __slots__ = ("version_id",)
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    version_id: str
    def __init__(self, version_id: _Optional[str] = ...) -> None: ...

class SampleOnProbationRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: _sampler_pb2.SampleRequest
    def __init__(self, request: _Optional[_Union[_sampler_pb2.SampleRequest, _Mapping]] = ...) -> None: ...

class SampleOnProbationResponse(_message.Message):
    __slots__ = ("response",)
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    response: _sampler_pb2.SampleResponse
    def __init__(self, response: _Optional[_Union[_sampler_pb2.SampleResponse, _Mapping]] = ...) -> None: ...

class ConfirmVersionRequest(_message.Message):
    __slots__ = ("version_id",)
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    version_id: str
    def __init__(self, version_id: _Optional[str] = ...) -> None: ...

class ConfirmVersionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RemoveVersionRequest(_message.Message):
    __slots__ = ("version_id",)
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    version_id: str
    def __init__(self, version_id: _Optional[str] = ...) -> None: ...

class RemoveVersionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
