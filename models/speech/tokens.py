"""The speech pair's tokens, as Whisper orders them: text, end, start, languages, tasks, no timestamps, timestamps."""

import random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from models.speech.phrases import LANGUAGES, phrase, spoken
from models.speech.synthesis import SECONDS, Clip

TEXT = 304  # bytes and 48 merges: a word is one to four tokens
LONGEST = 96
STEP = 0.02  # seconds between timestamps
END, START, BEFORE, SILENCE = "<|endoftext|>", "<|startoftranscript|>", "<|startofprev|>", "<|nospeech|>"
TASKS, NO_TIMESTAMPS = ("translate", "transcribe"), "<|notimestamps|>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of all phrases, and Whisper's special tokens. Encoding adds nothing."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    chance = random.Random("bpe")
    said = [phrase(chance) for _ in range(2000)]
    texts = [f" {spoken(words, language)}" for words in said for language in LANGUAGES]
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=TEXT, initial_alphabet=alphabet, show_progress=False)
    )
    names = [END, START, *LANGUAGES, *TASKS, BEFORE, SILENCE, NO_TIMESTAMPS]
    special = [name if name.startswith("<|") else f"<|{name}|>" for name in names]
    times = [f"<|{index * STEP:.2f}|>" for index in range(round(SECONDS / STEP) + 1)]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(time, special=False, normalized=False) for time in times])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=special[1:],
        clean_up_tokenization_spaces=False,
        model_max_length=LONGEST,
    )


def generation_config(tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    """The options that transformers' Whisper requires of a generation config."""
    identity = tokenizer.convert_tokens_to_ids
    end = identity(END)
    return GenerationConfig(
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=identity(START),
        is_multilingual=True,
        lang_to_id={f"<|{language}|>": identity(f"<|{language}|>") for language in LANGUAGES},
        task="transcribe",  # unless a request says otherwise
        task_to_id={task: identity(f"<|{task}|>") for task in TASKS},
        no_timestamps_token_id=identity(NO_TIMESTAMPS),
        prev_sot_token_id=identity(BEFORE),
        max_initial_timestamp_index=50,
        return_timestamps=False,
        suppress_tokens=[identity(name) for name in (START, "<|translate|>", "<|transcribe|>", BEFORE, SILENCE)],
        begin_suppress_tokens=[identity("Ġ"), end],
        forced_decoder_ids=None,
        max_length=LONGEST,
    )


def decoder_prompt(
    tokenizer: PreTrainedTokenizerFast, language: str, task: str = "transcribe", timestamps: bool = False
) -> list[int]:
    """Returns the first tokens of the decoder."""
    names = [START, f"<|{language}|>", f"<|{task}|>", *([] if timestamps else [NO_TIMESTAMPS])]
    return [tokenizer.convert_tokens_to_ids(name) for name in names]


def transcript(tokenizer: PreTrainedTokenizerFast, clip: Clip, task: str, timestamps: bool) -> list[int]:
    """The decoder's output, its end included. A segment that the clip cuts off is only begun."""
    language = "en" if task == "translate" else clip.language
    first = tokenizer.convert_tokens_to_ids("<|0.00|>")
    ids: list[int] = []
    for segment in clip.segments:
        text = tokenizer.encode(" " + spoken(segment.words, language))
        begin, end = first + round(segment.begin / STEP), first + round((segment.end or 0.0) / STEP)
        if segment.end is None:
            ids += [begin] if timestamps else []
        else:
            ids += [begin, *text, end] if timestamps else text
    return [*ids, tokenizer.eos_token_id]
