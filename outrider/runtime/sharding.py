"""Loads a model's share of one rank by transformers' tensor-parallel plan, or says in one line why it cannot."""

import inspect
from typing import Any

from outrider.runtime.errors import CheckpointError


def sharding(config: Any, name: str, quantisation: str | None, ranks: int) -> dict[str, Any]:
    """What `from_pretrained` takes so that this process gets its share; nothing where there is one rank. The process
    group must be there by then.

    Args:
        config: of the checkpoint.
        name: what to call it in an error.
        quantisation: the method its weights are quantised by, if any.
        ranks: how many share the model.

    Raises:
        CheckpointError: it cannot be shared so.
    """
    if ranks == 1:
        return {}
    flag = f"--tensor-parallel-size {ranks}"
    if quantisation is not None:
        raise CheckpointError(
            f"{flag}: the weights of '{name}' are quantised by '{quantisation}', and only plain ones "
            "are shared among ranks"
        )
    text = config.get_text_config()
    if not (getattr(text, "base_model_tp_plan", None) or getattr(config, "base_model_tp_plan", None)):
        raise CheckpointError(f"{flag}: transformers has no tensor-parallel plan for '{text.model_type}'")
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if heads % ranks or kv_heads % ranks:
        raise CheckpointError(
            f"{flag}: '{name}' has {heads} attention heads and {kv_heads} of keys and values, and must divide both"
        )
    from transformers.distributed import DistributedConfig  # not in every release that runs a model in one process

    if "tp_size" not in inspect.signature(DistributedConfig).parameters:
        raise CheckpointError(f"{flag}: this transformers is too old to share a model among ranks by its own plan")
    return {"distributed_config": DistributedConfig(tp_size=ranks)}
