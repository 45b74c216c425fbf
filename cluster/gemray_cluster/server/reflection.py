"""Server reflection, v1 and v1alpha: their messages are alike on the wire, and grpcio-reflection has the older ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection, reflection_pb2

V1_ALPHA = "grpc.reflection.v1alpha"
V1 = "grpc.reflection.v1"
SERVICES = tuple(f"{package}.ServerReflection" for package in (V1, V1_ALPHA))


def add_reflection(server: grpc.aio.Server, service_names: Iterable[str]) -> None:
    """Describe the services, these two included, to clients that ask."""
    _describe_v1(descriptor_pool.Default())
    servicer: Any = reflection.aio.ReflectionServicer((*service_names, *SERVICES))  # type: ignore[attr-defined]
    answer = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=_read,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        tuple(grpc.method_handlers_generic_handler(service, {"ServerReflectionInfo": answer}) for service in SERVICES)
    )


def _read(data: bytes) -> Any:
    """A request; bytes that are none become the empty one, which is answered with INVALID_ARGUMENT."""
    try:
        return reflection_pb2.ServerReflectionRequest.FromString(data)
    except DecodeError:
        return reflection_pb2.ServerReflectionRequest()


def _describe_v1(pool: descriptor_pool.DescriptorPool) -> None:
    """Add the descriptors of v1 where nothing else of this process has: those of v1alpha under another name."""
    name = "grpc/reflection/v1/reflection.proto"
    try:
        pool.FindFileByName(name)
    except KeyError:
        older = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(older)
        pool.AddSerializedFile(_renamed(older, name).SerializeToString())


def _renamed(file: descriptor_pb2.FileDescriptorProto, name: str) -> descriptor_pb2.FileDescriptorProto:
    file.name, file.package = name, V1
    for message in file.message_type:
        for field in (field for field in message.field if field.HasField("type_name")):
            field.type_name = field.type_name.replace(f".{V1_ALPHA}.", f".{V1}.")
    for service in file.service:
        for method in service.method:
            method.input_type = method.input_type.replace(f".{V1_ALPHA}.", f".{V1}.")
            method.output_type = method.output_type.replace(f".{V1_ALPHA}.", f".{V1}.")
    return file
