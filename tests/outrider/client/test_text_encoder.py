"""A pair of models with an encoder of text: `generate` needs nothing new, and a lost stream continues."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from outrider.cli import main
from outrider.client import AsyncClient, Client, Completion, FailedPrecondition, InvalidRequest, Options
from tests.cluster import Cluster, wait_healthy
from tests.proxy import Proxy, Way

PAD, END = "<pad>", "</s>"
LETTERS = "abcdefghijklmnopqrstuvwxyz ,.?!"
PROMPT = "translate this, please."


def tokenizer() -> Any:
    """A token for each letter."""
    made = Tokenizer(models.WordLevel({token: i for i, token in enumerate([PAD, END, *LETTERS])}, unk_token=PAD))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=PAD, eos_token=END)


def model(layers: int, seed: int) -> Any:
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=2 + len(LETTERS), d_model=32, d_kv=8, d_ff=48, num_layers=layers, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    made = T5ForConditionalGeneration(config).eval()
    for parameter in made.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 2 * (parameter.shape[0] / parameter.numel()) ** 0.5)
    return made


@pytest.fixture(scope="module")
def target() -> Any:
    return model(2, 1)


@pytest.fixture(scope="module")
def address(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("text")
    for name, each in (("target", target), ("draft", model(1, 2))):
        each.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    with Cluster() as cluster:
        verifier = cluster.verifier(model=folder / "target")
        draft = cluster.draft(verifier, model=folder / "draft")
        wait_healthy(verifier, draft)
        yield draft.address


def test_generate_prints_what_transformers_writes(target: Any, address: str) -> None:
    ours = tokenizer()
    for prompt in (PROMPT, "a", "what is it?"):
        with torch.inference_mode():
            ids = target.generate(torch.tensor([ours.encode(prompt)]), do_sample=False, max_new_tokens=24)[0]
        arguments = ["--temperature", "0", "--max-new-tokens", "24", prompt]
        done = CliRunner().invoke(main, ["generate", "--draft", address, *arguments], prog_name="outrider")
        assert (done.exit_code, done.stderr) == (0, "")
        assert done.stdout == ours.decode(ids, skip_special_tokens=True) + "\n"


@pytest.mark.parametrize("as_tokens", [False, True], ids=["text", "token ids"])
async def test_a_lost_stream_continues_with_the_same_input(address: str, as_tokens: bool) -> None:
    prompt: Any = tokenizer().encode(PROMPT) if as_tokens else PROMPT
    options: Options = {"temperature": 1.0, "seed": 3, "max_new_tokens": 300, "ignore_eos": True, "gamma": 2}

    def result(completion: Completion) -> Any:
        return completion.text, completion.token_ids, completion.started.prompt_token_ids

    resumes = 0
    with Proxy(address) as first, Proxy(address) as second:
        async with AsyncClient(first.address) as client:
            with first.recording() as seen:
                whole = await client.complete(prompt, **options)
            total = sum(len(segment.data) for segment in seen if segment.way is Way.DOWN)
        assert whole.started.prompt_token_ids == (0,)
        for _ in range(2):
            first.cut_after(round(random.Random(total).uniform(0.5, 0.9) * total), Way.DOWN)
            async with AsyncClient([first.address, second.address]) as client:
                for _ in range(2):  # one of them through the first
                    broken = await client.complete(prompt, **options)
                    assert result(broken) == result(whole)
                    resumes += broken.samples[0].num_resumes
            first.heal()
    assert resumes >= 1


def test_a_model_of_text_refuses_speech(address: str, tmp_path: Path) -> None:
    with Client(address) as client:
        with pytest.raises(FailedPrecondition, match="has no speech encoder: it takes text, not audio"):
            client.complete(audio=tmp_path / "no.wav")
        with pytest.raises(InvalidRequest, match="transcription"):
            client.complete("a", language="en")
