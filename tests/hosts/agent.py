"""The client on its host: has draft services write texts, all at once, and reports each as it comes.

The fork server runs it. Its arguments are an address and, as JSON, the fields of `TLS` and the requests: prompt and
options of each. It prints JSON, a line for each chunk and each end, with the number of the request.
"""

import asyncio
import json
import sys
from typing import Any

from outrider.client import TLS, AsyncClient, Chunk, Finished, OutriderError

TIMEOUT_S = 90.0
"""Longer than any pause that a failing host causes."""


async def write(client: AsyncClient, number: int, prompt: str, options: Any) -> None:
    def report(**message: Any) -> None:
        print(json.dumps([number, message]), flush=True)

    try:
        async for event in client.generate(prompt, **options):
            match event:
                case Chunk():
                    report(token_ids=[*event.token_ids], text=event.text)
                case Finished():
                    report(resumes=event.num_resumes, failovers=event.statistics.num_failovers, ended=True)
    except OutriderError as error:
        report(error=f"{error.code.name}: {error.message}", ended=True)


async def write_all(address: str, tls: str, requests: str) -> None:
    async with AsyncClient(address, tls=TLS(**json.loads(tls)), timeout=TIMEOUT_S) as client:
        await asyncio.gather(*(write(client, number, *each) for number, each in enumerate(json.loads(requests))))


def main() -> int:
    asyncio.run(write_all(*sys.argv[1:]))
    return 0
