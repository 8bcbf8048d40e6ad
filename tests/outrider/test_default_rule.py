"""Which rule judges a request that names none."""

import pytest

from kernels.verify import Rule
from outrider.rpc.errors import RequestError
from outrider.service.sampling import DEFAULT_RULE, OFFERED_RULES, check_sampling
from protos.outrider.v1 import sampling_pb2


def rule_of(**fields: float) -> Rule:
    params = sampling_pb2.SamplingParams(**fields)  # type: ignore[arg-type]
    return check_sampling(params, vocab_size=10, rules=OFFERED_RULES, default_rule=DEFAULT_RULE).rule


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_it_is_block_at_every_temperature(temperature: float) -> None:
    assert rule_of(temperature=temperature) is Rule.BLOCK
    assert rule_of(temperature=temperature, lenience=1.0) is Rule.BLOCK


def test_lenience_brings_tokenwise() -> None:
    assert rule_of(lenience=0.5) is Rule.TOKENWISE
    assert rule_of(lenience=0.5, temperature=0.0) is Rule.TOKENWISE


def test_a_rule_that_is_named_stays() -> None:
    assert rule_of(rule=sampling_pb2.ACCEPTANCE_RULE_TOKENWISE) is Rule.TOKENWISE
    with pytest.raises(RequestError, match=r"lenience 0\.5 does not go with the rule block"):
        rule_of(lenience=0.5, rule=sampling_pb2.ACCEPTANCE_RULE_BLOCK)
