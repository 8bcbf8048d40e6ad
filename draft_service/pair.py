"""The draft, its target, and the objects that all requests share."""

from collections.abc import Mapping
from dataclasses import dataclass

from draft_service.drafters.base import Drafter, DrafterKind
from draft_service.failover import Verifiers
from draft_service.speculation import GammaController
from kernels.generation_rules import GenerationRules
from outrider.runtime.tokenizer import Tokenizer
from outrider.service.decoder_prompt import DecoderPrompts
from outrider.service.encoder_input import EncoderInputs
from protos.outrider.v1 import model_pb2


@dataclass(frozen=True, slots=True)
class Pair:
    """A draft and the target that it was matched with.

    Attributes:
        drafters: that requests may choose from.
        default: the drafter of a request that names none.
        encoder_inputs: of the draft model; None if it has no encoder, or if there is none.
        prompts: of the decoder; None without an encoder.
        generation_rules: the draft model's own rules for logits; None if it has none.
    """

    drafters: Mapping[DrafterKind, Drafter]
    default: DrafterKind
    gamma_controller: GammaController
    verifiers: Verifiers
    tokenizer: Tokenizer
    draft: model_pb2.ModelInfo
    target: model_pb2.ModelInfo
    encoder_inputs: EncoderInputs | None = None
    prompts: DecoderPrompts | None = None
    generation_rules: GenerationRules | None = None
