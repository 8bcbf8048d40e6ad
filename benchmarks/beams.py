"""Beam search with drafts [L A.4]: the passes of the target that it saves on the demo pair, in float32.

A pass of the target reads its w beams and a tree of drafts: γ steps of beam search with the draft, of width u ≥ w, so
w + uγ tokens at the most. Transformers' `generate` chooses the beams as ever, by the target's logits. While all w beams
of a step are in the tree, the step needs no pass. Every text is compared with `generate` on the target alone.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from benchmarks import harness, plots
from benchmarks.contenders import load_model, tokenised
from benchmarks.harness import Bench, Json, number, percent, progress
from models import ngram
from models.corpus import training_text
from models.tokenizer import load_tokenizer
from outrider.evaluation import pictures

Text = tuple[int, ...]
"""Token ids from the first of the prompt on."""


class Draft(Protocol):
    def log_probs(self, texts: Sequence[Text]) -> Tensor:
        """The log-probabilities after each text, `[N, V]`."""

    def keep(self, texts: Iterable[Text]) -> None:
        """All texts that come begin as one of these."""


class Tree:
    """A causal model whose KV cache holds texts with common beginnings, each token once.

    Attributes:
        logits: after each text of the tree, float32 `[V]`.
        passes: of the model.
        read_tokens: in all of them.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)
        self._places: dict[Text, list[int]] = {(): []}  # of each text's tokens in the cache
        self.logits: dict[Text, Tensor] = {}
        self.passes = self.read_tokens = 0

    @torch.inference_mode()
    def read(self, texts: Iterable[Text]) -> None:
        """Adds the texts, in one pass for all that is new."""
        used = self._cache.get_seq_length()
        new: list[Text] = []
        for text in texts:
            known = next(n for n in range(len(text), -1, -1) if text[:n] in self._places)
            for n in range(known, len(text)):
                self._places[text[: n + 1]] = [*self._places[text[:n]], used + len(new)]
                new.append(text[: n + 1])
        if not new:
            return
        mask = torch.full((len(new), used + len(new)), -torch.inf)
        for row, text in zip(mask, new, strict=True):
            row[self._places[text]] = 0
        logits = self._model(
            input_ids=torch.tensor([[text[-1] for text in new]]),
            position_ids=torch.tensor([[len(text) - 1 for text in new]]),
            attention_mask=mask[None, None],
            past_key_values=self._cache,
        ).logits[0]
        self.logits |= zip(new, logits.float(), strict=True)
        self.passes += 1
        self.read_tokens += len(new)

    def log_probs(self, texts: Sequence[Text]) -> Tensor:
        self.read(texts)
        return torch.stack([self.logits[text] for text in texts]).log_softmax(-1)

    def keep(self, texts: Iterable[Text]) -> None:
        """Forgets all but the texts and their beginnings."""
        kept = {text[:n] for text in texts for n in range(len(text) + 1)} & self._places.keys()
        places = sorted({place for text in kept for place in self._places[text]})
        moved = {place: nth for nth, place in enumerate(places)}
        self._places = {text: [moved[place] for place in self._places[text]] for text in kept}
        self.logits = {text: self.logits[text] for text in kept if text}
        for layer in self._cache.layers if places else ():
            layer.keys, layer.values = layer.keys[:, :, places], layer.values[:, :, places]


class Bigram:
    def __init__(self, log_probs: Tensor) -> None:
        """`log_probs` `[V, V]`: a row for each token, of the token after it."""
        self._log_probs = log_probs

    def log_probs(self, texts: Sequence[Text]) -> Tensor:
        return self._log_probs[[text[-1] for text in texts]]

    def keep(self, texts: Iterable[Text]) -> None:
        pass


def drafted(draft: Draft, beams: Mapping[Text, float], width: int, gamma: int) -> list[Text]:
    """All beams of γ steps of beam search with the draft; the first step begins with `beams` and their scores."""
    found: list[Text] = []
    for _ in range(gamma):
        texts = list(beams)
        scores = draft.log_probs(texts) + torch.tensor(list(beams.values()))[:, None]
        best = scores.flatten().topk(width)
        at = [divmod(index, scores.shape[1]) for index in best.indices.tolist()]
        beams = {(*texts[beam], token): score for (beam, token), score in zip(at, best.values.tolist(), strict=True)}
        found += beams
    return found


class DraftedBeams(PreTrainedModel, GenerationMixin):
    """Stands in for the target in one call of `generate(num_beams=w, use_cache=False)`.

    Attributes:
        target: with its passes.
        steps: of beam search, each a pass of the target alone.
    """

    _supports_sdpa = True  # as the target

    def __init__(self, target: Any, draft: Draft, *, width: int, gamma: int) -> None:
        """`width` is u, the beams of the draft."""
        super().__init__(target.config)
        self.generation_config = target.generation_config
        self.model = target
        self.target = Tree(target)
        self.steps = 0
        self._draft, self._width, self._gamma = draft, width, gamma
        self._prompt = 0

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutput:
        """The target's logits after each beam, `[w, 1, V]`; `input_ids` `[w, L]` are whole texts."""
        rows = [tuple(row) for row in input_ids.tolist()]
        self._prompt = self._prompt or len(rows[0])
        self.steps += 1
        beams = dict.fromkeys(rows)  # the first step has one beam
        if not beams.keys() <= self.target.logits.keys():
            self.target.keep(beams)
            self._draft.keep(beams)
            scores = {beam: self._score(beam) for beam in beams}
            self.target.read([*beams, *drafted(self._draft, scores, self._width, self._gamma)])
        return CausalLMOutput(logits=torch.stack([self.target.logits[row] for row in rows])[:, None])

    def _score(self, beam: Text) -> float:
        log_probs = (self.target.logits[beam[:n]].log_softmax(-1) for n in range(self._prompt, len(beam)))
        return sum(float(each[token]) for each, token in zip(log_probs, beam[self._prompt :], strict=True))


def search(model: Any, prompt: Text, beams: int, new_tokens: int, **options: Any) -> list[int]:
    """The new tokens of transformers' beam search."""
    ids = torch.tensor([prompt])
    how = {"do_sample": False, "num_beams": beams, "max_new_tokens": new_tokens, "pad_token_id": 0} | options
    found: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **how)[0, len(prompt) :].tolist()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("beams", __doc__, quick="two beams, few tokens")
    # w, u over w, steps of a draft, and the training text that the bigram counts.
    parser.set_defaults(prompts=6, new_tokens=32, beams=[2, 4, 8], wider=[1, 2, 4], gammas=[2, 4, 8], corpus_mb=4.0)
    few = {"prompts": 1, "new_tokens": 8, "beams": [2], "wider": [1, 2], "gammas": [2], "corpus_mb": 0.1}
    given = harness.parse(parser, arguments, few)
    return harness.run(
        "beams", given, measure, harness.summary_of(("draft", "beams", "wider", "gamma"), figures), table, draw
    )


def measure(bench: Bench) -> None:
    given = bench.given
    torch.set_num_threads(1)
    target, draft = (load_model(folder, torch.float32) for folder in (given.target, given.draft))
    bigram = _bigram(given.target, given.corpus_mb)
    for nth, prompt in enumerate(tokenised(given.target, bench.some_prompts)):
        for beams in given.beams:
            keys = {"prompt": nth, "beams": beams}
            alone = search(target, prompt, beams, given.new_tokens)
            for name in ("model", "bigram"):
                for wider, gamma in ((u, gamma) for u in given.wider for gamma in given.gammas):
                    at = keys | {"draft": name, "wider": wider, "gamma": gamma}
                    if bench.has(**at):
                        continue
                    made = Tree(draft) if name == "model" else Bigram(bigram)
                    model = DraftedBeams(target, made, width=wider * beams, gamma=gamma).eval()
                    same = search(model, prompt, beams, given.new_tokens, use_cache=False) == alone
                    read = {"passes": model.target.passes, "tokens": model.target.read_tokens - len(prompt)}
                    bench.add(at | {"steps": model.steps, "same": same} | read)
            progress(", ".join(f"{key} {value}" for key, value in keys.items()))


def _bigram(target: Path, megabytes: float) -> Tensor:
    """The log-probabilities of a token after each token, `[V, V]`."""
    tokenizer = load_tokenizer(target)
    text = training_text(megabytes)
    counted = ngram.bigram(np.array(tokenizer.backend_tokenizer.encode(text).ids), len(tokenizer))
    return torch.from_numpy(counted).float().log()


def figures(runs: Sequence[Json]) -> Json:
    steps, passes, tokens = (harness.total(runs, key) for key in ("steps", "passes", "tokens"))
    return {
        "steps": int(steps),
        "passes": int(passes),
        "saved": 1 - passes / steps,
        "steps_per_pass": steps / passes,
        "tokens_per_step": tokens / steps,
        "same_text": sum(run["same"] for run in runs) / len(runs),
    }


def table(document: Json) -> str:
    columns: harness.Columns = {
        "steps a pass": lambda found: number(found["steps_per_pass"]),
        "passes saved": lambda found: percent(found["saved"]),
        "tokens read a step": lambda found: number(found["tokens_per_step"], 1),
        "same text": lambda found: percent(found["same_text"]),
    }
    return harness.summary_table(document["summary"], ["draft", "beams", "u / w", "γ"], columns)


def draw(document: Json, path: Path) -> None:
    """A column a draft: passes saved by γ."""
    styles = (":", "--", "-")
    note = f"{plots.caption(document)}. Target alone: one step a pass, one token a beam."
    with pictures.picture(path, 1, len(document["summary"]), size=(4.8, 3.6), note=note, sharey=True) as (panels,):
        for panel, (draft, by_beams) in zip(panels, document["summary"].items(), strict=True):
            for (beams, by_width), colour in zip(by_beams.items(), pictures.COLOURS, strict=False):
                for (wider, by_gamma), style in zip(by_width.items(), styles, strict=False):
                    points = [(int(gamma), 100 * found["saved"]) for gamma, found in by_gamma.items()]
                    label = f"w = {beams}, u = {int(beams) * int(wider)}"
                    pictures.line(panel, points, marker="o", linestyle=style, color=colour, label=label)
            panel.set(title=f"draft: {draft}", xlabel="γ, steps of a draft", ylim=(0, 100))
            panel.set_xticks([int(gamma) for gamma in by_gamma])
        panels[0].set_ylabel("passes of the target saved, %")


if __name__ == "__main__":
    sys.exit(main())
