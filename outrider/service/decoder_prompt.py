"""The first tokens of the decoder of an encoder–decoder model, by its generation config."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from outrider.rpc.errors import RequestError, invalid_field
from protos.outrider.v1 import draft_service_pb2

_TRANSCRIBE = "transcribe"


@dataclass(frozen=True, slots=True)
class DecoderPrompts:
    """The start token of a decoder, and the tokens that the generation config forces after it.

    For a speech model with languages these are language, task and, without timestamps, a token for that.

    Attributes:
        forced: tokens that follow it in a model without languages and tasks.
        languages: token of each language, by the name "<|en|>".
        no_timestamps: the token that turns timestamps off; None if the model has none.
        language: the default language, a name in `languages`; empty without languages.
        task: the default task, a name in `tasks`; empty without tasks.
    """

    start: int
    forced: tuple[int, ...] = ()
    languages: Mapping[str, int] = field(default_factory=dict)
    tasks: Mapping[str, int] = field(default_factory=dict)
    no_timestamps: int | None = None
    language: str = ""
    task: str = ""

    @classmethod
    def read(cls, config: Any, start_token: int) -> Self:
        """Reads a `GenerationConfig` of transformers. `start_token` is that of the model, if the config has none."""
        own = getattr(config, "decoder_start_token_id", None)
        languages = dict(getattr(config, "lang_to_id", None) or {})
        tasks = dict(getattr(config, "task_to_id", None) or {})
        forced = dict(getattr(config, "forced_decoder_ids", None) or {})
        tokens = [forced[position] for position in range(1, 1 + len(forced)) if forced.get(position) is not None]
        no_timestamps = getattr(config, "no_timestamps_token_id", None)
        language, task = getattr(config, "language", None), str(getattr(config, "task", None))
        return cls(
            start=start_token if own is None else own,
            forced=() if languages or tasks else tuple(token for token in tokens if token != no_timestamps),
            languages=languages,
            tasks=tasks,
            no_timestamps=no_timestamps,
            language=_spelled(_code(language), languages) or _default(languages, tokens),
            task=task if task in tasks else _default(tasks, tokens, preferred=_TRANSCRIBE),
        )

    def tokens(self, language: str = "", task: str = "", *, timestamps: bool = False) -> list[int]:
        """The tokens for a language and a task of the model; empty names are its defaults."""
        tokens = [self.start, *self.forced]
        tokens += [self.languages[language or self.language]] if self.languages else []
        tokens += [self.tasks[task or self.task]] if self.tasks else []
        if self.no_timestamps is not None and not timestamps:
            tokens.append(self.no_timestamps)
        return tokens

    def transcription(self, message: draft_service_pb2.Transcription) -> list[int]:
        """The tokens for a request.

        Raises:
            RequestError: INVALID_ARGUMENT: the model lacks the language or the task, or has no timestamps.
        """
        language = _spelled(message.language, self.languages)
        if message.language and not language:
            raise _unknown("language", message.language, [name.strip("<|>") for name in self.languages])
        if message.task and message.task not in self.tasks:
            raise _unknown("task", message.task, list(self.tasks))
        if message.timestamps and self.no_timestamps is None:
            raise invalid_field(
                "transcription.timestamps", "transcription.timestamps is set; the model writes none: unset it"
            )
        return self.tokens(language, message.task, timestamps=message.timestamps)


def _spelled(language: object, languages: Mapping[str, int]) -> str:
    """The name in `languages` of "en" or "<|en|>"; empty if there is none."""
    name = language.lower() if isinstance(language, str) else ""
    return next((each for each in (name, f"<|{name}|>") if each in languages), "")


def _code(language: object) -> object:
    """The code of a language that a generation config names in English; anything else unchanged."""
    if not isinstance(language, str):
        return language
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE  # text models do without

    return TO_LANGUAGE_CODE.get(language.lower(), language)


def _default(names: Mapping[str, int], forced: list[int], preferred: str = "") -> str:
    """The name whose token is forced; else the preferred one; else that with the lowest token. Empty without names."""
    return min(names, key=lambda name: (names[name] not in forced, name != preferred, names[name]), default="")


def _unknown(name: str, given: str, known: list[str]) -> RequestError:
    field = f"transcription.{name}"
    offered = ", ".join(sorted(known)) if known else "none"
    return invalid_field(
        field, f"{field} is {given[:64]!r}; the model offers {offered}", given=given[:64], offered=offered
    )
