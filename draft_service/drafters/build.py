"""The drafters of a service, from its settings."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from draft_service.drafters.base import RUN_A_MODEL, CheapDrafter, Drafter, DrafterKind, DraftSequence
from draft_service.drafters.cheap import LookupDrafter, NoDrafter, RandomDrafter
from draft_service.drafters.engine import DraftEngine
from draft_service.drafters.guard import PROBE, GuardedDrafter
from draft_service.drafters.model import ModelDrafter
from draft_service.drafters.ngram import NGramDrafter
from draft_service.settings import DraftSettings
from kernels.sparse import SparseConfig
from outrider.runtime.gguf import is_gguf
from outrider.runtime.loader import LoadedModel
from outrider.runtime.ngram import read_documents
from outrider.runtime.tokenizer import Tokenizer
from outrider.service.sampling import TEMPERATURES
from outrider.service.settings import SettingsError
from protos.outrider.v1 import model_pb2


def check_settings(settings: DraftSettings) -> None:
    """Checks the settings of the drafters, before anything is loaded.

    Raises:
        SettingsError: a number is out of its range, the drafter has no text to count, or there is no corpus file.
    """
    least, given = TEMPERATURES[0], settings.draft_temperature
    if given is not None and 0 < given < least:
        raise SettingsError(f"--draft-temperature is {given:g}; it must be 0 or at least {least:g}")
    corpus = settings.ngram_corpus
    if corpus is not None and not corpus.is_file():
        raise SettingsError(f"--ngram-corpus is '{corpus}'; there is no such file")
    if corpus is not None or settings.ngram_learn:
        return
    staged_by_counts = loads_model(settings) and DrafterKind(settings.staged_by) is DrafterKind.NGRAM
    for is_set, flag in (
        (DrafterKind(settings.drafter) is DrafterKind.NGRAM, "--drafter"),
        (staged_by_counts, "--staged-by"),
    ):
        if is_set:
            raise SettingsError(
                f"{flag} ngram: there is no text to count; set --ngram-corpus FILE, --ngram-learn, or both"
            )


def loads_model(settings: DraftSettings) -> bool:
    """Whether the service runs a draft model."""
    return DrafterKind(settings.drafter) in RUN_A_MODEL


def default_kind(settings: DraftSettings, loaded: LoadedModel | None) -> DrafterKind:
    """The drafter of requests that name none: that of the settings; unset, `parallel` if the draft has a mask token.

    Raises:
        SettingsError: the settings name `parallel`, and the draft has no mask token.
    """
    kind, has_mask = DrafterKind(settings.drafter), loaded is not None and loaded.mask_token is not None
    if kind is DrafterKind.PARALLEL and not has_mask:
        why = "its config.json has neither pard_token nor ptd_token_id; give a draft that was trained for it"
        if is_gguf(settings.model):
            why = "a GGUF file keeps none; give a checkpoint folder"
        raise SettingsError(f"--drafter parallel: '{settings.model}' has no mask token: {why}, or --drafter model")
    return DrafterKind.PARALLEL if has_mask and "drafter" not in settings.model_fields_set else kind


def cheap_drafters(
    settings: DraftSettings, tokenizer: Tokenizer, target: model_pb2.ModelInfo, sparse: SparseConfig
) -> dict[DrafterKind, Drafter]:
    """The drafters without a draft model. `ngram` is among them if there is text to count.

    Raises:
        SettingsError: the corpus cannot be read.
    """
    drafters: dict[DrafterKind, Drafter] = {
        DrafterKind.LOOKUP: LookupDrafter(min_match=settings.lookup_min_match),
        DrafterKind.RANDOM: RandomDrafter(vocab_size=target.vocab_size, max_support=sparse.max_support),
        DrafterKind.NONE: NoDrafter(),
    }
    if settings.ngram_corpus is not None or settings.ngram_learn:
        documents = [] if settings.ngram_corpus is None else _documents(settings.ngram_corpus, settings)
        drafters[DrafterKind.NGRAM] = NGramDrafter(
            (tokenizer.encode(document) for document in documents),
            vocab_size=target.vocab_size,
            sparse=sparse,
            order=settings.ngram_order,
            entries=settings.ngram_entries,
            learns=settings.ngram_learn,
        )
    return drafters


def model_drafters(
    settings: DraftSettings, engine: DraftEngine, cheap: Mapping[DrafterKind, Drafter]
) -> dict[DrafterKind, Drafter]:
    """The drafters with a draft model; `parallel` is among them if it has a mask token. One of the `cheap` ones guesses
    for `staged`.
    """
    guesses = cheap[DrafterKind(settings.staged_by)]
    assert isinstance(guesses, CheapDrafter)
    drafters: dict[DrafterKind, Drafter] = {
        DrafterKind.MODEL: ModelDrafter(engine),
        DrafterKind.STAGED: ModelDrafter(engine, cheap=guesses),
    }
    if engine.mask_token is not None:
        drafters[DrafterKind.PARALLEL] = ModelDrafter(engine, parallel=True)
    return drafters


def guarded(
    drafters: Mapping[DrafterKind, Drafter],
    settings: DraftSettings,
    target: model_pb2.ModelInfo,
    sparse: SparseConfig,
    *,
    probe: DraftSequence = PROBE,
) -> dict[DrafterKind, GuardedDrafter]:
    """The same drafters, each with a guard that probes with the sequence `probe`."""
    return {
        kind: GuardedDrafter(
            drafter,
            timeout=settings.draft_timeout / 1000,
            vocab_size=target.vocab_size,
            max_support=sparse.max_support,
            name=kind,
            probe=probe,
        )
        for kind, drafter in drafters.items()
    }


def _documents(corpus: Path, settings: DraftSettings) -> Iterator[str]:
    try:
        yield from read_documents(corpus, by_line=settings.ngram_documents == "line")
    except (OSError, ValueError) as error:
        raise SettingsError(f"--ngram-corpus: cannot read '{corpus}' as UTF-8: {error}") from error
