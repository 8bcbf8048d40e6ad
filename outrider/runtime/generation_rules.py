"""Reads the rules of `generate` for the logits of an encoder–decoder model from transformers' generation config."""

from collections.abc import Iterable
from typing import Any

from kernels.generation_rules import GenerationRules, TimestampRules
from outrider.runtime.errors import CheckpointError

# Options that change the text and are not supported, with the values, besides None, that turn each off.
_NOT_DONE: dict[str, tuple[object, ...]] = {
    "guidance_scale": (1,),
    "sequence_bias": (),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "exponential_decay_length_penalty": (),
    "constraints": (),
    "force_words_ids": (),
    "diversity_penalty": (0,),
    "num_beam_groups": (0, 1),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "token_healing": (False,),
    "watermarking_config": (),
    "_detect_timestamp_from_logprob": (True,),
}
_NOT_DONE_IF_SAMPLING: dict[str, tuple[object, ...]] = {
    "top_h": (),
    "typical_p": (1,),
    "epsilon_cutoff": (0, 1),
    "eta_cutoff": (0, 1),
}
_NOT_DONE_BY_WHISPER = ("forced_bos_token_id", "forced_eos_token_id")  # it orders the rules in a way of its own


def read(generation_config: Any, config: Any) -> GenerationRules | None:
    """The rules of a model; None for a decoder-only model, or if there are none.

    Ignored are beams, since the services sample or take the best token; temperature, top-k, top-p and min-p, which the
    request decides; and `remove_invalid_values`, since bad logits end a sequence. Whisper's timestamp rules are always
    among the rules: the decoder's prompt decides whether they hold, as in transformers.

    Raises:
        CheckpointError: options are set that Outrider does not support. The text names all of them.
    """
    if not config.is_encoder_decoder:
        return None
    is_whisper = hasattr(generation_config, "no_timestamps_token_id")
    refused = _refused(generation_config, is_whisper)
    if refused:
        raise CheckpointError(
            f"generation_config.json of this '{config.model_type}' model sets {', '.join(refused)}, which Outrider "
            "does not support; remove it from the file to serve the model without it"
        )
    given = generation_config
    rules = GenerationRules(
        repetition_penalty=1.0 if given.repetition_penalty is None else float(given.repetition_penalty),
        suppressed=_sorted(given.suppress_tokens),
        begin_suppressed=_sorted(given.begin_suppress_tokens),
        bad_words=tuple(sorted({tuple(word) for word in given.bad_words_ids or ()})),
        no_repeat_ngram_size=given.no_repeat_ngram_size or 0,
        min_length=given.min_length or 0,
        min_new_tokens=given.min_new_tokens,
        eos_tokens=_sorted(_ids(given.eos_token_id)),
        forced_bos=given.forced_bos_token_id,
        forced_eos=next(iter(_ids(given.forced_eos_token_id)), None),
        timestamps=_timestamps(given) if is_whisper else None,
    )
    try:
        rules.check_ids(getattr(config, "decoder_vocab_size", None) or config.vocab_size)
    except ValueError as error:
        raise CheckpointError(f"generation_config.json of this '{config.model_type}' model: {error}") from error
    return None if rules == GenerationRules(eos_tokens=rules.eos_tokens) else rules


def _refused(given: Any, is_whisper: bool) -> list[str]:
    """The options that are set and not done, with their values."""
    table = _NOT_DONE | (_NOT_DONE_IF_SAMPLING if given.do_sample else {})
    names = [
        name
        for name, off in table.items()
        if (value := getattr(given, name, None)) is not None and not any(value == each for each in off)
    ]
    if is_whisper:
        names += [name for name in _NOT_DONE_BY_WHISPER if getattr(given, name) is not None]
    if len(_ids(given.forced_eos_token_id)) > 1:
        names.append("forced_eos_token_id")
    if is_whisper and len(_eos_of_whisper(given)) != 1:
        names.append("eos_token_id")
    return [f"{name} ({getattr(given, name)})" for name in dict.fromkeys(names)]


def _timestamps(given: Any) -> TimestampRules:
    (eos,) = _eos_of_whisper(given)
    return TimestampRules(given.no_timestamps_token_id + 1, eos, getattr(given, "max_initial_timestamp_index", None))


def _eos_of_whisper(given: Any) -> tuple[int, ...]:
    return _ids(given.eos_token_id or given.bos_token_id)


def _sorted(ids: Iterable[int] | None) -> tuple[int, ...]:
    """A set of ids: configs with the same rules have the same `GenerationRules`."""
    return tuple(sorted(set(ids or ())))


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
