"""A verifier asked for responses of one size: every one of them, and a refusal that names the range."""

import grpc
import pytest

from outrider.rpc.errors import from_rpc_error
from tests.verifier_service.streams import PROMPT, Stream, opening


@pytest.mark.parametrize("size", [256, 1000])
def test_every_response_has_the_size_asked_for(verifier_address: str, size: int) -> None:
    message = opening(max_new_tokens=12)
    message.response_bytes = size
    with grpc.insecure_channel(verifier_address) as channel, Stream(channel) as stream:
        stream.open(message)
        stream.decode(1, PROMPT, tokens=12)
        replies = [stream.take() for _ in range(13)]
    assert {reply.ByteSize() for reply in replies} == {size}
    assert [reply.WhichOneof("kind") for reply in replies] == ["opened", *["verdict"] * 12]


@pytest.mark.parametrize("size", [1, 255, (1 << 20) + 1])
def test_a_size_out_of_range_is_refused(verifier_address: str, size: int) -> None:
    message = opening()
    message.response_bytes = size
    with grpc.insecure_channel(verifier_address) as channel, Stream(channel) as stream:
        stream.open(message)
        with pytest.raises(grpc.RpcError) as caught:
            stream.take()
    error = from_rpc_error(caught.value)
    assert (error.code, error.metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, "response_bytes")
    assert (error.metadata["minimum"], error.metadata["maximum"]) == ("256", "1048576")
