"""A model of which this rank has some heads, with a pool of those: the same program and as many blocks on all ranks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from outrider.loading import Built, build_packed, model_source
from outrider.parallel.team import Team
from outrider.runtime.errors import CheckpointError, ModelLost
from outrider.runtime.loader import LoadedModel, load_model
from outrider.runtime.paged_attention import AttentionChoice
from outrider.settings import ServiceSettings


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


def build_sharded(
    settings: ServiceSettings,
    loaded: LoadedModel,
    length: int,
    team: Team,
    *,
    pass_tokens: int,
    behind: Callable[[Tensor], object] | None = None,
) -> Built:
    """The model in pages, run as transformers has it: its fused equivalents take the weights apart, which here are
    parts already. The pool has as many blocks as there is room for on every rank. All ranks call it with the same
    settings, and run the same passes.

    Args:
        settings: of the service.
        loaded: this rank's share of the model.
        length: positions of a sequence at most.
        team: the ranks.
        pass_tokens: rows of a pass at most.
        behind: what else is done with the logits of a pass, on this rank.

    Raises:
        CheckpointError: the attention asked for cannot run here, or another rank differs in what all must share.
        SettingsError: one sequence at its longest would not fit.
        ModelLost: a rank is gone.
    """

    def agree(choice: AttentionChoice, blocks: int) -> int:
        told = team.exchange(
            {
                "weights": loaded.weights_fingerprint,
                "dtype": str(loaded.dtype).removeprefix("torch."),
                "attention": choice.name,
                "tokens of a block": choice.block_tokens,
                "tokens of a sequence": length,
                "blocks": blocks,
            }
        )
        _check_alike(told)
        return min(int(each["blocks"]) for each in told)

    return build_packed(settings, loaded, length, pass_tokens=pass_tokens, behind=behind, sharing=agree)


def _check_alike(told: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(told):
        for name, value in each.items():
            if name != "blocks" and value != told[0][name]:
                raise CheckpointError(
                    f"the ranks differ in their {name}: {told[0][name]} on rank 0, {value} on rank {rank}"
                )
