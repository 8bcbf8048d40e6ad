"""A model of which this rank has some heads, with a pool of those: the same program and as many blocks on all ranks."""

from typing import Any

import structlog
import torch

from outrider.lm.attention_choice import choose_attention
from outrider.lm.checkpoint import LoadedModel, load_model
from outrider.lm.errors import CheckpointError, ModelLost
from outrider.lm.kv_size import kv_dtype
from outrider.lm.packed import PackedModel
from outrider.loading import kv_blocks, model_source
from outrider.parallel.team import Team
from outrider.settings import ServiceSettings

_log = structlog.get_logger()


def load_share(settings: ServiceSettings, device: torch.device, team: Team) -> LoadedModel:
    """Loads this rank's share of the model, while the others load theirs: they have joined.

    Raises:
        CheckpointError: the model cannot be loaded or run.
        ModelLost: another rank is gone.
    """
    try:
        return load_model(model_source(settings, device=device, ranks=team.ranks.size))
    except CheckpointError as error:
        if isinstance(error.__cause__, RuntimeError):  # it ran: what broke may be another rank
            raise ModelLost(team.broke("the load broke", error)) from error
        raise


def build_sharded(settings: ServiceSettings, loaded: LoadedModel, length: int, team: Team) -> PackedModel:
    """The model in pages, run as transformers has it: its fused equivalents take the weights apart, which here are
    parts already. The pool has as many blocks as there is room for on every rank.

    Args:
        settings: of the service.
        loaded: this rank's share of the model.
        length: positions of a sequence at most.
        team: the ranks.

    Raises:
        CheckpointError: the attention asked for cannot run here, or another rank differs in what all must share.
        SettingsError: one sequence at its longest would not fit.
        ModelLost: a rank is gone.
    """
    choice = choose_attention(settings.attention, loaded.layers, kv_dtype(loaded), loaded.device, paged=True)
    _log.info("attending", attention=choice.name, reason=choice.reason, block_tokens=choice.block_tokens)
    told = team.exchange(
        {
            "weights": loaded.weights_fingerprint,
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "attention": choice.name,
            "tokens of a block": choice.block_tokens,
            "tokens of a sequence": length,
            "blocks": kv_blocks(settings, loaded, choice.block_tokens),
        }
    )
    _check_alike(told)
    blocks = min(int(each["blocks"]) for each in told)
    return PackedModel.build(loaded, settings.max_sequences, length, blocks=blocks, fuse=False, attention=choice)


def _check_alike(told: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(told):
        for name, value in each.items():
            if name != "blocks" and value != told[0][name]:
                raise CheckpointError(
                    f"the ranks differ in their {name}: {told[0][name]} on rank 0, {value} on rank {rank}"
                )
