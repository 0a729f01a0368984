"""What travels between the front end and the engine core's process: msgpack, one message a datagram, in order.

The contract's own dataclasses are the payload; nothing is pickled, so no message can run code.
"""

from __future__ import annotations

from typing import Any

import msgspec

from servetwin.executor.core_listener import ListenerCall
from servetwin.sim.contract import EngineCoreOutput, EngineCoreRequest


class Setup(msgspec.Struct, tag=True, frozen=True):
    """The first message: what the engine is built from."""

    args: dict[str, Any]
    """The fields of `EngineArgs`, paths as strings."""
    sys_path: list[str]
    """Where the parent finds modules: a policy `module:Class` may lie beside the caller's script."""
    listen: bool
    """Send a `ListenerCall` for everything that happens."""


class AddRequest(msgspec.Struct, tag=True, frozen=True):
    request: EngineCoreRequest


class AbortRequests(msgspec.Struct, tag=True, frozen=True):
    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, tag=True, frozen=True):
    """Answered by `PrefixCacheReset`."""


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """The last message: finish the steps in flight and end."""


Request = AddRequest | AbortRequests | ResetPrefixCache | Shutdown
"""Once the engine is ready."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine is built."""

    config: str
    """`EngineConfig` as JSON."""
    described: dict[str, Any]
    """`Executor.describe()`."""


class StartFailed(msgspec.Struct, tag=True, frozen=True):
    """The arguments or the model do not do: the message is for the caller."""

    message: str


class Outputs(msgspec.Struct, tag=True, frozen=True):
    outputs: list[EngineCoreOutput]


class PrefixCacheReset(msgspec.Struct, tag=True, frozen=True):
    done: bool


class Stalled(msgspec.Struct, tag=True, frozen=True):
    """Nothing will come out unless something comes in."""

    num_requests: int
    """Messages that the engine had taken in by then: with another one on its way this is out of date."""
    message: str


class Died(msgspec.Struct, tag=True, frozen=True):
    """The engine core failed, and its process ends."""

    message: str


Reply = Ready | StartFailed | Outputs | PrefixCacheReset | Stalled | Died | ListenerCall

_SETUP = msgspec.msgpack.Decoder(Setup)
_REQUEST = msgspec.msgpack.Decoder(Request)
_REPLY = msgspec.msgpack.Decoder(Reply)


def encode(message: Setup | Request | Reply) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_setup(data: bytes) -> Setup:
    return _SETUP.decode(data)


def decode_request(data: bytes) -> Request:
    """Raises msgspec.ValidationError for a field of another type than the contract's."""
    request: Request = _REQUEST.decode(data)
    return request


def decode_reply(data: bytes) -> Reply:
    reply: Reply = _REPLY.decode(data)
    return reply
