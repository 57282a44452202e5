"""How both sides of the Unix socket use gRPC."""

from __future__ import annotations

from types import MappingProxyType

from p99lab.serving.protocol import engine_pb2 as pb

_SERVICE = pb.DESCRIPTOR.services_by_name["Engine"]
SERVICE_NAME = _SERVICE.full_name
PATHS = MappingProxyType({method.name: f"/{SERVICE_NAME}/{method.name}" for method in _SERVICE.methods})
# A prompt of 130 000 ids is one message of 0.5 MB, a long prompt's log-probabilities are more: no limit on messages,
# and larger frames and windows than gRPC takes for a network.
OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.max_frame_size", 1 << 20),
    ("grpc.http2.lookahead_bytes", 4 << 20),
)
