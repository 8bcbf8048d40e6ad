"""What a parallel draft computes: the distributions after real tokens and after the mask tokens that follow them.

The sequence of one pass is real tokens, then masks, at contiguous positions. The last real token gives q_1, mask i
gives q_{i+1}; a mask sees the real tokens before it and the masks before it. It works on Llama modules, for any text.

Here many passes share one forward call: the text is computed once, and behind each of several anchors stands a group
of masks that sees the text up to its anchor and itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaForCausalLM


@dataclass(frozen=True)
class Groups:
    """Groups of masks behind a text: mask n stands behind `anchors[n]`, number `offsets[n]` (from 1) of its group."""

    groups: Tensor  # [M]
    anchors: Tensor  # [M]
    offsets: Tensor  # [M]

    @property
    def rows(self) -> Tensor:
        """`[M]`: the position in the text whose next token a mask predicts."""
        return self.anchors + self.offsets


def groups_of(anchors: Sequence[int], sizes: Sequence[int]) -> Groups:
    """A group of `sizes[n]` masks behind each of `anchors`."""
    counts = torch.tensor(sizes)
    numbers = torch.arange(len(sizes)).repeat_interleave(counts)
    begins = (counts.cumsum(0) - counts)[numbers]
    return Groups(numbers, torch.tensor(anchors)[numbers], torch.arange(len(numbers)) - begins + 1)


def attention_mask(length: int, groups: Groups, dtype: torch.dtype) -> Tensor:
    """`[1, 1, length + M, length + M]`, 0 where the row may see the column and -inf where not."""
    text = torch.arange(length)
    masks = len(groups.anchors)
    seen = torch.zeros(length + masks, length + masks, dtype=torch.bool)
    seen[:length, :length] = text[None] <= text[:, None]
    seen[length:, :length] = text[None] <= groups.anchors[:, None]
    same = groups.groups[None] == groups.groups[:, None]
    seen[length:, length:] = same & (groups.offsets[None] <= groups.offsets[:, None])
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))[None, None]


def parallel_logits(model: LlamaForCausalLM, ids: Tensor, groups: Groups, mask_token: int) -> tuple[Tensor, Tensor]:
    """The logits after each of `ids` `[B, L]` and after each mask: `[B, L, V]` and `[B, M, V]`, without the mask's own.

    The mask token is the last of the embedding's rows, so V is `mask_token`.
    """
    length = ids.shape[1]
    masks = torch.full((len(ids), len(groups.anchors)), mask_token)
    positions = torch.cat([torch.arange(length), groups.rows])
    states = model.model(
        input_ids=torch.cat([ids, masks], dim=1),
        position_ids=positions[None],
        attention_mask=attention_mask(length, groups, model.dtype),
        use_cache=False,
    ).last_hidden_state
    logits = model.lm_head(states)[..., :mask_token].float()
    return logits[:, :length], logits[:, length:]


def with_mask_token(draft: LlamaForCausalLM) -> LlamaForCausalLM:
    """The draft with one more embedding row, the mask's, named in its config; one that has it already stays as it is.

    The row begins as the mean of the others. No tokenizer knows it.
    """
    if getattr(draft.config, "pard_token", None) is None:
        mask_token = draft.config.vocab_size
        draft.resize_token_embeddings(mask_token + 1, mean_resizing=False)
        rows = draft.model.embed_tokens.weight.data
        rows[mask_token] = rows[:mask_token].float().mean(dim=0)
        draft.config.pard_token = mask_token
    return draft
