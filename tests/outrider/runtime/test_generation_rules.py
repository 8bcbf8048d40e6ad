"""Rules read from a generation config change logits as `generate` does, in its order; others are refused by name."""

import copy
from typing import Any

import pytest
import torch
from transformers import BartConfig, GenerationConfig, LlamaConfig, WhisperConfig

from kernels.adjustments import Adjuster, LogitRules, apply
from kernels.generation_rules import GenerationRules, TimestampRules
from outrider.runtime.errors import CheckpointError
from outrider.runtime.generation_rules import read
from tests.encoder_decoders import V, build

EOS, NO_TIMESTAMPS, FIRST = 40, 50, 51
NEW = 24
COMMON = {"eos_token_id": EOS, "pad_token_id": 0, "decoder_start_token_id": 1}
SAMPLED = {
    "do_sample": True, "top_k": 0, "use_cache": False,
    "return_dict_in_generate": True, "output_scores": True, "output_logits": True,
}  # fmt: skip
WORDS = [[3], [EOS], *([token] for token in range(20, 30)), *([1, token] for token in range(10))]

OPTIONS: dict[str, dict[str, Any]] = {
    "bart": {
        "forced_bos_token_id": 2, "forced_eos_token_id": [EOS], "no_repeat_ngram_size": 2, "min_length": 12,
        "begin_suppress_tokens": list(range(20)), "suppress_tokens": [30, 31], "num_beams": 1,
    },
    "marian": {
        "bad_words_ids": WORDS, "forced_eos_token_id": EOS, "repetition_penalty": 1.9, "begin_suppress_tokens": [EOS],
    },
    "t5": {"no_repeat_ngram_size": 1, "min_length": 20, "min_new_tokens": 4, "remove_invalid_values": False},
    "whisper": {
        "no_timestamps_token_id": NO_TIMESTAMPS, "max_initial_timestamp_index": 5, "suppress_tokens": [3, 4],
        "begin_suppress_tokens": [5, EOS], "repetition_penalty": 1.2, "no_repeat_ngram_size": 3,
        "is_multilingual": False,
    },
}  # fmt: skip
OPTIONS["whisper, no timestamps"] = OPTIONS["whisper"]


ROWS = 6


@pytest.mark.parametrize("name", OPTIONS)
def test_rows_are_those_of_generate(name: str) -> None:
    """Its own scores, step by step, from its own logits and tokens, drawn at temperature 1."""
    model = copy.deepcopy(build(name.partition(",")[0]))
    config = GenerationConfig(**COMMON, **OPTIONS[name])
    rules = read(config, model.config)
    assert rules is not None
    torch.manual_seed(0)
    inputs: Any = torch.randint(3, V, (ROWS, 8))
    extra: dict[str, Any] = {}
    if name.startswith("whisper"):
        inputs = torch.randn(ROWS, 20, 100)
        extra = {"force_unique_generate_call": True, "return_timestamps": name == "whisper"}
    model.generation_config = config
    output = model.generate(inputs, max_new_tokens=NEW, **SAMPLED, **extra)
    for row, tokens in enumerate(output.sequences.tolist()):
        begin = len(tokens) - len(output.scores)
        if name == "whisper, no timestamps":
            tokens = [1, NO_TIMESTAMPS, *tokens[begin:]]
            begin = 2
        adjuster = Adjuster(LogitRules(generation=rules, max_new_tokens=NEW), tokens[:begin], V)
        for token, raw, wanted in zip(tokens[begin:], output.logits, output.scores, strict=True):
            found = apply(raw[[row]], [adjuster.row()])
            assert torch.equal(found.isneginf(), wanted[[row]].isneginf())
            assert torch.allclose(found.softmax(-1), wanted[[row]].softmax(-1), rtol=1e-5, atol=1e-7)
            if token == EOS:  # only padding follows
                break
            adjuster.push(token)


def test_all_options_are_read() -> None:
    config = GenerationConfig(
        repetition_penalty=1.5, suppress_tokens=[1, 2], begin_suppress_tokens=[3], bad_words_ids=[[4], [5, 6]],
        no_repeat_ngram_size=3, min_length=7, min_new_tokens=2, eos_token_id=[8, 9], forced_bos_token_id=10,
        forced_eos_token_id=[8], num_beams=4, length_penalty=2.0, early_stopping=True,
    )  # fmt: skip
    assert read(config, BartConfig(vocab_size=V)) == GenerationRules(
        1.5, (1, 2), (3,), ((4,), (5, 6)), 3, 7, 2, (8, 9), forced_bos=10, forced_eos=8
    )
    config = GenerationConfig(bos_token_id=EOS, no_timestamps_token_id=NO_TIMESTAMPS, max_initial_timestamp_index=1)
    assert read(config, WhisperConfig(vocab_size=V)) == GenerationRules(timestamps=TimestampRules(FIRST, EOS, 1))


def test_without_rules_there_are_none() -> None:
    plain = GenerationConfig(eos_token_id=2, guidance_scale=1.0, num_beam_groups=1, typical_p=1.0, top_k=5)
    assert read(plain, BartConfig(vocab_size=V)) is None
    assert read(GenerationConfig(no_repeat_ngram_size=3, guidance_scale=2.0), LlamaConfig()) is None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"exponential_decay_length_penalty": (5, 1.1)}, r"exponential_decay_length_penalty \(\(5, 1.1\)\)"),
        ({"encoder_repetition_penalty": 1.2}, r"encoder_repetition_penalty \(1.2\)"),
        ({"encoder_no_repeat_ngram_size": 2}, "encoder_no_repeat_ngram_size"),
        ({"sequence_bias": [[[3], 1.0]]}, "sequence_bias"),
        ({"constraints": [1], "diversity_penalty": 0.5}, r"constraints \(\[1\]\), diversity_penalty \(0.5\)"),
        ({"force_words_ids": [[3]]}, "force_words_ids"),
        ({"num_beam_groups": 2}, "num_beam_groups"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"watermarking_config": {"greenlist_ratio": 0.3}}, "watermarking_config"),
        ({"penalty_alpha": 0.6}, "penalty_alpha"),
        ({"dola_layers": "low"}, "dola_layers"),
        ({"token_healing": True}, "token_healing"),
        ({"typical_p": 0.9, "do_sample": True}, "typical_p"),
        ({"epsilon_cutoff": 0.1, "do_sample": True}, "epsilon_cutoff"),
        ({"eta_cutoff": 0.1, "do_sample": True}, "eta_cutoff"),
        ({"top_h": 0.5, "do_sample": True}, "top_h"),
        ({"forced_eos_token_id": [3, 4]}, r"forced_eos_token_id \(\[3, 4\]\)"),
        ({"forced_bos_token_id": V}, f"forced_bos has the token {V}; ids must be below {V}"),
        ({"no_timestamps_token_id": 50, "eos_token_id": 4, "forced_bos_token_id": 3}, r"forced_bos_token_id \(3\)"),
        ({"no_timestamps_token_id": 50, "eos_token_id": [3, 4]}, r"eos_token_id \(\[3, 4\]\)"),
        ({"no_timestamps_token_id": V - 1, "eos_token_id": 4}, f"timestamps has the token {V}"),
        (
            {"no_timestamps_token_id": 50, "eos_token_id": 4, "_detect_timestamp_from_logprob": False},
            "_detect_timestamp_from_logprob",
        ),
    ],
)
def test_options_that_are_not_done_are_refused(options: dict[str, Any], named: str) -> None:
    config = GenerationConfig()
    for name, value in options.items():  # past transformers' own checks
        setattr(config, name, value)
    with pytest.raises(CheckpointError, match=named):
        read(config, BartConfig(vocab_size=V))
