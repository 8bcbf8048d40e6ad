"""The translation pair's language is one whose score can be trusted, and its script makes a pair and resumes."""

import itertools
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, T5Config

from models.encoder_decoder import edits
from models.training import deepen
from models.translation import train
from models.translation.language import LEXICON, canonical, is_right, pairs, translations, velan
from models.translation.train import main, new_model
from tests.models.pair_checks import check_weights


def test_sentences_follow_from_the_seed_and_the_held_out_ones_are_never_trained_on() -> None:
    first, again = (list(itertools.islice(pairs(3, held_out=False), 300)) for _ in range(2))
    assert first == again
    held_out = {pair.english for pair in itertools.islice(pairs(3, held_out=True), 300)}
    assert held_out.isdisjoint(pair.english for pair in first)


def test_every_translation_is_right_whatever_its_synonyms_and_orders() -> None:
    chance = random.Random(5)
    ways = set()
    for pair in itertools.islice(pairs(7, held_out=True), 400):
        for _ in range(3):
            text = velan(pair.sentence, chance)
            ways.add(text)
            assert is_right(text, pair.sentence), (pair.english, text)
    assert len(ways) > 600  # of 400 sentences: most can be said in several ways


def test_a_translation_with_one_fault_is_wrong() -> None:
    chance = random.Random(5)
    for pair in itertools.islice(pairs(11, held_out=True), 200):
        words = pair.velan.split()
        at = chance.randrange(len(words) - 1)
        missing = " ".join(words[:at] + words[at + 1 :])
        ending = " ".join([*words[:at], words[at] + "x", *words[at + 1 :]])
        assert not is_right(missing, pair.sentence)
        assert not is_right(ending, pair.sentence)
        assert not is_right(canonical(pair.velan).removesuffix(" ."), pair.sentence)


def test_stems_are_told_apart() -> None:
    words = [*LEXICON.nouns, *LEXICON.verbs, *LEXICON.adjectives]
    stems = [stem for word in words for stem in (*word.stems, *word.irregular)]
    assert len(stems) == len(set(stems))
    for pair in itertools.islice(pairs(13, held_out=False), 200):
        assert canonical(canonical(pair.velan)) == canonical(pair.velan)
        assert len(set(translations(pair.sentence))) >= 1


def test_edits() -> None:
    assert edits("kitten", "sitting") == 3
    assert edits("", "abc") == edits("abc", "") == 3
    assert edits(["a", "b"], ["a", "b"]) == 0


def test_a_deepened_target_writes_the_same() -> None:
    shallow, deep = new_model("target", 2).float().eval(), new_model("target", 8).float().eval()
    ids, decoder_ids = torch.arange(2, 26).view(2, 12), torch.arange(30, 40).view(2, 5)
    deepen(shallow, deep)
    with torch.no_grad():
        expected, got = (model(input_ids=ids, decoder_input_ids=decoder_ids).logits for model in (shallow, deep))
    assert torch.equal(expected, got)


def test_a_quick_run_makes_a_pair_and_another_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 32}
    monkeypatch.setattr(train, "T5Config", lambda **named: T5Config(**named | small))
    for name, count in (("SENTENCES", 4), ("AT_ONCE", 2), ("HELD_OUT", 8)):
        monkeypatch.setattr(train, name, count)
    arguments = ["--work", str(tmp_path / "work"), "--out", str(tmp_path), "--quick"]
    (tmp_path / "work" / "tokenizer").mkdir(parents=True)  # an earlier run was killed before it wrote the first file
    main(arguments)
    assert AutoTokenizer.from_pretrained(tmp_path / "draft").eos_token_id == 1
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "target").config.num_decoder_layers == 8
    (tmp_path / "work" / "draft.json").unlink()
    (tmp_path / "draft" / "model.safetensors").unlink()
    capsys.readouterr()
    main(arguments)
    again = capsys.readouterr().out
    assert "resumed at" in again
    assert "shallow" not in again
    check_weights(tmp_path / "draft")
    made: list[str] = []
    monkeypatch.setattr(train, "make", lambda member, *_: made.append(member))
    (tmp_path / "other" / "draft").mkdir(parents=True)
    main([*arguments[:2], "--out", str(tmp_path / "other"), "--quick"])
    assert made == ["target"], "the other folder has no target yet"
