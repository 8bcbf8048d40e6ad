"""The papers' experiments with encoder–decoder pairs: translation [L 4.1] and transcription [W 4.1], over gRPC.

`speed`: the target alone, the pair, and transformers' assisted generation in turns, in the layout of [L Tables 2 and
4]. The decoder of each target is deepened, so that it costs as much as a larger one and writes the same text. `rules`:
word error rate and time of a verification under the exact rules and under `sigmoid`, in the layout of [W Tables 1, 6
and 7]. Texts end where the model ends them. The speech pair needs espeak-ng, which speaks the clips.
"""

import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    GenerationConfig,
    GenerationMixin,
)

from benchmarks import harness, pair
from benchmarks.contenders import (
    DTYPE,
    Task,
    Unavailable,
    Write,
    outrider_writer,
    take_turns,
    text_run,
    texts,
    warm_up,
)
from benchmarks.harness import CACHE, ROOT, Bench, Json, digest_of, number, percent
from benchmarks.services import RULE, Models, Services
from models.encoder_decoder import edits
from models.training import deepen

TRANSLATION, SPEECH = "translation", "speech"
SPEED, RULES = "speed", "rules"
SCALES = 1e3  # of `sigmoid`, as in [W Table 1]
LONGEST = 92  # tokens; what the speech target has beside its prompt


@dataclass(frozen=True, slots=True)
class Input:
    """The input of one text, and its score."""

    request: Json  # of a client
    arguments: dict[str, Tensor]  # of transformers' target
    draft_arguments: dict[str, Tensor]  # and of its draft
    right: Callable[[str], tuple[int, int]]  # wrong words of a text, and words of the nearest right one


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("encoder_decoder", __doc__, quick="two texts of the translation pair")
    parser.add_argument("--only", nargs="+", choices=(TRANSLATION, SPEECH), default=[TRANSLATION, SPEECH])
    parser.add_argument("--parts", nargs="+", choices=(SPEED, RULES), default=[SPEED, RULES])
    # The targets' decoders are 24 times as deep; texts of `speed`, and of `rules`.
    parser.set_defaults(factor=24, texts=8, scored_texts=96, repetitions=3, gammas=[3, 5, 7])
    few = {"only": [TRANSLATION], "factor": 1, "texts": 1, "scored_texts": 1, "repetitions": 1, "gammas": [3]}
    given = harness.parse(parser, arguments, few)
    return harness.run("encoder_decoder", given, measure, summarise, table, draw)


def measure(bench: Bench) -> None:
    given = bench.given
    bench.document |= {"models": {}, "unavailable": {}}
    for name in given.only:
        folder = ROOT / "models" / name
        models = Models(name, folder / "target", folder / "draft")
        try:
            inputs = inputs_of(models, max(given.texts, given.scored_texts))
        except Unavailable as error:
            bench.document["unavailable"][name] = str(error)
            continue
        deep = replace(models, target=deepened(models.target, given.factor))
        bench.document["models"][name] = {
            "digests": [digest_of(models.target), digest_of(models.draft)],
            "decoder_layers": [_decoder_layers(each) for each in (models.target, deep.target, models.draft)],
        }
        if SPEED in given.parts:
            speed(bench, deep, inputs[: given.texts])
        if RULES in given.parts:
            rules(bench, models, inputs[: given.scored_texts])


def speed(bench: Bench, models: Models, inputs: Sequence[Input]) -> None:
    given = bench.given
    tasks = list(texts([()] * len(inputs), LONGEST, given.repetitions))
    torch.set_num_threads(1)  # as the services; with two it was slower on two cores
    with ExitStack() as running:
        services = running.enter_context(Services(models.target, models.draft))
        ask = partial(_request, inputs)
        target, draft = _writer(models.target), _writer(models.draft)
        writers: dict[str, Write] = {
            pair.GENERATE: partial(_generate, target, inputs),
            **{
                f"{pair.ASSISTED}, {gamma}": partial(_generate, target, inputs, draft=draft, tokens=gamma)
                for gamma in given.gammas
            },
            pair.DECODE: outrider_writer(services, ask, gamma=0),
            **{f"{pair.PAIR}, γ = {gamma}": outrider_writer(services, ask, gamma=gamma) for gamma in given.gammas},
        }
        warm_up(writers, [task for _, task in tasks[:2]])
        take_turns(bench, {"part": SPEED, "pair": models.name}, tasks, writers)


def rules(bench: Bench, models: Models, inputs: Sequence[Input]) -> None:
    """Each text once under each rule at T = 1, and by the target alone at T = 0 and 1."""
    gamma = max(bench.given.gammas)
    arms: dict[str, Json] = {
        "greedy, target alone": {"gamma": 0, "temperature": 0.0},
        "target alone": {"gamma": 0},
        "exact, `tokenwise`": {"gamma": gamma, "rule": "tokenwise"},
        "exact, `block`": {"gamma": gamma, "rule": "block"},
        f"`sigmoid` ±{SCALES:g}": {"gamma": gamma, "rule": "sigmoid", "sigmoid_scales": (-SCALES, SCALES)},
    }
    with Services(models.target, models.draft) as services:
        for nth, each in enumerate(inputs):
            keys = {"part": RULES, "pair": models.name, "prompt": nth}
            for name, options in arms.items():
                if bench.has(**keys, arm=name):
                    continue
                request: Any = {"temperature": 1.0, "rule": RULE, "max_new_tokens": LONGEST, "seed": 1 + nth}
                done = services.client.complete(**(each.request | request | options))
                wrong, words = each.right(done.text)
                found = {
                    "wrong": wrong,
                    "words": words,
                    "tokens": len(done.token_ids),
                    "rounds": done.statistics.num_rounds,
                    "drafted": done.statistics.num_draft_tokens,
                    "accepted": done.statistics.num_accepted_tokens,
                    "verify_us": done.timings.verify_us / done.statistics.num_rounds,
                    "forward_us": done.timings.forward_us / done.statistics.num_rounds,
                }
                bench.add({**keys, "arm": name, **found})
        harness.progress(f"{models.name}: {len(inputs)} texts under each rule")


# ------------------------------------------------------------------------------------------------------------- inputs


def inputs_of(models: Models, count: int) -> list[Input]:
    """Held-out sentences, or clips of held-out voices.

    Raises:
        Unavailable: espeak-ng, which speaks the clips, is missing.
    """
    tokenizer = AutoTokenizer.from_pretrained(models.target, local_files_only=True)
    return [*(_sentences(tokenizer, count) if models.name == TRANSLATION else _clips(models, tokenizer, count))]


def _sentences(tokenizer: Any, count: int) -> Iterator[Input]:
    from models.translation.language import canonical, pairs, translations

    def right(sentence: Any, text: str) -> tuple[int, int]:
        written = canonical(text).split()
        return min((edits(written, each.split()), len(each.split())) for each in translations(sentence))

    for each in islice(pairs("benchmark", held_out=True), count):
        ids = tokenizer(each.english, return_tensors="pt").input_ids
        arguments = {"input_ids": ids}
        yield Input({"prompt": ids[0].tolist()}, arguments, arguments, partial(right, each.sentence))


def _clips(models: Models, tokenizer: Any, count: int) -> Iterator[Input]:
    from transformers import AutoFeatureExtractor

    from models.speech.synthesis import RATE, make_bank, make_clip
    from models.speech.tokens import decoder_prompt

    extractors = [AutoFeatureExtractor.from_pretrained(each) for each in (models.target, models.draft)]
    chance = random.Random("benchmark")
    with tempfile.TemporaryDirectory() as folder:
        try:
            bank = make_bank(Path(folder), 4 * count, True, lambda chance: "en")
        except SystemExit as error:
            raise Unavailable(str(error)) from error
        clips = [make_clip(bank, chance) for _ in range(count)]
    for clip in clips:
        prompt = torch.tensor([decoder_prompt(tokenizer, clip.language)])
        features, draft_features = (
            {
                "input_features": each(clip.samples, sampling_rate=RATE, return_tensors="pt").input_features,
                "decoder_input_ids": prompt,
            }
            for each in extractors
        )
        words = clip.text(clip.language).split()

        def right(text: str, words: list[str] = words) -> tuple[int, int]:
            return edits(text.split(), words), len(words)

        request = {"prompt": None, "audio": clip.samples, "sample_rate": RATE, "language": clip.language}
        yield Input(request, features, draft_features, right)


def _request(inputs: Sequence[Input], task: Task) -> Json:
    return inputs[task.prompt].request


# ------------------------------------------------------------------------------------------------------- transformers


def _load(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    auto = AutoModelForSpeechSeq2Seq if (folder / "preprocessor_config.json").is_file() else AutoModelForSeq2SeqLM
    return auto.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()


def _writer(folder: Path) -> Any:
    """The model. transformers' cache counts the layers of the encoder; here it finds those of the decoder."""
    model = _load(folder, DTYPE)
    if hasattr(model.config, "num_decoder_layers"):
        model.config.num_layers = model.config.num_decoder_layers
    return model


def _generate(target: Any, inputs: Sequence[Input], task: Task, *, draft: Any = None, tokens: int = 0) -> Json:
    """Transformers' own text, by plain `generate` or with an assistant; each encoder gets its own features."""
    each = inputs[task.prompt]
    config = GenerationConfig(**{**target.generation_config.to_diff_dict(), "max_length": None})
    config.update(max_new_tokens=task.new_tokens, do_sample=task.temperature > 0, temperature=1.0, top_k=0, num_beams=1)
    options: Json = {}
    if draft is not None:
        draft.generation_config.update(
            num_assistant_tokens=tokens, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
        )
        options["assistant_model"] = draft
    torch.manual_seed(task.seed)
    arguments = {
        key: value.to(target.dtype) if value.is_floating_point() else value for key, value in each.arguments.items()
    }
    hook = _feed(draft, each.draft_arguments)
    began = time.perf_counter()
    with torch.inference_mode():
        written = GenerationMixin.generate(target, **arguments, generation_config=config, **options)[0].tolist()
    seconds = time.perf_counter() - began
    hook()
    prompt = each.arguments.get("decoder_input_ids", torch.zeros(1, 1)).shape[1]
    ids = written[prompt:]
    return text_run("transformers", replace(task, new_tokens=len(ids)), ids, {}, seconds=seconds, rounds=len(ids))


def _feed(draft: Any, arguments: dict[str, Tensor]) -> Callable[[], None]:
    """The assistant's encoder gets its own features: transformers hands it the target's. Returns the undoing."""
    features = arguments.get("input_features")
    if draft is None or features is None:
        return lambda: None

    def exchange(module: Any, args: Any, kwargs: Any) -> Any:
        return (), {**kwargs, "input_features": features.to(draft.dtype)}

    return draft.get_encoder().register_forward_pre_hook(exchange, with_kwargs=True).remove


def _decoder_layers(folder: Path) -> int:
    config = _load(folder).config
    return int(getattr(config, "num_decoder_layers", None) or config.decoder_layers)


def deepened(source: Path, factor: int) -> Path:
    """The model of `source` with `factor` times its decoder layers, made once: see `services.deepened`."""
    out = CACHE / f"{source.parent.name}-x{factor}-{digest_of(source)}"
    if not out.is_dir():
        shallow = _load(source)
        config = type(shallow.config)(**shallow.config.to_dict())
        name = "num_decoder_layers" if hasattr(config, "num_decoder_layers") else "decoder_layers"
        setattr(config, name, factor * getattr(config, name))
        deep = type(shallow)(config).to(shallow.dtype)
        deepen(shallow, deep)
        part = out.with_suffix(".part")
        shutil.copytree(source, part, dirs_exist_ok=True)
        deep.save_pretrained(part)
        part.rename(out)
    return out


# -------------------------------------------------------------------------------------------------------------- report


def summarise(bench: Bench) -> Json:
    speeds = harness.tree(bench.select(part=SPEED), ("pair", "temperature"), pair.figures)
    return {"summary": speeds, "rules": harness.tree(bench.select(part=RULES), ("pair", "arm"), _scores)}


def _scores(runs: Sequence[Json]) -> Json:
    rounds, drafted = harness.total(runs, "rounds"), harness.total(runs, "drafted")
    return {
        "texts": len(runs),
        "error_rate": harness.total(runs, "wrong") / harness.total(runs, "words"),
        "accepted_share": harness.total(runs, "accepted") / drafted if drafted else None,
        "tokens_per_round": harness.total(runs, "tokens") / rounds,
        "verify_us": median(run["verify_us"] for run in runs),
        "forward_us": median(run["forward_us"] for run in runs),
    }


def table(document: Json) -> str:
    """[L Table 2] with the formula's speed-up beside the measured one, and [W Tables 1, 6 and 7]."""
    lines = [f"- {name}: not measured: {why}" for name, why in document["unavailable"].items()]
    rows = [
        [name, at, arm, number(found["gamma"] or None, 1), number(found["alpha"]), _cost(found, arms),
         number(found["predicted_ratio"]), harness.between(found)]
        for (name, at), arms in harness.flat(document["summary"], 2)
        for arm, found in arms.items()
    ]  # fmt: skip
    speeds = harness.table(["pair", "T", "", "γ", "α", "c", "Thm 3.8", "speed-up"], rows, SPEED)
    scores = [
        [*where, percent(found["error_rate"]), percent(found["accepted_share"]), number(found["tokens_per_round"]),
         number(found["verify_us"], 0), number(found["forward_us"], 0)]
        for where, found in harness.flat(document["rules"], 2)
    ]  # fmt: skip
    head = ["pair", "T = 1", "words wrong", "accepted", "tokens/round", "verification µs", "forward µs"]
    return "\n".join([*lines, "", speeds, harness.table(head, scores, RULES)])


def _cost(found: Json, arms: Json) -> str:
    """C of [L Def. 3.7]: a draft step over a step of the target alone."""
    alone = arms[pair.DECODE]["tokens_per_second"]
    return "–" if not found["draft_step_us"] else number(found["draft_step_us"] * alone / 1e6)


def draw(document: Json, path: Path) -> None:
    layers = {name: found["decoder_layers"][1] for name, found in document["models"].items()}
    shown = {"summary": document["summary"], "models": {name: {"target_layers": layers[name]} for name in layers}}
    pair.draw(document | shown, path)


if __name__ == "__main__":
    sys.exit(main())
