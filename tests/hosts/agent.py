"""The client on its host: a program that asks draft services as it is ordered to, and reports what comes.

Orders and reports are lines of JSON, on standard input and output; each names its order. It ends with its input.
"""

import asyncio
import json
import sys
from typing import Any

from outrider.client import TLS, AsyncClient, Chunk, Finished, OutriderError
from tests.metrics import scrape

# Beyond any pause that is shown; what takes longer has failed.
PATIENCE_S = 90.0


class Agent:
    """One client library for all orders."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def carry_out(self, number: int, what: str, order: dict[str, Any]) -> None:
        def send(**message: Any) -> None:
            print(json.dumps({"order": number, **message}), flush=True)

        try:
            match what:
                case "write":
                    await self._write(send, **order)
                case "scrape":
                    samples = await asyncio.to_thread(scrape, order["url"])
                    send(end=[[name, list(each.items())] for name, each in samples.items()])
        except OutriderError as error:
            send(error=f"{error.code.name}: {error.message}")
        except Exception as error:
            send(error=repr(error))

    async def _write(self, send: Any, prompt: str, options: Any) -> None:
        async for event in self._client.generate(prompt, **options):
            match event:
                case Chunk():
                    send(token_ids=[*event.token_ids], text=event.text)
                case Finished():
                    send(end={"resumes": event.num_resumes, "failovers": event.statistics.num_failovers})


async def main() -> None:
    address, tls = sys.argv[1], json.loads(sys.argv[2])
    underway: set[asyncio.Task[None]] = set()
    async with AsyncClient(address, tls=TLS(**tls), timeout=PATIENCE_S) as client:
        agent = Agent(client)
        while line := await asyncio.to_thread(sys.stdin.readline):
            task = asyncio.create_task(agent.carry_out(**json.loads(line)))
            underway.add(task)
            task.add_done_callback(underway.discard)
        for task in list(underway):
            task.cancel()


if __name__ == "__main__":
    asyncio.run(main())
