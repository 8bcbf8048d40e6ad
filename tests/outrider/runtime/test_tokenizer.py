"""Text streamed token by token is the text of all tokens, in whole characters, for every kind of tokenizer."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library
from transformers import PreTrainedTokenizerFast

from outrider.runtime.checkpoint import TEXTS
from outrider.runtime.errors import CheckpointError
from outrider.runtime.loader import ModelSource
from outrider.runtime.tokenizer import ChatTemplateError, IncrementalDetokenizer, Tokenizer, load_tokenizer
from tests.project.tree import ROOT

BROKEN = "\ufffd"
SPECIAL = ["<s>", "</s>", "<unk>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and doesn't look back.",
    "  two spaces, a tab\t, a line\nand another\n\nend ",
    "naïve café über straße, Здравствуй мир, 你好世界, こんにちは, שלום",
    "emoji 😀😃 👩‍👩‍👧 🇩🇪 and combining e\u0301 a\u0308 n\u0303",
    "def f(x): return x ** 2  # code",
] * 4


def _train_byte_level(corpus: list[str], vocab_size: int, *, use_regex: bool = True) -> Library:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(corpus, trainer)
    return library


def byte_level() -> Library:
    return _train_byte_level(CORPUS, 500)


def byte_level_across_characters() -> Library:
    """Merges that cross characters: most tokens end inside one."""
    return _train_byte_level(["你好世界你们好世界人民" * 3, "世界你好" * 5, *CORPUS], 900, use_regex=False)


def sentence_piece_unigram() -> Library:
    """As T5 and Llama have it: ▁ for a space and before the text, bytes for characters outside the vocabulary."""
    pieces = [(token, 0.0) for token in SPECIAL]
    pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    words = {word for line in CORPUS[:3] for word in line.split() if word.isascii()}
    pieces += [(f"▁{word}", -8.0) for word in sorted(words)]
    pieces += [("▁", -5.0)] + [(chr(code), -9.0) for code in range(33, 127)] + [("é", -9.0), ("好", -9.0)]
    library = Library(models.Unigram(pieces, unk_id=2, byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return library


def word_piece() -> Library:
    library = Library(models.WordPiece(unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(cleanup=True)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    library.train_from_iterator(CORPUS, trainer)
    return library


KINDS: dict[str, Callable[[], Library]] = {
    "byte-level": byte_level,
    "byte-level across characters": byte_level_across_characters,
    "sentence-piece unigram": sentence_piece_unigram,
    "word-piece": word_piece,
}
BYTES = ["byte-level", "byte-level across characters", "sentence-piece unigram"]


@cache
def make(kind: str) -> Tokenizer:
    library = KINDS[kind]()
    library.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=library, bos_token="<s>", eos_token="</s>"))


def stream(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> tuple[list[str], str]:
    """Return the text of each push, and that of the flush."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    pieces = [detokenizer.push(token) for token in ids]
    pending = detokenizer.pending
    flushed = detokenizer.flush()
    assert pending or not flushed
    assert detokenizer.flush() == ""
    return pieces, flushed


def complete(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of some tokens up to the end of the last complete character."""
    return max((tokenizer.decode(ids[: len(ids) - cut]).rstrip(BROKEN) for cut in range(4)), key=len)


TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters=BROKEN), max_size=60),
    st.text(alphabet="ab ▁ ,'é好😀\u0301\u200d👩👧\n", max_size=40),
    st.lists(st.sampled_from(["the", " the", "  ", "fox", "😀", "好", "e\u0301", ".", "doesn't", "\n", "世界"])).map(
        "".join
    ),
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(text=TEXT, data=st.data())
def test_pieces_join_to_the_text(kind: str, text: str, data: st.DataObject) -> None:
    tokenizer = make(kind)
    ids = tokenizer.encode(text)
    cut = data.draw(st.integers(0, len(ids)))
    pieces, flushed = stream(tokenizer, ids[:cut], ids[cut:])
    assert not any(BROKEN in piece for piece in pieces)
    assert flushed == ""
    assert "".join(pieces) == tokenizer.decode(ids)[len(complete(tokenizer, ids[:cut])) :]
    if not cut and kind in BYTES and "▁" not in text:  # a space to such a tokenizer
        assert "".join(pieces) == text


@pytest.mark.parametrize("kind", ["byte-level", "byte-level across characters", "word-piece"])
@settings(max_examples=50, deadline=None, derandomize=True)
@given(data=st.data())
def test_pieces_of_any_tokens_join_to_their_text(kind: str, data: st.DataObject) -> None:
    tokenizer = make(kind)
    size = max(tokenizer.vocabulary().values()) + 1
    tokens = st.lists(st.integers(0, size + 2), max_size=90)  # ids without a token among them
    ids = data.draw(tokens)
    cut = data.draw(st.one_of(st.just(0), st.integers(0, len(ids))))
    pieces, flushed = stream(tokenizer, ids[:cut], ids[cut:])
    before, whole = tokenizer.decode(ids[:cut]), tokenizer.decode(ids)
    while not whole.startswith(before):  # the prompt ends inside a character, which then is complete
        before = before[:-1]
    assert "".join(pieces) + flushed == whole[len(before) :]
    assert not flushed.strip(BROKEN)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(data=st.data())
def test_under_byte_fallback_only_invalid_bytes_may_differ(data: st.DataObject) -> None:
    """The tokenizer decodes a run of bytes as a whole; all other text must be the same."""
    tokenizer = make("sentence-piece unigram")
    size = max(tokenizer.vocabulary().values()) + 1
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=60))
    pieces, flushed = stream(tokenizer, [], ids)
    texts = [token for token, index in sorted(tokenizer.vocabulary().items(), key=lambda item: item[1])]
    found, wanted = "".join(pieces) + flushed, tokenizer.decode(ids)
    if not any(texts[index].startswith("<0x") for index in ids):
        assert found == wanted

    def visible(text: str) -> str:
        return "".join(character for character in text if character != BROKEN and ord(character) < 127)

    kept = iter(visible(found))
    assert all(character in kept for character in visible(wanted)), "text was lost"


@pytest.mark.parametrize("kind", BYTES)
def test_a_long_run_of_byte_tokens_is_decoded(kind: str) -> None:
    """A tokenizer with byte fallback decodes none of such a run if it begins inside a character."""
    tokenizer = make(kind)
    text = "x\n" + 100 * "🦜"
    ids = tokenizer.encode(text)
    for cut in (0, len(ids) // 2, *range(len(ids) - 5, len(ids))):
        pieces, flushed = stream(tokenizer, ids[:cut], ids[cut:])
        assert "".join(pieces) + flushed == text[len(complete(tokenizer, ids[:cut])) :]


def test_invalid_bytes_are_replaced_once_no_character_is_possible() -> None:
    tokenizer = make("byte-level")
    [start, *_], [letter] = tokenizer.encode("😀"), tokenizer.encode("x")
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push(start) == ""
    assert detokenizer.push(letter) == BROKEN + "x"
    after = IncrementalDetokenizer(tokenizer, [start])
    assert after.push(letter) == "x", "the incomplete character was the prompt's"
    endless = IncrementalDetokenizer(tokenizer)
    written = "".join(endless.push(start) for _ in range(500))
    assert len(written) > 400, "bytes that never complete a character are not held for ever"
    assert written + endless.flush() == tokenizer.decode([start] * 500)


def test_broken_characters_of_the_prompt_are_no_text_of_the_output() -> None:
    tokenizer = make("byte-level")
    first, *others = tokenizer.encode("😀")
    detokenizer = IncrementalDetokenizer(tokenizer, [first, first, first])  # only the last one can become a character
    assert "".join(detokenizer.push(token) for token in others) == "😀"
    detokenizer = IncrementalDetokenizer(tokenizer, [first, first])
    assert detokenizer.push(first) == ""
    assert detokenizer.kept == 1
    assert detokenizer.flush() == BROKEN


def test_a_push_costs_the_same_for_any_length_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make("byte-level")
    ids = tokenizer.encode("some words and 😀 then more of them ") * 60
    longest: list[int] = []
    decode = Tokenizer.decode

    def counting(self: Tokenizer, ids: Sequence[int], skip_special: bool = True) -> str:
        longest.append(len(ids))
        return decode(self, ids, skip_special)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    detokenizer = IncrementalDetokenizer(tokenizer, ids)
    for index in ids:
        detokenizer.push(index)
    assert max(longest) < 32
    assert sum(longest) < 6 * len(ids)


def test_special_tokens_have_text_only_on_request() -> None:
    tokenizer = make("sentence-piece unigram")
    ids = [*tokenizer.encode("The fox"), 1, *tokenizer.encode("fox")]
    hidden, shown = IncrementalDetokenizer(tokenizer), IncrementalDetokenizer(tokenizer, skip_special=False)
    assert "".join(hidden.push(index) for index in ids) == tokenizer.decode(ids) == "The fox fox"
    assert "".join(shown.push(index) for index in ids) == tokenizer.decode(ids, skip_special=False)
    assert "</s>" in tokenizer.decode(ids, skip_special=False)


def test_vocabulary_and_fingerprint_include_added_tokens() -> None:
    plain, same = (Tokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="</s>")) for _ in "ab")
    more = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="</s>")
    more.add_tokens(["<tool>"])
    added = Tokenizer(more)
    assert plain.fingerprint == same.fingerprint != added.fingerprint
    assert added.vocabulary()["<tool>"] == len(plain.vocabulary())
    assert added.eos_token_ids == (1,)
    assert Tokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_level())).eos_token_ids == ()


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'narrator' %}{{ raise_exception('no narrators') }}{% endif %}"
    "<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def test_a_conversation_follows_the_chat_template(tmp_path: Path) -> None:
    fast = PreTrainedTokenizerFast(tokenizer_object=byte_level(), bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(ModelSource(str(tmp_path)))
    assert tokenizer.has_chat_template
    ids = tokenizer.encode_chat([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}])
    wanted = "<s>system: be brief</s><s>user: hello</s><s>assistant:"
    assert tokenizer.decode(ids, skip_special=False) == wanted
    assert (ids.count(0), ids.count(1)) == (3, 2), "special tokens, not their text"
    with pytest.raises(ChatTemplateError, match="no narrators"):
        tokenizer.encode_chat([{"role": "narrator", "content": "hello"}])


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot load the tokenizer") as caught:
        load_tokenizer(ModelSource(str(tmp_path)))
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match="no folder"):
        load_tokenizer(ModelSource(str(tmp_path / "nowhere")))


def test_marian_has_a_vocabulary_for_each_language(tmp_path: Path) -> None:
    """Its files are SentencePiece's own: the hub has no tokenizer.json of such models."""
    sentences = ["the hat is on the table", "where is my hat", "ein Hut liegt auf dem Tisch", "wo ist mein Hut"] * 20
    pieces: set[str] = set()
    for name in ("source", "target"):
        with (tmp_path / f"{name}.spm").open("wb") as written:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(sentences), model_writer=written, vocab_size=60, hard_vocab_limit=False,
                minloglevel=2,
            )  # fmt: skip
        processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / f"{name}.spm"))
        pieces |= {processor.id_to_piece(number) for number in range(processor.get_piece_size())}
    vocabulary = ["</s>", "<unk>", *sorted(pieces - {"<s>", "</s>", "<unk>"}), "<pad>"]
    (tmp_path / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(vocabulary)}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "MarianTokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "marian", "vocab_size": len(vocabulary)}))
    assert all(any(file.match(pattern) for pattern in TEXTS) for file in tmp_path.iterdir()), "each is downloaded"
    tokenizer = load_tokenizer(ModelSource(str(tmp_path)))
    ids = tokenizer.encode("where is the table")
    assert ids[-1:] == [0] == list(tokenizer.eos_token_ids)
    assert tokenizer.decode(ids) == "where is the table"
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == "where is the table"


def test_special_tokens_are_named_and_may_be_left_out() -> None:
    tokenizer = load_tokenizer(ModelSource(str(ROOT / "models" / "translation" / "target")))
    end = tokenizer.eos_token_ids[0]
    assert tokenizer.encode("a b") == [*tokenizer.encode("a b", add_special=False), end]
    assert tokenizer.encode("", add_special=False) == []
    assert ("eos_token", "</s>", end) in tokenizer.special_tokens()
    speech = load_tokenizer(ModelSource(str(ROOT / "models" / "speech" / "target")))
    names = {name for name, _, _ in speech.special_tokens()}
    assert {"eos_token", "extra_special_tokens"} <= names
    for _, text, token in speech.special_tokens():
        assert speech.decode([token], skip_special=False) == text
