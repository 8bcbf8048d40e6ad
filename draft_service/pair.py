"""What a service needs to serve: the drafters, the verifiers, and what both models say of themselves."""

from collections.abc import Mapping
from dataclasses import dataclass

from draft_service.drafters.base import Drafter, Kind
from draft_service.failover import Verifiers
from draft_service.speculation import GammaController
from outrider.runtime.tokenizer import Tokenizer
from protos.outrider.v1 import model_pb2


@dataclass(frozen=True, slots=True)
class Pair:
    """A draft and the target it was matched with.

    Attributes:
        drafters: what requests may choose from.
        default: what drafts where a request does not say.
        gamma: how many tokens each proposal holds.
    """

    drafters: Mapping[Kind, Drafter]
    default: Kind
    gamma: GammaController
    verifiers: Verifiers
    tokenizer: Tokenizer
    draft: model_pb2.ModelInfo
    target: model_pb2.ModelInfo
