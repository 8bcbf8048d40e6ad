"""A method of a server with something around each of its calls. It knows nothing of what that is."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, TypeAlias

import grpc

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


def wrapped(handler: Handler, around: Callable[[Context], AbstractAsyncContextManager[None]]) -> Handler:
    """The handler with `around(context)` open from before a call's first line until after its last.

    Handlers must be asynchronous, as all of ours are. Where `around` ends the call, the handler never learns of it.
    """
    inner: Any = handler.unary_unary or handler.stream_unary or handler.unary_stream or handler.stream_stream

    # A streaming method either yields its answers or writes them to the context.
    async def yielding(request: Any, context: Context) -> AsyncIterator[Any]:
        async with around(context), aclosing(inner(request, context)) as responses:
            async for response in responses:
                yield response

    async def returning(request: Any, context: Context) -> Any:
        async with around(context):
            return await inner(request, context)

    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[bool(handler.request_streaming), bool(handler.response_streaming)]
    behaviour: Any = yielding if inspect.isasyncgenfunction(inner) else returning
    return make(behaviour, handler.request_deserializer, handler.response_serializer)
