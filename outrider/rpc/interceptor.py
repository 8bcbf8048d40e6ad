"""Interceptors of a server: a context manager around each call, and requests decoded inside it."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from outrider.rpc.errors import RequestError, abort, counted, invalid_field

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


def wrapped(
    handler: Handler,
    around: Callable[[Context], AbstractAsyncContextManager[None]],
    decode: Callable[[bytes], Any] | None = None,
) -> Handler:
    """The handler with `around(context)` open from before a call's first line until after its last.

    Handlers must be asynchronous. If `around` ends the call, the handler is not called. `decode` replaces the handler's
    deserializer, and runs inside `around`.
    """
    inner: Any = handler.unary_unary or handler.stream_unary or handler.unary_stream or handler.stream_stream
    # gRPC decodes a single request before the call's first line, and those of a stream as they are read.
    late = decode if decode is not None and not handler.request_streaming else lambda request: request
    early = handler.request_deserializer if decode is None else decode if handler.request_streaming else None

    # A streaming method either yields its responses or writes them to the context.
    async def yielding(request: Any, context: Context) -> AsyncIterator[Any]:
        async with around(context), aclosing(inner(late(request), context)) as responses:
            async for response in responses:
                yield response

    async def returning(request: Any, context: Context) -> Any:
        async with around(context):
            return await inner(late(request), context)

    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[bool(handler.request_streaming), bool(handler.response_streaming)]
    behaviour: Any = yielding if inspect.isasyncgenfunction(inner) else returning
    return make(behaviour, early, handler.response_serializer)


class Interceptor(grpc.aio.ServerInterceptor, ABC):
    """Wraps the methods of a server, except those whose name begins with one of `exempt`."""

    exempt: tuple[str, ...] = ()

    @abstractmethod
    def wrap(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """Returns the handler with a context manager around its calls: see `wrapped`."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[Handler | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        if handler is None or any(handler_call_details.method.startswith(each) for each in self.exempt):
            return handler
        return self.wrap(handler, handler_call_details)


class Decoder(Interceptor):
    """Decodes requests. The last interceptor, so that refused requests are not decoded. A request that cannot be
    decoded ends its call with INVALID_ARGUMENT.
    """

    def wrap(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        deserialize: Any = handler.request_deserializer
        if deserialize is None:
            return handler

        def decode(message: bytes) -> Any:
            try:
                return deserialize(message)
            except DecodeError as error:
                text = f"the message of {counted(len(message), 'byte')} cannot be decoded: {error}"
                raise invalid_field("message", text, given=len(message)) from None

        return wrapped(handler, _refusing, decode)


@asynccontextmanager
async def _refusing(context: Context) -> AsyncIterator[None]:
    try:
        yield
    except RequestError as error:
        await abort(context, error)
