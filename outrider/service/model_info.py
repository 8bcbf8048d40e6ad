"""The description of a service's model (`GetModel`), and checks that two models form a pair."""

import hashlib
from collections.abc import Iterable

from outrider.environment import installed_version
from outrider.rpc.errors import RequestError, failed_precondition, outside
from outrider.runtime.encoder_decoder import SPEECH, TEXT, EncoderInfo
from outrider.runtime.errors import CheckpointError
from outrider.runtime.loader import LoadedModel
from outrider.runtime.tokenizer import Tokenizer
from outrider.service.decoder_prompt import DecoderPrompts
from outrider.service.encoder_input import SAMPLE_RATE
from outrider.service.sampling import DEFAULT_RULE, LOSSY_RULES, RULE_TO_WIRE, RULES
from protos.outrider.v1 import model_pb2

PROTOCOL_VERSION = 1
NOISE_VERSION = 1


def describe(
    loaded: LoadedModel, tokenizer: Tokenizer, *, limits: model_pb2.Limits, features: Iterable[str]
) -> model_pb2.ModelInfo:
    """The `ModelInfo` of a loaded model.

    Raises:
        CheckpointError: its generation config has tokens that its tokenizer lacks, or its encoder another vocabulary
            than its decoder.
    """
    info = describe_tokenizer(loaded.name, tokenizer, limits=limits, features=features)
    info.weights_fingerprint = loaded.weights_fingerprint
    info.vocab_size = min(info.vocab_size, loaded.vocab_size)
    info.logits_size = loaded.vocab_size
    info.context_length = loaded.context_length
    # A token that the tokenizer lacks is never drawn.
    info.eos_token_ids[:] = [token for token in loaded.eos_token_ids if 0 <= token < info.vocab_size]
    info.dtype = loaded.number_format
    info.device = str(loaded.device)
    if loaded.encoder is not None:
        prompts = DecoderPrompts.read(loaded.model.generation_config, loaded.encoder.info.start_token)
        info.encoder.CopyFrom(describe_encoder(loaded.encoder.info, prompts))
        own, target = loaded.model.config.vocab_size, loaded.vocab_size
        if loaded.encoder.info.kind == TEXT and own != target:  # one tokenizer reads the input and writes the text
            raise CheckpointError(
                f"'{loaded.name}' has two vocabularies, of {own} tokens in the encoder and {target} in the decoder; "
                "the services take models with one"
            )
        _check_generation(loaded, info)
    return info


def _check_generation(loaded: LoadedModel, info: model_pb2.ModelInfo) -> None:
    """Each request would fail at tokens outside the vocabulary."""
    prompt = info.encoder.decoder_prompt_token_ids
    try:
        if max(prompt) >= info.vocab_size:
            raise ValueError(f"the decoder's prompt has the token {max(prompt)}; ids must be below {info.vocab_size}")
        if loaded.generation_rules is not None:
            loaded.generation_rules.check_ids(info.vocab_size)
    except ValueError as error:
        raise CheckpointError(
            f"the generation config of '{loaded.name}' does not fit its tokenizer: {error}"
        ) from error


def describe_encoder(encoder: EncoderInfo, prompts: DecoderPrompts) -> model_pb2.EncoderInfo:
    """The `EncoderInfo` of an encoder and the decoder prompts of its model."""
    info = model_pb2.EncoderInfo(
        kind=model_pb2.ENCODER_KIND_TEXT, max_positions=encoder.max_length, decoder_prompt_token_ids=prompts.tokens()
    )
    if encoder.kind == SPEECH:
        info.kind = model_pb2.ENCODER_KIND_SPEECH
        info.mels, info.frames, info.sample_rate = encoder.mels, encoder.frames, SAMPLE_RATE
        info.first_timestamp_token_id = 0 if prompts.no_timestamps is None else prompts.no_timestamps + 1
    return info


def describe_tokenizer(
    name: str, tokenizer: Tokenizer, *, limits: model_pb2.Limits, features: Iterable[str]
) -> model_pb2.ModelInfo:
    """The `ModelInfo` of a service without a model, by its tokenizer. Fields that need weights are empty."""
    rules = sorted(RULES.values(), key=lambda rule: rule.value)
    template = tokenizer.chat_template if tokenizer.has_chat_template else ""
    return model_pb2.ModelInfo(
        name=name,
        vocabulary_fingerprint=tokenizer.fingerprint,
        vocab_size=vocabulary_end(tokenizer),
        logits_size=vocabulary_end(tokenizer),
        eos_token_ids=tokenizer.eos_token_ids,
        protocol_version=PROTOCOL_VERSION,
        features=sorted(features),
        rules=[RULE_TO_WIRE[rule] for rule in rules],
        default_rule=RULE_TO_WIRE[DEFAULT_RULE],
        noise_version=NOISE_VERSION,
        limits=limits,
        server_version=installed_version(),
        has_chat_template=tokenizer.has_chat_template,
        chat_template_fingerprint=hashlib.sha256(template.encode()).hexdigest() if template else "",
        lossy_rules=[RULE_TO_WIRE[rule] for rule in rules if rule in LOSSY_RULES],
    )


def vocabulary_end(tokenizer: Tokenizer) -> int:
    """One above the largest token id of the tokenizer, added tokens included."""
    return 1 + max(tokenizer.vocabulary().values(), default=-1)


def check_pair(draft: model_pb2.ModelInfo, target: model_pb2.ModelInfo) -> None:
    """Checks that draft and target have the same tokens, and encoders of the same kind, or none.

    Padding of the logits may differ, and sizes of the encoders.

    Raises:
        RequestError: FAILED_PRECONDITION with both sides' numbers.
    """
    if draft.protocol_version != target.protocol_version:
        raise _mismatch("protocol versions", draft.protocol_version, target.protocol_version, _SAME_RELEASE)
    if draft.vocabulary_fingerprint != target.vocabulary_fingerprint:
        raise _mismatch(
            "vocabularies",
            f"{draft.name}: {draft.vocab_size} tokens, fingerprint {draft.vocabulary_fingerprint[:12]}",
            f"{target.name}: {target.vocab_size} tokens, fingerprint {target.vocabulary_fingerprint[:12]}",
            "choose a draft model with the target's tokenizer",
        )
    if draft.noise_version != target.noise_version:
        raise _mismatch("noise versions", draft.noise_version, target.noise_version, _SAME_RELEASE)
    if draft.weights_fingerprint and draft.encoder.kind != target.encoder.kind:  # else there is no draft model
        raise _mismatch(
            "encoders",
            f"{draft.name}: {_ENCODERS[draft.encoder.kind]}",
            f"{target.name}: {_ENCODERS[target.encoder.kind]}",
            "choose a draft model with an encoder like the target's",
        )


def check_required_features(required: Iterable[str], offered: Iterable[str]) -> None:
    """Checks `required_features` of a request.

    Raises:
        RequestError: FAILED_PRECONDITION, naming the unknown ones.
    """
    known = sorted(offered)
    unknown = sorted(set(required) - set(known))
    if unknown:
        raise failed_precondition(
            "UNKNOWN_FEATURE",
            f"required_features has {', '.join(map(repr, unknown))}; this service offers {', '.join(known) or 'none'}: "
            "leave it out, or upgrade the service",
            field="required_features",
        )


MAX_NAME_CHARS = 128


def check_name(field: str, name: str, *, required: bool = False) -> None:
    """Checks the name of a request or a sequence."""
    least = 1 if required else 0
    if not least <= len(name) <= MAX_NAME_CHARS:
        raise outside(field, len(name), least, MAX_NAME_CHARS, noun="character")


def check_fingerprint(fingerprint: str, target: model_pb2.ModelInfo) -> None:
    """Checks that the target has the requested fingerprint.

    Raises:
        RequestError: FAILED_PRECONDITION.
    """
    if fingerprint and fingerprint != target.weights_fingerprint:
        raise failed_precondition(
            "PAIR_MISMATCH",
            f"weights_fingerprint is {fingerprint[:16]}, and that of this target {target.weights_fingerprint[:16]}: "
            "resume at a service with the same weights and the same generation config, or begin a new text",
            field="weights_fingerprint",
        )


_ENCODERS = {
    model_pb2.ENCODER_KIND_UNSPECIFIED: "no encoder",
    model_pb2.ENCODER_KIND_TEXT: "an encoder of text",
    model_pb2.ENCODER_KIND_SPEECH: "an encoder of speech",
}
_SAME_RELEASE = "run the same release of both services"


def _mismatch(property_: str, draft: object, target: object, advice: str) -> RequestError:
    return failed_precondition(
        "PAIR_MISMATCH", f"draft and target differ in their {property_}: {draft} against {target}; {advice}"
    )


_BOUNDS = ("max_gamma", "max_support", "max_sequence_tokens", "max_stop_token_ids", "max_message_bytes")
_FINGERPRINT_COVERS = ": weights, config.json, or rules or end-of-sequence tokens of generation_config.json differ"


def check_target(model: model_pb2.ModelInfo, target: model_pb2.ModelInfo) -> str:
    """How `model` differs from the target in properties that a sequence depends on; empty if it does not.

    Requests are checked against the limits of the first verifier, so no other may have lower ones.
    """
    for field, name in (
        ("weights_fingerprint", "weights fingerprint"),
        ("vocabulary_fingerprint", "vocabulary fingerprint"),
        ("protocol_version", "protocol version"),
        ("noise_version", "noise version"),
    ):
        given, expected = str(getattr(model, field)), str(getattr(target, field))
        if given != expected:
            covers = _FINGERPRINT_COVERS if field == "weights_fingerprint" else ""
            return f"its {name} is {given[:16]}; it must be the first verifier's, {expected[:16]}{covers}"
    if model.encoder != target.encoder:
        return "its encoder, or the decoder prompt of its generation config, is not the first verifier's"
    missing = set(target.features) - set(model.features)
    lacking = set(target.rules) - set(model.rules)
    missing |= {RULES[number].value if number in RULES else str(number) for number in lacking}
    if missing:
        return f"it lacks features or rules of the first verifier: {', '.join(sorted(missing))}"
    return check_limits(model.limits, target.limits)


def check_limits(limits: model_pb2.Limits, expected: model_pb2.Limits) -> str:
    """Which of a verifier's limits is below that of the first one; empty if none is."""
    for bound in _BOUNDS:
        given, least = getattr(limits, bound), getattr(expected, bound)
        if given < least:
            return f"its limit {bound} is {given}; it must be at least the first verifier's, {least}"
    return ""
