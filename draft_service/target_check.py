"""Whether a verifier can stand in for another one, by what both say of their models."""

from protos.outrider.v1 import model_pb2

_BOUNDS = ("max_gamma", "max_support", "max_sequence_tokens", "max_stop_token_ids", "max_message_bytes")


def check_target(model: model_pb2.ModelInfo, target: model_pb2.ModelInfo) -> str:
    """How `model` differs from the target in what a sequence depends on; empty where it does not.

    Requests are checked against the limits of the first that was matched, so another one must take no less.
    """
    for field, what in (
        ("weights_fingerprint", "weights"),
        ("vocabulary_fingerprint", "vocabulary"),
        ("protocol_version", "protocol version"),
        ("noise_version", "noise version"),
    ):
        given, expected = str(getattr(model, field)), str(getattr(target, field))
        if given != expected:
            return f"its {what} is {given[:16]}; the target's is {expected[:16]}"
    for field in ("features", "rules"):
        missing = sorted(set(getattr(target, field)) - set(getattr(model, field)), key=str)
        if missing:
            return f"its {field} lack {', '.join(map(str, missing))}"
    for bound in _BOUNDS:
        given, expected = getattr(model.limits, bound), getattr(target.limits, bound)
        if given < expected:
            return f"its {bound} is {given}; the first verifier's is {expected}"
    return ""
