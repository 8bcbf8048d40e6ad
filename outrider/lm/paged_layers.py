"""A gated decoder over pages: the layers of `outrider.lm.gated_layers`, with attention by tables between their halves.

Nothing in it waits for the device, or depends on numbers that lie there: a CUDA graph may hold it. It knows no weights
by name, and not who the sequences are.
"""

from torch import Tensor
from torch.nn.functional import embedding

from outrider.lm.gated_layers import GatedLayers
from outrider.lm.layer_ops import LayerOps
from outrider.lm.linear import linear, linear_add
from outrider.lm.paged import PagedBatch
from outrider.lm.scoring import Scoring


def run_paged(layers: GatedLayers, ops: LayerOps, batch: PagedBatch, rotations: Tensor, rows: Tensor | None) -> Tensor:
    """Runs a pass.

    Args:
        layers: of the decoder.
        ops: what they do between their products.
        batch: the pass.
        rotations: e^(i · angle) of all positions there may be, `[max_length, 1, D/2]`, complex64.
        rows: indices of the rows that need logits, `[R]`; None is all.

    Returns:
        Logits `[R, V]`.
    """
    x = embedding(batch.tokens, layers.embedding).unsqueeze(1)  # [T, 1, E]
    angles, packed = ops.angles(rotations, batch.positions), layers.packed
    for i in range(len(layers.qkv)):
        normed = ops.norm(x, layers.attention_norm[i])
        query = ops.queries(i, linear(normed, layers.qkv[i], layers.qkv_bias[i], packed), angles, batch)
        pages = batch.memory.keys[i], batch.memory.values[i]
        scoring = Scoring(layers.scaling[i], layers.windows[layers.mask_kind[i]])
        attended = batch.attention.attend(query, *pages, batch, scoring)
        attended = attended.to(x.dtype).reshape(len(x), 1, -1)
        x = linear_add(x, attended, layers.output[i], layers.output_bias[i], packed)
        normed = ops.norm(x, layers.mlp_norm[i])
        gated = ops.gated(linear(normed, layers.gate_up[i], layers.gate_up_bias[i], packed))
        x = linear_add(x, gated, layers.down[i], layers.down_bias[i], packed)
    return layers.logits(x if rows is None else x.index_select(0, rows))
