"""Server reflection under both of its names: grpc.reflection.v1, which newer tools try first, and v1alpha."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

_NAME = "grpc.reflection.v1.ServerReflection"


def add_reflection(services: Sequence[str], server: grpc.aio.Server) -> None:
    """Adds reflection to a server. `services`: full names of the services to list, beside health and reflection."""
    names = [*services, health.SERVICE_NAME, reflection.SERVICE_NAME, _NAME]
    reflection.enable_server_reflection(names, server)
    # grpcio-reflection serves v1alpha only. The messages of v1 have the same form on the wire.
    handler = grpc.stream_stream_rpc_method_handler(
        ReflectionServicer(names, _pool_with_v1()).ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_NAME, methods),))


def _pool_with_v1() -> DescriptorPool:
    """The default descriptor pool with v1 added, so that tools can describe v1."""
    pool = descriptor_pool.Default()
    try:
        pool.FindServiceByName(_NAME)
    except KeyError:
        alpha = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(alpha)
        text = text_format.MessageToString(alpha).replace("v1alpha", "v1")
        pool.AddSerializedFile(text_format.Parse(text, descriptor_pb2.FileDescriptorProto()).SerializeToString())
    return pool
