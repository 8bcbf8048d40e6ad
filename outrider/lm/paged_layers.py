"""A gated decoder over pages: the layers of `outrider.lm.gated_layers`, with attention by tables between their halves.

Nothing in it waits for the device, or depends on numbers that lie there: a CUDA graph may hold it. It knows no weights
by name, and not who the sequences are.
"""

from torch import Tensor
from torch.nn.functional import embedding

from outrider.lm.gated_layers import GatedLayers
from outrider.lm.paged import PagedBatch


def run_paged(layers: GatedLayers, batch: PagedBatch, rotations: Tensor, rows: Tensor | None) -> Tensor:
    """Runs a pass.

    Args:
        layers: of the decoder.
        batch: the pass.
        rotations: e^(i · angle) of all positions there may be, `[max_length, 1, D/2]`, complex64.
        rows: indices of the rows that need logits, `[R]`; None is all.

    Returns:
        Logits `[R, V]`.
    """
    x = embedding(batch.tokens, layers.embedding).unsqueeze(1)  # [T, 1, E]
    heads, kv_heads, head_dim = layers.heads, layers.kv_heads, layers.head_dim
    rotation = rotations.index_select(0, batch.positions)
    for i in range(len(layers.qkv)):
        qkv = layers.queries_keys_values(i, x, rotation).view(len(x), -1, head_dim)
        query, keys, values = qkv.split([heads, kv_heads, kv_heads], 1)
        batch.write(i, keys, values)
        pages = batch.memory.keys[i], batch.memory.values[i]
        window = layers.windows[layers.mask_kind[i]]
        attended = batch.attention.attend(query.to(pages[0].dtype), *pages, batch, layers.scaling[i], window)
        x = layers.after_attention(i, x, attended)
    return layers.logits(x if rows is None else x.index_select(0, rows))
