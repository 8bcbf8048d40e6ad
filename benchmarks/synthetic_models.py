"""A pair of models of any shape with random weights that writes a known text, for GPU machines without a real pair.

The weights are made on the device. The layers add little to the residual stream, so at the head it is still close to
the embedding of the last token; and the head's row of each token is the embedding of the token before it. So the next
token is known, with a margin above any rounding of bfloat16, and a pass costs as much as that of a trained model. After
token x the target writes x + 1. So does the draft, except after tokens drawn beforehand, each with chance 1 - α. The
vocabulary has a region for each α; a text stays in the region of its prompt's last token.

A folder of such a model holds configuration and tokenizer; loading makes the weights again from a seed. As a program
this file runs one of Outrider's services on such a folder:

    python -m benchmarks.synthetic_models verifier_service --model FOLDER --listen 127.0.0.1:0
"""

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

from outrider.runtime.device import find_device
from outrider.runtime.loader import LoadedModel, ModelSource, adopt
from outrider.runtime.tokenizer import Tokenizer, load_tokenizer
from outrider.service.lifecycle import run
from outrider.service.settings import ServiceSettings, SettingsError

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_SEED = 1
_MISTAKES_SEED = 20_221_130
_DOCUMENT = "synthetic.json"
_RESIDUAL = 0.2  # the sum of all layers, beside an embedding whose values have a deviation of 1
_TOP = 32.0  # the logit of the next token; that of any other is normal, with a deviation of 32 / √hidden


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            architectures=["LlamaForCausalLM"],
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.hidden // self.heads,
            intermediate_size=self.mlp,
            vocab_size=self.vocab,
            max_position_embeddings=2048,
            tie_word_embeddings=False,  # the head is another matrix
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )

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
TINY_TARGET = Shape("tiny target", hidden=128, layers=2, heads=4, kv_heads=2, mlp=256, vocab=1024)


@dataclass(frozen=True, slots=True)
class KnownText:
    vocab: int
    alphas: tuple[float, ...]  # α in each region

    @property
    def region(self) -> int:
        return self.vocab // len(self.alphas)

    def target_next(self) -> Tensor:
        """The target's next token after each, int64 `[V]`: a permutation."""
        return (torch.arange(self.vocab) + 1) % self.vocab

    def mistakes(self) -> Tensor:
        """Whether the draft is wrong after each token, bool `[V]`."""
        regions = torch.arange(self.vocab).div(self.region, rounding_mode="floor").clamp(max=len(self.alphas) - 1)
        alphas = torch.tensor(self.alphas, dtype=torch.float64)[regions]
        drawn = torch.rand(self.vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(_MISTAKES_SEED))
        return drawn >= alphas

    def draft_next(self) -> Tensor:
        """The draft's next token after each, int64 `[V]`: a permutation too, which rotates the mistakes."""
        follows = self.target_next()
        wrong = self.mistakes().nonzero().flatten()
        if len(wrong) > 1:  # a single one cannot be exchanged
            follows[wrong] = follows[wrong.roll(-1)]
        return follows

    def prompt(self, alpha: float, number: int, *, length: int, output: int) -> tuple[int, ...]:
        """A prompt after which `output` tokens are in the region of `alpha`.

        Each `number` begins at another token; their texts do not overlap while the region is large enough.
        """
        texts = (self.region - 1) // (output + 1)
        if texts < 1:
            raise ValueError(f"{output} tokens do not fit a region of {self.region}")
        first = self.alphas.index(alpha) * self.region + (number % texts) * (output + 1)
        before = torch.randint(self.vocab, (length - 1,), generator=torch.Generator().manual_seed(number)).tolist()
        return (*before, first)


def target_text(prompt: Sequence[int], count: int, vocab: int) -> list[int]:
    return [(prompt[-1] + 1 + i) % vocab for i in range(count)]


def build(shape: Shape, text: KnownText, *, drafts: bool, device: torch.device, dtype: torch.dtype) -> Any:
    """A model of transformers, in eval mode; with `drafts`, the one that makes mistakes."""
    torch.manual_seed(_SEED)
    with torch.device(device), torch.inference_mode(False):
        model = AutoModelForCausalLM.from_config(shape.config(), dtype=dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.normal_(0.0, _RESIDUAL / (2 * shape.layers * weight.shape[1]) ** 0.5)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding.normal_(0.0, 1.0)
        follows = text.draft_next() if drafts else text.target_next()
        head[follows.to(device)] = embedding * (_TOP / shape.hidden)
    return model.eval().requires_grad_(False)


def loaded(shape: Shape, text: KnownText, *, drafts: bool, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """The same as Outrider runs it. Its fingerprint is of the arguments: devices draw other random weights."""
    model = build(shape, text, drafts=drafts, device=device, dtype=dtype)
    made_of = json.dumps([asdict(shape), asdict(text), drafts, _SEED], sort_keys=True)
    return adopt(model, f"synthetic {shape.name}", hashlib.sha256(made_of.encode()).hexdigest())


def save(folder: Path, shape: Shape, text: KnownText, *, drafts: bool) -> Path:
    """Writes a folder for `load`, and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    shape.config().save_pretrained(folder)
    words = Words(WordLevel({f"t{token}": token for token in range(shape.vocab)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained(folder)
    document = {"shape": asdict(shape), "alphas": text.alphas, "drafts": drafts}
    (folder / _DOCUMENT).write_text(json.dumps(document), encoding="utf-8")
    return folder


def load(settings: ServiceSettings) -> tuple[LoadedModel, Tokenizer]:
    """The model of a folder that `save` wrote, made on the device of the settings, and its tokenizer."""
    if settings.dtype not in DTYPES:
        raise SettingsError(f"--dtype {settings.dtype}: a synthetic model has {' or '.join(DTYPES)}")
    document = json.loads((Path(settings.model) / _DOCUMENT).read_text(encoding="utf-8"))
    shape = Shape(**document["shape"])
    text = KnownText(shape.vocab, tuple(document["alphas"]))
    device, dtype = find_device(settings.device), DTYPES[settings.dtype]
    return (
        loaded(shape, text, drafts=document["drafts"], device=device, dtype=dtype),
        load_tokenizer(ModelSource(settings.model)),
    )


def main() -> int:
    from draft_service.app import DraftApp
    from draft_service.settings import DraftSettings
    from verifier_service.app import VerifierApp
    from verifier_service.settings import VerifierSettings

    name, arguments = sys.argv[1], sys.argv[2:]
    if name == "verifier_service":
        target = VerifierSettings.from_command_line(arguments, program=name)
        return run(name, target, lambda: VerifierApp(target, load))
    draft = DraftSettings.from_command_line(arguments, program=name)
    return run(name, draft, lambda: DraftApp(draft, load))


if __name__ == "__main__":
    sys.exit(main())
