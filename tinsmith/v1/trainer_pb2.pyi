import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from tinsmith.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetTrainerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTrainerInfoResponse(_message.Message):
    __slots__ = ("base_models", "max_context_length", "max_lora_rank", "vocab_size", "architecture", "loss_fns", "device", "boot_id", "optimizers", "full_training", "trainable", "trainable_groups", "refused_groups", "base_weights", "num_threads", "micro_batch_tokens", "tokens_per_second", "one_by_one", "picture_counting", "trainer_id", "store_id", "fingerprint", "reserved_bytes", "reservable_bytes", "num_models", "queued_time", "version_homes")
    class FingerprintEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    BASE_MODELS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_LORA_RANK_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    LOSS_FNS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZERS_FIELD_NUMBER: _ClassVar[int]
    FULL_TRAINING_FIELD_NUMBER: _ClassVar[int]
    TRAINABLE_FIELD_NUMBER: _ClassVar[int]
    TRAINABLE_GROUPS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_GROUPS_FIELD_NUMBER: _ClassVar[int]
    BASE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    ONE_BY_ONE_FIELD_NUMBER: _ClassVar[int]
    PICTURE_COUNTING_FIELD_NUMBER: _ClassVar[int]
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_MODELS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TIME_FIELD_NUMBER: _ClassVar[int]
    VERSION_HOMES_FIELD_NUMBER: _ClassVar[int]
    base_models: _containers.RepeatedScalarFieldContainer[str]
    max_context_length: int
    max_lora_rank: int
    vocab_size: int
    architecture: str
    loss_fns: _containers.RepeatedScalarFieldContainer[str]
    device: str
    boot_id: str
    optimizers: _containers.RepeatedScalarFieldContainer[_types_pb2.Optimizer]
    full_training: bool
    trainable: bool
    trainable_groups: _containers.RepeatedScalarFieldContainer[_types_pb2.AdapterGroup]
    refused_groups: _containers.RepeatedCompositeFieldContainer[RefusedGroup]
    base_weights: str
    num_threads: int
    micro_batch_tokens: int
    tokens_per_second: float
    one_by_one: str
    picture_counting: PictureCounting
    trainer_id: str
    store_id: str
    fingerprint: _containers.ScalarMap[str, str]
    reserved_bytes: int
    reservable_bytes: int
    num_models: int
    queued_time: _duration_pb2.Duration
    version_homes: int
    def __init__(self, base_models: _Optional[_Iterable[str]] = ..., max_context_length: _Optional[int] = ..., max_lora_rank: _Optional[int] = ..., vocab_size: _Optional[int] = ..., architecture: _Optional[str] = ..., loss_fns: _Optional[_Iterable[str]] = ..., device: _Optional[str] = ..., boot_id: _Optional[str] = ..., optimizers: _Optional[_Iterable[_Union[_types_pb2.Optimizer, str]]] = ..., full_training: _Optional[bool] = ..., trainable: _Optional[bool] = ..., trainable_groups: _Optional[_Iterable[_Union[_types_pb2.AdapterGroup, str]]] = ..., refused_groups: _Optional[_Iterable[_Union[RefusedGroup, _Mapping]]] = ..., base_weights: _Optional[str] = ..., num_threads: _Optional[int] = ..., micro_batch_tokens: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., one_by_one: _Optional[str] = ..., picture_counting: _Optional[_Union[PictureCounting, _Mapping]] = ..., trainer_id: _Optional[str] = ..., store_id: _Optional[str] = ..., fingerprint: _Optional[_Mapping[str, str]] = ..., reserved_bytes: _Optional[int] = ..., reservable_bytes: _Optional[int] = ..., num_models: _Optional[int] = ..., queued_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., version_homes: _Optional[int] = ...) -> None: ...

class PictureCounting(_message.Message):
    __slots__ = ("rule", "settings", "picture_token", "before", "after")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RULE_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    PICTURE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    rule: str
    settings: _containers.ScalarMap[str, int]
    picture_token: int
    before: _containers.RepeatedScalarFieldContainer[int]
    after: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, rule: _Optional[str] = ..., settings: _Optional[_Mapping[str, int]] = ..., picture_token: _Optional[int] = ..., before: _Optional[_Iterable[int]] = ..., after: _Optional[_Iterable[int]] = ...) -> None: ...

class RefusedGroup(_message.Message):
    __slots__ = ("group", "reason")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    group: _types_pb2.AdapterGroup
    reason: str
    def __init__(self, group: _Optional[_Union[_types_pb2.AdapterGroup, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class CreateModelRequest(_message.Message):
    __slots__ = ("model_id", "base_model", "lora_config", "optimizer", "from_location", "load_optimizer", "user_metadata", "base_weights", "creation_id")
    class UserMetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    LORA_CONFIG_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    FROM_LOCATION_FIELD_NUMBER: _ClassVar[int]
    LOAD_OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    USER_METADATA_FIELD_NUMBER: _ClassVar[int]
    BASE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    CREATION_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    base_model: str
    lora_config: _types_pb2.LoraConfig
    optimizer: _types_pb2.Optimizer
    from_location: str
    load_optimizer: bool
    user_metadata: _containers.ScalarMap[str, str]
    base_weights: str
    creation_id: str
    def __init__(self, model_id: _Optional[str] = ..., base_model: _Optional[str] = ..., lora_config: _Optional[_Union[_types_pb2.LoraConfig, _Mapping]] = ..., optimizer: _Optional[_Union[_types_pb2.Optimizer, str]] = ..., from_location: _Optional[str] = ..., load_optimizer: _Optional[bool] = ..., user_metadata: _Optional[_Mapping[str, str]] = ..., base_weights: _Optional[str] = ..., creation_id: _Optional[str] = ...) -> None: ...

class CreateModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: ModelInfo
    def __init__(self, model: _Optional[_Union[ModelInfo, _Mapping]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("model_id",)
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    def __init__(self, model_id: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: ModelInfo
    def __init__(self, model: _Optional[_Union[ModelInfo, _Mapping]] = ...) -> None: ...

class DeleteModelRequest(_message.Message):
    __slots__ = ("model_id",)
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    def __init__(self, model_id: _Optional[str] = ...) -> None: ...

class DeleteModelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ForwardBackwardRequest(_message.Message):
    __slots__ = ("model_id", "seq_id", "data", "loss_fn", "loss_fn_config", "forward_only", "loss_fn_config_v2", "custom_loss")
    class LossFnConfigEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class LossFnConfigV2Entry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _types_pb2.LossConfigValue
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_types_pb2.LossConfigValue, _Mapping]] = ...) -> None: ...
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LOSS_FN_FIELD_NUMBER: _ClassVar[int]
    LOSS_FN_CONFIG_FIELD_NUMBER: _ClassVar[int]
    FORWARD_ONLY_FIELD_NUMBER: _ClassVar[int]
    LOSS_FN_CONFIG_V2_FIELD_NUMBER: _ClassVar[int]
    CUSTOM_LOSS_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    seq_id: int
    data: _containers.RepeatedCompositeFieldContainer[_types_pb2.Datum]
    loss_fn: str
    loss_fn_config: _containers.ScalarMap[str, float]
    forward_only: bool
    loss_fn_config_v2: _containers.MessageMap[str, _types_pb2.LossConfigValue]
    custom_loss: CustomLoss
    def __init__(self, model_id: _Optional[str] = ..., seq_id: _Optional[int] = ..., data: _Optional[_Iterable[_Union[_types_pb2.Datum, _Mapping]]] = ..., loss_fn: _Optional[str] = ..., loss_fn_config: _Optional[_Mapping[str, float]] = ..., forward_only: _Optional[bool] = ..., loss_fn_config_v2: _Optional[_Mapping[str, _types_pb2.LossConfigValue]] = ..., custom_loss: _Optional[_Union[CustomLoss, _Mapping]] = ...) -> None: ...

class CustomLoss(_message.Message):
    __slots__ = ("name", "inputs", "graph")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    name: str
    inputs: _containers.RepeatedCompositeFieldContainer[CustomLossInput]
    graph: str
    def __init__(self, name: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[CustomLossInput, _Mapping]]] = ..., graph: _Optional[str] = ...) -> None: ...

class CustomLossInput(_message.Message):
    __slots__ = ("name", "rank")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    name: str
    rank: int
    def __init__(self, name: _Optional[str] = ..., rank: _Optional[int] = ...) -> None: ...

class ForwardBackwardResponse(_message.Message):
    __slots__ = ("loss_fn_output_type", "loss_fn_outputs", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    LOSS_FN_OUTPUT_TYPE_FIELD_NUMBER: _ClassVar[int]
    LOSS_FN_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    loss_fn_output_type: str
    loss_fn_outputs: _containers.RepeatedCompositeFieldContainer[_types_pb2.ArrayRecord]
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, loss_fn_output_type: _Optional[str] = ..., loss_fn_outputs: _Optional[_Iterable[_Union[_types_pb2.ArrayRecord, _Mapping]]] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class OptimStepRequest(_message.Message):
    __slots__ = ("model_id", "seq_id", "adam_params", "dimuon_params", "failure_seen")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    ADAM_PARAMS_FIELD_NUMBER: _ClassVar[int]
    DIMUON_PARAMS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_SEEN_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    seq_id: int
    adam_params: AdamParams
    dimuon_params: DimuonParams
    failure_seen: int
    def __init__(self, model_id: _Optional[str] = ..., seq_id: _Optional[int] = ..., adam_params: _Optional[_Union[AdamParams, _Mapping]] = ..., dimuon_params: _Optional[_Union[DimuonParams, _Mapping]] = ..., failure_seen: _Optional[int] = ...) -> None: ...

class DimuonParams(_message.Message):
    __slots__ = ("learning_rate", "beta1", "grad_clip_norm")
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    GRAD_CLIP_NORM_FIELD_NUMBER: _ClassVar[int]
    learning_rate: float
    beta1: float
    grad_clip_norm: float
    def __init__(self, learning_rate: _Optional[float] = ..., beta1: _Optional[float] = ..., grad_clip_norm: _Optional[float] = ...) -> None: ...

class AdamParams(_message.Message):
    __slots__ = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    EPS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    GRAD_CLIP_NORM_FIELD_NUMBER: _ClassVar[int]
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float
    def __init__(self, learning_rate: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., eps: _Optional[float] = ..., weight_decay: _Optional[float] = ..., grad_clip_norm: _Optional[float] = ...) -> None: ...

class OptimStepResponse(_message.Message):
    __slots__ = ("metrics",)
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    METRICS_FIELD_NUMBER: _ClassVar[int]
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class SkipOperationRequest(_message.Message):
    __slots__ = ("model_id", "seq_id", "reason", "gradients_missing")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_MISSING_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    seq_id: int
    reason: str
    gradients_missing: bool
    def __init__(self, model_id: _Optional[str] = ..., seq_id: _Optional[int] = ..., reason: _Optional[str] = ..., gradients_missing: _Optional[bool] = ...) -> None: ...

class SkipOperationResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SaveCheckpointRequest(_message.Message):
    __slots__ = ("model_id", "seq_id", "kind", "name", "overwrite", "ttl", "user_metadata", "age_recipients", "save_id")
    class UserMetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    OVERWRITE_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    USER_METADATA_FIELD_NUMBER: _ClassVar[int]
    AGE_RECIPIENTS_FIELD_NUMBER: _ClassVar[int]
    SAVE_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    seq_id: int
    kind: _types_pb2.CheckpointKind
    name: str
    overwrite: bool
    ttl: _duration_pb2.Duration
    user_metadata: _containers.ScalarMap[str, str]
    age_recipients: _containers.RepeatedScalarFieldContainer[str]
    save_id: str
    def __init__(self, model_id: _Optional[str] = ..., seq_id: _Optional[int] = ..., kind: _Optional[_Union[_types_pb2.CheckpointKind, str]] = ..., name: _Optional[str] = ..., overwrite: _Optional[bool] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., user_metadata: _Optional[_Mapping[str, str]] = ..., age_recipients: _Optional[_Iterable[str]] = ..., save_id: _Optional[str] = ...) -> None: ...

class SaveCheckpointResponse(_message.Message):
    __slots__ = ("checkpoint", "num_samplers", "certificate")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLERS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    checkpoint: _types_pb2.CheckpointInfo
    num_samplers: int
    certificate: _types_pb2.PublishCertificate
    def __init__(self, checkpoint: _Optional[_Union[_types_pb2.CheckpointInfo, _Mapping]] = ..., num_samplers: _Optional[int] = ..., certificate: _Optional[_Union[_types_pb2.PublishCertificate, _Mapping]] = ...) -> None: ...

class LoadCheckpointRequest(_message.Message):
    __slots__ = ("model_id", "seq_id", "location", "load_optimizer")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    LOAD_OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    seq_id: int
    location: str
    load_optimizer: bool
    def __init__(self, model_id: _Optional[str] = ..., seq_id: _Optional[int] = ..., location: _Optional[str] = ..., load_optimizer: _Optional[bool] = ...) -> None: ...

class LoadCheckpointResponse(_message.Message):
    __slots__ = ("checkpoint",)
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    checkpoint: _types_pb2.CheckpointInfo
    def __init__(self, checkpoint: _Optional[_Union[_types_pb2.CheckpointInfo, _Mapping]] = ...) -> None: ...

class PublishCheckpointRequest(_message.Message):
    __slots__ = ("location", "version_id", "num_samplers")
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLERS_FIELD_NUMBER: _ClassVar[int]
    location: str
    version_id: str
    num_samplers: int
    def __init__(self, location: _Optional[str] = ..., version_id: _Optional[str] = ..., num_samplers: _Optional[int] = ...) -> None: ...

class PublishCheckpointResponse(_message.Message):
    __slots__ = ("num_samplers", "certificate")
    NUM_SAMPLERS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    num_samplers: int
    certificate: _types_pb2.PublishCertificate
    def __init__(self, num_samplers: _Optional[int] = ..., certificate: _Optional[_Union[_types_pb2.PublishCertificate, _Mapping]] = ...) -> None: ...

class VerifyCheckpointRequest(_message.Message):
    __slots__ = ("location",)
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    location: str
    def __init__(self, location: _Optional[str] = ...) -> None: ...

class VerifyCheckpointResponse(_message.Message):
    __slots__ = ("files", "problems")
    class ProblemsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    FILES_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[_types_pb2.CheckpointFile]
    problems: _containers.ScalarMap[str, str]
    def __init__(self, files: _Optional[_Iterable[_Union[_types_pb2.CheckpointFile, _Mapping]]] = ..., problems: _Optional[_Mapping[str, str]] = ...) -> None: ...

class GetCertificateRequest(_message.Message):
    __slots__ = ("location",)
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    location: str
    def __init__(self, location: _Optional[str] = ...) -> None: ...

class GetCertificateResponse(_message.Message):
    __slots__ = ("certificate",)
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    certificate: _types_pb2.PublishCertificate
    def __init__(self, certificate: _Optional[_Union[_types_pb2.PublishCertificate, _Mapping]] = ...) -> None: ...

class GetCheckpointRequest(_message.Message):
    __slots__ = ("location",)
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    location: str
    def __init__(self, location: _Optional[str] = ...) -> None: ...

class GetCheckpointResponse(_message.Message):
    __slots__ = ("checkpoint", "files")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    checkpoint: _types_pb2.CheckpointInfo
    files: _containers.RepeatedCompositeFieldContainer[_types_pb2.CheckpointFile]
    def __init__(self, checkpoint: _Optional[_Union[_types_pb2.CheckpointInfo, _Mapping]] = ..., files: _Optional[_Iterable[_Union[_types_pb2.CheckpointFile, _Mapping]]] = ...) -> None: ...

class DeleteCheckpointRequest(_message.Message):
    __slots__ = ("location", "version_id")
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_ID_FIELD_NUMBER: _ClassVar[int]
    location: str
    version_id: str
    def __init__(self, location: _Optional[str] = ..., version_id: _Optional[str] = ...) -> None: ...

class DeleteCheckpointResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CopyCheckpointRequest(_message.Message):
    __slots__ = ("source", "destination", "ttl")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    source: str
    destination: str
    ttl: _duration_pb2.Duration
    def __init__(self, source: _Optional[str] = ..., destination: _Optional[str] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class CopyCheckpointResponse(_message.Message):
    __slots__ = ("checkpoint",)
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    checkpoint: _types_pb2.CheckpointInfo
    def __init__(self, checkpoint: _Optional[_Union[_types_pb2.CheckpointInfo, _Mapping]] = ...) -> None: ...

class ReadCheckpointFileRequest(_message.Message):
    __slots__ = ("location", "name", "offset", "num_bytes")
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    location: str
    name: str
    offset: int
    num_bytes: int
    def __init__(self, location: _Optional[str] = ..., name: _Optional[str] = ..., offset: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class ReadCheckpointFileResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class ImportCheckpointRequest(_message.Message):
    __slots__ = ("header", "archive", "complete", "max_checkpoint_bytes")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ARCHIVE_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    MAX_CHECKPOINT_BYTES_FIELD_NUMBER: _ClassVar[int]
    header: ImportCheckpointHeader
    archive: bytes
    complete: bool
    max_checkpoint_bytes: int
    def __init__(self, header: _Optional[_Union[ImportCheckpointHeader, _Mapping]] = ..., archive: _Optional[bytes] = ..., complete: _Optional[bool] = ..., max_checkpoint_bytes: _Optional[int] = ...) -> None: ...

class ImportCheckpointHeader(_message.Message):
    __slots__ = ("location", "base_model", "ttl", "user_metadata", "archive_bytes")
    class UserMetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    USER_METADATA_FIELD_NUMBER: _ClassVar[int]
    ARCHIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    location: str
    base_model: str
    ttl: _duration_pb2.Duration
    user_metadata: _containers.ScalarMap[str, str]
    archive_bytes: int
    def __init__(self, location: _Optional[str] = ..., base_model: _Optional[str] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., user_metadata: _Optional[_Mapping[str, str]] = ..., archive_bytes: _Optional[int] = ...) -> None: ...

class ImportCheckpointResponse(_message.Message):
    __slots__ = ("checkpoint", "notes")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    checkpoint: _types_pb2.CheckpointInfo
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, checkpoint: _Optional[_Union[_types_pb2.CheckpointInfo, _Mapping]] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class CheckCustomLossRequest(_message.Message):
    __slots__ = ("custom_loss",)
    CUSTOM_LOSS_FIELD_NUMBER: _ClassVar[int]
    custom_loss: CustomLoss
    def __init__(self, custom_loss: _Optional[_Union[CustomLoss, _Mapping]] = ...) -> None: ...

class CheckCustomLossResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeOperationRequest(_message.Message):
    __slots__ = ("model_id", "seq_id")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    seq_id: int
    def __init__(self, model_id: _Optional[str] = ..., seq_id: _Optional[int] = ...) -> None: ...

class DescribeOperationResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: _types_pb2.QueueStatus
    def __init__(self, status: _Optional[_Union[_types_pb2.QueueStatus, _Mapping]] = ...) -> None: ...

class WaitResultRequest(_message.Message):
    __slots__ = ("model_id", "seq_id")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    seq_id: int
    def __init__(self, model_id: _Optional[str] = ..., seq_id: _Optional[int] = ...) -> None: ...

class WaitResultResponse(_message.Message):
    __slots__ = ("create_model", "forward_backward", "optim_step", "save_checkpoint", "load_checkpoint")
    CREATE_MODEL_FIELD_NUMBER: _ClassVar[int]
    FORWARD_BACKWARD_FIELD_NUMBER: _ClassVar[int]
    OPTIM_STEP_FIELD_NUMBER: _ClassVar[int]
    SAVE_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    LOAD_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    create_model: CreateModelResponse
    forward_backward: ForwardBackwardResponse
    optim_step: OptimStepResponse
    save_checkpoint: SaveCheckpointResponse
    load_checkpoint: LoadCheckpointResponse
    def __init__(self, create_model: _Optional[_Union[CreateModelResponse, _Mapping]] = ..., forward_backward: _Optional[_Union[ForwardBackwardResponse, _Mapping]] = ..., optim_step: _Optional[_Union[OptimStepResponse, _Mapping]] = ..., save_checkpoint: _Optional[_Union[SaveCheckpointResponse, _Mapping]] = ..., load_checkpoint: _Optional[_Union[LoadCheckpointResponse, _Mapping]] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("model_id", "base_model", "lora_config", "optimizer", "step", "next_seq_id", "user_metadata")
    class UserMetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    LORA_CONFIG_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    USER_METADATA_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    base_model: str
    lora_config: _types_pb2.LoraConfig
    optimizer: _types_pb2.Optimizer
    step: int
    next_seq_id: int
    user_metadata: _containers.ScalarMap[str, str]
    def __init__(self, model_id: _Optional[str] = ..., base_model: _Optional[str] = ..., lora_config: _Optional[_Union[_types_pb2.LoraConfig, _Mapping]] = ..., optimizer: _Optional[_Union[_types_pb2.Optimizer, str]] = ..., step: _Optional[int] = ..., next_seq_id: _Optional[int] = ..., user_metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...
