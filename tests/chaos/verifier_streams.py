"""Raw `Verify` streams, each of which is disturbed in one way, or in none: a draft service of the worse kind.

They propose what they like: right tokens, wrong ones, none.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from typing import Any

import grpc

from outrider.rpc.channel import open_channel
from outrider.rpc.errors import from_rpc_error
from outrider.rpc.timeouts import Ending
from outrider.service.wire import PrefixHash
from protos.outrider.v1 import sampling_pb2, speculation_pb2, verifier_service_pb2
from protos.outrider.v1.verifier_service_pb2_grpc import VerifierServiceStub
from tests.chaos.broken_connection import Wire
from tests.chaos.clients import NARROW, PATIENCE_S
from tests.chaos.requests import Behaviour, Door, Expected, Outcome, Request

_DONE = sampling_pb2.FINISH_REASON_LENGTH
_JUDGED = speculation_pb2.VERDICT_STATUS_JUDGED


class _Left(Exception):
    """The client goes, in the middle."""


class VerifierStreams:
    """Makes streams at one verifier."""

    door = Door.VERIFIER

    def __init__(
        self, address: str, expected: dict[int, Expected], stall: tuple[float, float], gone: AsyncExitStack
    ) -> None:
        """`expected` by the number of the request; the rest as `DraftClients` has it."""
        self._address = address
        self._expected = expected
        self._stall = stall
        self._gone = gone
        self._channel = open_channel(address)

    async def close(self) -> None:
        """End what all share."""
        await self._channel.close()

    async def stream(self, behaviour: Behaviour, request: Request, chance: random.Random) -> Outcome:
        """Run one stream to its end, whatever that is."""
        outcome = Outcome(self.door, behaviour, request)
        async with AsyncExitStack() as stack:
            channel, wire = self._channel, None
            if behaviour is Behaviour.SLOW:
                channel = await stack.enter_async_context(open_channel(self._address, options=NARROW))
            elif behaviour is Behaviour.CUT:
                wire = await stack.enter_async_context(Wire(self._address))
            elif behaviour is Behaviour.VANISH:
                wire = await self._gone.enter_async_context(Wire(self._address))
            if wire is not None:
                channel = await stack.enter_async_context(open_channel(wire.address))
            seconds = PATIENCE_S
            if behaviour is Behaviour.DEADLINE:
                seconds = chance.choice((0.02, chance.uniform(0.1, 1.0), chance.uniform(1.0, 5.0)))
            call: Any = VerifierServiceStub(channel).Verify(timeout=seconds)
            ending = Ending(call)
            sequence = _Sequence(call, outcome, self._expected[request.number], chance)
            try:
                await self._drive(sequence, behaviour, wire, chance)
            except _Left:
                outcome.status = "CANCELLED"
            except (grpc.RpcError, asyncio.InvalidStateError):
                error = from_rpc_error(await ending.status())
                outcome.status, outcome.reason, outcome.message = error.code.name, error.reason, error.message
                outcome.retry_after = error.retry_after
            finally:
                call.cancel()
        return outcome

    async def _drive(self, sequence: _Sequence, behaviour: Behaviour, wire: Wire | None, chance: random.Random) -> None:
        at = chance.randint(0, sequence.outcome.request.length)
        acts = behaviour is not Behaviour.PLAIN
        await sequence.open(logprobs=behaviour is Behaviour.SLOW)
        while not sequence.outcome.whole:
            if behaviour is Behaviour.SLOW:
                await sequence.decode_rest()
            else:
                await sequence.round()
            while sequence.owed and not sequence.outcome.whole:
                if acts and len(sequence.outcome.token_ids) >= at:
                    acts = False
                    if not await self._act(sequence, behaviour, wire, chance):
                        return
                await sequence.take()
        await sequence.end()

    async def _act(self, sequence: _Sequence, behaviour: Behaviour, wire: Wire | None, chance: random.Random) -> bool:
        """Disturb the stream, with a round under way. Returns whether to go on as if nothing had happened."""
        match behaviour:
            case Behaviour.CANCEL:
                raise _Left
            case Behaviour.SLOW:
                await asyncio.sleep(chance.uniform(*self._stall))
            case Behaviour.HALF_CLOSE:
                await sequence.half_close()
                return False
            case Behaviour.CUT:
                assert wire is not None
                wire.cut(reset=chance.random() < 0.5)
            case Behaviour.VANISH:
                assert wire is not None
                wire.hang()
                raise _Left
        return True


class _Sequence:
    """One call, its rounds, and what has been heard of it."""

    def __init__(self, call: Any, outcome: Outcome, expected: Expected, chance: random.Random) -> None:
        self.outcome = outcome
        self.owed = 0  # verdicts
        self._call = call
        self._expected = expected
        self._chance = chance
        self._number = 0

    async def open(self, *, logprobs: bool) -> None:
        request = self.outcome.request
        await self._send(
            open=verifier_service_pb2.OpenSequence(
                prompt_token_ids=self._expected.prompt_ids,
                max_new_tokens=request.length,
                ignore_eos=True,
                sampling=sampling_pb2.SamplingParams(
                    temperature=request.law["temperature"],
                    seed=request.number,
                    rule=sampling_pb2.ACCEPTANCE_RULE_COUPLED,  # at temperature 0 every rule writes the same
                ),
                logprobs=sampling_pb2.LogprobsParams(top_n=20) if logprobs else None,
                cache_salt=self._chance.choice(("", str(self._chance.random()))),
            )
        )

    async def round(self) -> None:
        """A proposal of what will be accepted, with one token wrong in half of them; or a few tokens of Decode."""
        at, chance = len(self.outcome.token_ids), self._chance
        if chance.random() < 0.3:
            await self._decode(chance.randint(1, 6))
            return
        tokens = list(self._expected.token_ids[at : at + chance.randint(0, 6)])
        if tokens and chance.random() < 0.5:
            tokens[chance.randrange(len(tokens))] = chance.randrange(1, 1000)
        self._number += 1
        self.owed = 1
        await self._send(
            proposal=speculation_pb2.Proposal(
                round=self._number,
                base_length=len(self._prefix()),
                prefix_hash=PrefixHash(self._prefix()).digest(),
                token_ids=tokens,
                seen_round=self._number - 1,
            )
        )

    async def decode_rest(self) -> None:
        await self._decode(self.outcome.request.length - len(self.outcome.token_ids))

    async def _decode(self, tokens: int) -> None:
        self._number += 1
        self.owed = min(tokens, self.outcome.request.length - len(self.outcome.token_ids))
        await self._send(
            decode=verifier_service_pb2.Decode(
                round=self._number,
                base_length=len(self._prefix()),
                prefix_hash=PrefixHash(self._prefix()).digest(),
                num_tokens=tokens,
                seen_round=self._number - 1,
            )
        )

    async def take(self) -> None:
        """Read up to the next verdict."""
        while not await self._heard_verdict():
            pass

    async def half_close(self) -> None:
        """Send no more; what is owed comes all the same, and then the end."""
        await self._call.done_writing()
        while self.owed:
            await self.take()
        await self.end()

    async def end(self) -> None:
        """Read to the end, at which nothing more may have come."""
        while (reply := await self._read()) is not grpc.aio.EOF:
            assert reply.WhichOneof("kind") != "verdict", f"a verdict came after the end: {reply}"

    async def _heard_verdict(self) -> bool:
        reply = await self._read()
        if reply is grpc.aio.EOF:
            raise asyncio.InvalidStateError("the stream has ended")
        if reply.WhichOneof("kind") != "verdict":
            return False
        verdict = reply.verdict
        assert verdict.status == _JUDGED, f"nothing was sent ahead: {verdict}"
        assert verdict.base_length == len(self._prefix())
        self.outcome.token_ids += verdict.token_ids
        self.outcome.whole = verdict.finish_reason == _DONE
        self.owed -= 1
        return True

    async def _read(self) -> Any:
        return await self._call.read()

    async def _send(self, **kind: Any) -> None:
        await self._call.write(verifier_service_pb2.VerifyRequest(sequence_id="s", **kind))

    def _prefix(self) -> list[int]:
        return [*self._expected.prompt_ids, *self.outcome.token_ids]
