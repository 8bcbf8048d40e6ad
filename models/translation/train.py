"""Make the translation pair from nothing: tokenizer, target, draft; goes on where it was stopped.

python -m models.translation.train --work /tmp/translation-pair
"""

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from models.encoder_decoder import IGNORED, SHALLOW_SHARE, WHOLE, save, token_loss, train
from models.training import DEEP, DTYPE, SHALLOW, Schedule, begin_small, deepen, is_made
from models.translation.language import Pair, pairs

HERE = Path(__file__).parent
VOCABULARY, LONGEST = 512, 192
PAD, END = "<pad>", "</s>"  # ids 0 and 1; T5's decoder begins with padding
SENTENCES, AT_ONCE = 64, 8  # in a batch; batches sorted by length together, so that rows need little padding
HELD_OUT = 256  # sentences


def train_tokenizer(count: int) -> PreTrainedTokenizerFast:
    """Fit byte-level BPE to `count` pairs in both languages. Encoding adds the end, as T5's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = itertools.chain.from_iterable((pair.english, pair.velan) for pair in _take(pairs("bpe", False), count))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=LONGEST,
    )


def new_model(member: str, decoder_layers: int) -> T5ForConditionalGeneration:
    """A fresh member of the pair."""
    target = member == "target"
    torch.manual_seed(1 if target else 2)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=128 if target else 96,
        d_kv=32,
        num_heads=4 if target else 3,
        d_ff=256 if target else 192,
        num_layers=3 if target else 1,
        num_decoder_layers=decoder_layers,
        relative_attention_num_buckets=32,
        relative_attention_max_distance=64,
        n_positions=LONGEST,
        dropout_rate=0.0,
        feed_forward_proj="relu",
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    begin_small(model, 0.3)
    return model.to(DTYPE)


def batch(tokenizer: PreTrainedTokenizerFast, rows: list[Pair]) -> tuple[dict[str, Tensor], Tensor]:
    """The encoder's inputs and the labels `[B, L]`."""
    source = tokenizer([pair.english for pair in rows], padding=True, return_tensors="pt")
    labels = tokenizer([pair.velan for pair in rows], padding=True, return_tensors="pt")
    ids = labels.input_ids.masked_fill(labels.attention_mask == 0, IGNORED)
    return {"input_ids": source.input_ids, "attention_mask": source.attention_mask}, ids


def loss_of(model: T5ForConditionalGeneration, inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    """Mean loss in nats."""
    ids = model.prepare_decoder_input_ids_from_labels(labels)
    return token_loss(model(**inputs, decoder_input_ids=ids, use_cache=False).logits, labels)


def learn(
    model: T5ForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    minutes: float,
    checkpoint: Path,
    schedule: Schedule,
) -> None:
    """Train `model` on sentences of its own; `checkpoint` names the run."""
    print(f"{checkpoint.stem}: {model.num_parameters():,} parameters", flush=True)
    held_out = batch(tokenizer, _take(pairs("held out", True), HELD_OUT))
    ready: dict[int, list[Pair]] = {}

    def step(number: int, _: float) -> tuple[Tensor, int]:
        if number // AT_ONCE not in ready:
            ready.clear()
            rows = _take(pairs(f"{checkpoint.stem} {number // AT_ONCE}", False), SENTENCES * AT_ONCE)
            ready[number // AT_ONCE] = sorted(rows, key=lambda pair: len(pair.english))
        begin = (number * 5 % AT_ONCE) * SENTENCES  # short and long batches take turns
        inputs, labels = batch(tokenizer, ready[number // AT_ONCE][begin : begin + SENTENCES])
        return loss_of(model, inputs, labels), int((labels != IGNORED).sum())

    @torch.no_grad()
    def evaluate() -> str:
        return f"held-out nats per token {float(loss_of(model, *held_out)):.4f}"

    train(model, minutes, checkpoint, step, evaluate, schedule)
    print(f"{checkpoint.stem}: {evaluate()}", flush=True)


def make(member: str, tokenizer: PreTrainedTokenizerFast, work: Path, out: Path, minutes: float) -> None:
    """Train one member and write it to `out`. The target has eight decoder layers, two at first; the draft has one."""
    if member == "draft":
        model = new_model(member, 1)
        learn(model, tokenizer, minutes, work / "draft.pt", WHOLE)
    else:
        shallow, model = new_model(member, 2), new_model(member, 8)
        learn(shallow, tokenizer, SHALLOW_SHARE * minutes, work / "shallow.pt", SHALLOW)
        deepen(shallow, model)
        learn(model, tokenizer, (1 - SHALLOW_SHARE) * minutes, work / "deep.pt", DEEP)
    generation = GenerationConfig(decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, max_length=LONGEST)
    save(model, tokenizer, generation, out / member)
    (work / f"{member}.json").write_text(json.dumps({"minutes": minutes, "parameters": model.num_parameters()}))


def write_sentences(path: Path, count: int) -> None:
    """Held-out sentences to try the pair on, each with one right translation."""
    rows = [{"text": pair.english, "translation": pair.velan} for pair in _take(pairs("shipped", True), count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _take(source: Any, count: int) -> list[Pair]:
    return list(itertools.islice(source, count))


def main(arguments: list[str] | None = None) -> None:
    """Run whatever stages are not yet done."""
    parser = argparse.ArgumentParser(description="Train the translation pair on one core.")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--out", type=Path, default=HERE, help="where target/ and draft/ are written")
    parser.add_argument("--target-minutes", type=float, default=16.0, help="CPU minutes")
    parser.add_argument("--draft-minutes", type=float, default=10.0, help="CPU minutes")
    parser.add_argument("--quick", action="store_true", help="seconds in place of minutes: the pair will know nothing")
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    tokenizer = train_tokenizer(500 if options.quick else 20_000)  # the same in each run
    for member, minutes in (("target", options.target_minutes), ("draft", options.draft_minutes)):
        if not is_made(member, options.work, options.out):
            budget = 0.002 if options.quick else minutes
            make(member, tokenizer, options.work, options.out, budget)
    write_sentences(options.out / "sentences.jsonl", 64)
    print(f"done in {(time.monotonic() - begun) / 60:.1f} min; now: python -m models.translation.measure", flush=True)


if __name__ == "__main__":
    main()
