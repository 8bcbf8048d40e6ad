"""Both services of a pair in one process, with queues between them in place of gRPC: a network without any cost.

    python -m benchmarks.one_process TARGET draft_service --model DRAFT --listen 127.0.0.1:0

The code of both services is the same as in two processes, and so are their clients. Messages pass as they are.
"""

import asyncio
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import grpc

from benchmarks.services import NO_PREFIXES
from draft_service.app import DraftApp
from draft_service.settings import DraftSettings
from outrider.rpc.channel import RenewedChannel
from outrider.service.lifecycle import Warm, run
from verifier_service.app import VerifierApp
from verifier_service.service import VerifierService
from verifier_service.settings import VerifierSettings

_NAME = "benchmarks.one_process"


class _End:
    """One end of two queues."""

    def __init__(self, inbox: asyncio.Queue[Any], outbox: asyncio.Queue[Any]) -> None:
        self._inbox, self._outbox = inbox, outbox

    async def read(self) -> Any:
        return await self._inbox.get()

    async def write(self, message: Any) -> None:
        self._outbox.put_nowait(message)


class _Context(_End):
    """The servicer's context, without the methods that it does not call."""

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def abort_with_status(self, status: Any) -> NoReturn:
        raise RuntimeError(f"{status.code}: {status.details}")


class _Verify(_End):
    """A call of `Verify`, without the methods that our client does not use."""

    def __init__(self, servicer: VerifierService) -> None:
        requests, replies = asyncio.Queue[Any](), asyncio.Queue[Any]()
        super().__init__(replies, requests)
        context: Any = _Context(requests, replies)
        serving: Any = servicer.Verify(context, context)
        self._task: asyncio.Task[None] = asyncio.ensure_future(serving)
        self._task.add_done_callback(lambda _: replies.put_nowait(grpc.aio.EOF))

    async def done_writing(self) -> None:
        self._outbox.put_nowait(grpc.aio.EOF)

    def cancel(self) -> None:
        self._task.cancel()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._task.add_done_callback(lambda _: callback(self))

    async def code(self) -> grpc.StatusCode:
        failed = not self._task.done() or self._task.cancelled() or self._task.exception() is not None
        return grpc.StatusCode.INTERNAL if failed else grpc.StatusCode.OK

    async def details(self) -> str:
        return "" if self._task.cancelled() else str(self._task.exception() or "")

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()


class _Stub:
    def __init__(self, servicer: VerifierService) -> None:
        self._servicer = servicer

    def Verify(self, **how: Any) -> _Verify:  # noqa: N802  # as in the contract
        return _Verify(self._servicer)

    def GetModel(self, request: Any, **how: Any) -> Any:  # noqa: N802
        context: Any = None
        return asyncio.ensure_future(self._servicer.GetModel(request, context))


class OneProcess(DraftApp):
    """A draft service whose verifier is in its own process."""

    def __init__(self, target: VerifierSettings, draft: DraftSettings) -> None:
        super().__init__(draft)
        self._target = VerifierApp(target)

    async def load(self, warm: Warm) -> None:
        await self._target.load(_no_news)
        await super().load(warm)

    def _connect(self, address: str, name: str) -> RenewedChannel[Any]:
        stub = _Stub(self._target._servicer)
        return RenewedChannel(address, lambda channel: stub, max_message_bytes=self._settings.max_message_bytes)

    def stop(self) -> None:
        super().stop()
        self._target.stop()


async def _no_news() -> None: ...


def main() -> int:
    _, target, _, *arguments = sys.argv
    draft = DraftSettings.from_command_line(arguments, program=_NAME)
    flags = {
        "--model": target, "--dtype": draft.dtype, "--device": draft.device, "--threads": draft.threads,
        "--max-sequences": draft.max_sequences,
    }  # fmt: skip
    given = [*NO_PREFIXES, *(str(part) for flag in flags.items() for part in flag)]
    verifier = VerifierSettings.from_command_line(given, program=_NAME)
    return run(_NAME, draft, lambda: OneProcess(verifier, draft))


if __name__ == "__main__":
    sys.exit(main())
