"""Planted models: dense random weights of any shape, made on the device, whose head writes a known text.

All weights are random. Those that a layer adds to the residual stream through are small, so the stream still tells the
last token when it comes to the head; and each row of the head is the embedding of the token that its own is to follow.
So the next token is known, with a margin that no rounding of bfloat16 comes near, while a pass reads and computes as
much as that of a trained model. What such a model writes is no language.

After token x the target writes x + 1. So does the draft, except after some tokens drawn beforehand, each with chance
1 - α by itself: there it is wrong. The vocabulary is cut into as many regions as there are rates, and a text stays in
the region that it begins in: which α holds for a text is a matter of its prompt's last token.

A folder holds configuration, tokenizer and plant, and no weights: loading makes them anew, from a seed. As a program
this file is a service of ours on such a folder; only the weights come otherwise:

    python -m benchmarks.planted verifier_service --model FOLDER --listen 127.0.0.1:0
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Words
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from draft_service.app import DraftApp
from draft_service.settings import DraftSettings
from outrider.runtime.device import find_device
from outrider.runtime.loader import LoadedModel, ModelSource, adopt
from outrider.runtime.tokenizer import Tokenizer, load_tokenizer
from outrider.service.lifecycle import run
from outrider.service.settings import ServiceSettings, SettingsError
from verifier_service.app import VerifierApp
from verifier_service.settings import VerifierSettings

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CONTEXT = 2048
_SEED = 1
_MISTAKES_SEED = 20_221_130
_PLANT = "planted.json"
_QUIET = 0.2  # what all layers together add, beside an embedding whose values have a deviation of 1
_TOP = 32.0  # the logit of the token that follows; that of any other is normal, with a deviation of 32 / √hidden


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int

    def config(self) -> dict[str, Any]:
        """Arguments of `LlamaConfig`. Embedding and head are apart: a planted head is another matrix."""
        return {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
            "intermediate_size": self.mlp,
            "vocab_size": self.vocab,
            "max_position_embeddings": CONTEXT,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }

    @property
    def weights_read(self) -> int:
        """Parameters that a pass over one token reads: all of them, but of the embedding one row."""
        head = self.hidden // self.heads
        attention = self.hidden * head * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.mlp + 2 * self.hidden
        return self.layers * layer + self.hidden + self.hidden * self.vocab + self.hidden


LLAMA_1B = Shape("1B", hidden=2048, layers=16, heads=32, kv_heads=8, mlp=8192, vocab=128_256)
LLAMA_8B = Shape("8B", hidden=4096, layers=32, heads=32, kv_heads=8, mlp=14_336, vocab=128_256)
LLAMA_13B = Shape("13B", hidden=5120, layers=40, heads=40, kv_heads=40, mlp=13_824, vocab=32_000)

TINY_DRAFT = Shape("tiny draft", hidden=64, layers=1, heads=2, kv_heads=1, mlp=96, vocab=1024)
TINY_TARGET = Shape("tiny target", hidden=128, layers=2, heads=4, kv_heads=2, mlp=192, vocab=1024)


@dataclass(frozen=True, slots=True)
class Plant:
    """What a pair was planted with.

    Attributes:
        vocab: V.
        alphas: the rate of acceptance in each region, each in [0, 1].

    Raises:
        ValueError: a rate is none, or there are fewer than 16 tokens for each.
    """

    vocab: int
    alphas: tuple[float, ...]

    def __post_init__(self) -> None:
        for alpha in self.alphas:
            if not 0 <= alpha <= 1:
                raise ValueError(f"an alpha is {alpha}; each must lie in [0, 1]")
        if not self.alphas or self.region < 16:
            raise ValueError(f"{self.vocab} tokens for {len(self.alphas)} rates; each needs 16 at the least")

    @property
    def region(self) -> int:
        return self.vocab // max(1, len(self.alphas))

    def successors(self) -> Tensor:
        """What the target writes after each token, int64 `[V]`: a permutation."""
        return (torch.arange(self.vocab) + 1) % self.vocab

    def wrong(self) -> Tensor:
        """After which tokens the draft is wrong, bool `[V]`."""
        places = torch.arange(self.vocab).div(self.region, rounding_mode="floor").clamp(max=len(self.alphas) - 1)
        alphas = torch.tensor(self.alphas, dtype=torch.float64)[places]
        drawn = torch.rand(self.vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(_MISTAKES_SEED))
        return drawn >= alphas

    def drafted(self) -> Tensor:
        """What the draft writes after each token, int64 `[V]`: a permutation too, its mistakes a turn of their own."""
        successors = self.successors()
        mistakes = self.wrong().nonzero().flatten()
        if len(mistakes) > 1:  # a single one has nothing to change places with
            successors[mistakes] = successors[mistakes.roll(-1)]
        return successors

    def prompt(self, alpha: float, number: int, *, length: int, output: int) -> tuple[int, ...]:
        """A prompt after which `output` tokens can be written in the region of `alpha`.

        Prompts of other numbers begin elsewhere, as long as the region has room for texts that do not overlap.

        Raises:
            ValueError: no region has this rate, or a text is longer than it.
        """
        if alpha not in self.alphas:
            raise ValueError(f"alpha is {alpha}; this pair is planted with {', '.join(map(str, self.alphas))}")
        texts = (self.region - 1) // (output + 1)
        if texts < 1:
            raise ValueError(f"{output} tokens do not fit a region of {self.region}")
        first = self.alphas.index(alpha) * self.region + (number % texts) * (output + 1)
        source = torch.Generator().manual_seed(number)
        before = torch.randint(self.vocab, (length - 1,), generator=source).tolist()
        return (*before, first)


def written(prompt: Sequence[int], count: int, vocab: int) -> list[int]:
    return [(prompt[-1] + 1 + i) % vocab for i in range(count)]


def build(shape: Shape, plant: Plant, *, drafts: bool, device: torch.device, dtype: torch.dtype) -> Any:
    """A model of transformers, in eval mode; `drafts`: the one that is wrong at times.

    Raises:
        ValueError: shape and plant are of different vocabularies.
    """
    if shape.vocab != plant.vocab:
        raise ValueError(f"{shape.name} has {shape.vocab} tokens, its plant {plant.vocab}")
    torch.manual_seed(_SEED)
    with torch.device(device), torch.inference_mode(False):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**shape.config()), dtype=dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.normal_(0.0, _QUIET / (2 * shape.layers * weight.shape[1]) ** 0.5)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding.normal_(0.0, 1.0)
        follows = plant.drafted() if drafts else plant.successors()
        head[follows.to(device)] = embedding * (_TOP / shape.hidden)
    return model.eval().requires_grad_(False)


def loaded(shape: Shape, plant: Plant, *, drafts: bool, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """The same as Outrider runs it."""
    model = build(shape, plant, drafts=drafts, device=device, dtype=dtype)
    return adopt(model, f"planted {shape.name}", _fingerprint(shape, plant, drafts))


def save(folder: Path, shape: Shape, plant: Plant, *, drafts: bool) -> Path:
    """Writes what `load` makes the model of, and returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    LlamaConfig(**shape.config(), architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    words = Words(WordLevel({f"t{token}": token for token in range(shape.vocab)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained(folder)
    document = {"shape": asdict(shape), "plant": asdict(plant), "drafts": drafts}
    (folder / _PLANT).write_text(json.dumps(document), encoding="utf-8")
    return folder


def load(settings: ServiceSettings) -> tuple[LoadedModel, Tokenizer]:
    """The model of a folder that `save` wrote, made on the device of the settings, and its tokenizer.

    Raises:
        CheckpointError: it cannot run, or its tokenizer cannot be read.
        OSError: the folder is no such folder.
        SettingsError: the settings name no number format that it can have.
    """
    if settings.dtype not in DTYPES:
        raise SettingsError(f"--dtype {settings.dtype}: a planted model has {' or '.join(DTYPES)}")
    document = json.loads((Path(settings.model) / _PLANT).read_text(encoding="utf-8"))
    device = find_device(settings.device)
    model = loaded(
        Shape(**document["shape"]),
        Plant(document["plant"]["vocab"], tuple(document["plant"]["alphas"])),
        drafts=document["drafts"],
        device=device,
        dtype=DTYPES[settings.dtype],
    )
    return model, load_tokenizer(ModelSource(settings.model))


def _fingerprint(shape: Shape, plant: Plant, drafts: bool) -> str:
    """Of what the weights are made of: the same text and cost, whatever device drew the random numbers."""
    made_of = json.dumps([asdict(shape), asdict(plant), drafts, _SEED], sort_keys=True)
    return hashlib.sha256(made_of.encode()).hexdigest()


def main() -> int:
    """Runs the service that the first argument names; returns the exit code."""
    name, arguments = sys.argv[1], sys.argv[2:]
    if name == "verifier_service":
        target = VerifierSettings.from_command_line(arguments, program=name)
        return run(name, target, lambda: VerifierApp(target, load))
    draft = DraftSettings.from_command_line(arguments, program=name)
    return run(name, draft, lambda: DraftApp(draft, load))


if __name__ == "__main__":
    sys.exit(main())
