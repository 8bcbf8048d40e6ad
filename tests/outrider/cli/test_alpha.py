"""`outrider alpha` on a tiny pair: what it prints, and what it refuses."""

import json
import re
from pathlib import Path

import pytest
import soundfile
import torch
from click.testing import CliRunner, Result
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.cli import main
from outrider.evaluation import ALPHA_DRAFTERS, alpha
from tests import encoder_decoders
from tests.cluster import MODELS
from tests.exactness import pairs

PROMPTS = ["abcde", "fghij", "klmno", "pqrst", "uvwab", "acegi", "bdfhj", "mnopq", "stuvw", "kjihg"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    target = pairs.write_target(folder / "target", seed=1)
    pairs.write_draft(folder / "draft", target, "flattened")
    pairs.write_parallel_draft(folder / "parallel", target, "flattened")
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in PROMPTS) + "\n\n")
    (folder / "corpus.txt").write_text("abcabdacbabc\nabcdefabc\n" * 20)
    return folder


def run(
    pair: Path, *arguments: str, target: str = "target", draft: str = "draft", prompts: str = "prompts.jsonl"
) -> Result:
    models = ["--target", str(pair / "target"), *(["--draft", str(pair / draft)] if draft else [])]
    given = [*models, "--prompts-file", str(pair / prompts), "--dtype", "float32", "--device", "cpu", "--tokens", "200"]
    return CliRunner().invoke(main, ["alpha", *given, *arguments])


def test_one_text_serves_all_drafters_and_leniences(pair: Path) -> None:
    every = [word for name in ALPHA_DRAFTERS for word in ("--drafter", name)]
    corpus = ("--ngram-corpus", str(pair / "corpus.txt"), "--ngram-documents", "line")
    done = run(pair, *every, *corpus, "--lenience", "1,.5,.1", "--text-tokens", "20", "--json", draft="parallel")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert {name: found[name] for name in ("temperature", "top_k", "seed", "dtype", "observation")} == {
        "temperature": 1.0,
        "top_k": 0,
        "seed": 0,
        "dtype": "float32",
        "observation": "prompt",
    }
    assert 200 <= found["tokens"] < 220
    alphas = {(each["drafter"], each["lenience"]): each["alpha"] for each in found["estimates"]}
    assert list(alphas) == [(name, lenience) for name in ALPHA_DRAFTERS for lenience in (1.0, 0.5, 0.1)]
    for name in ALPHA_DRAFTERS:
        assert 0 < alphas[name, 1.0] < alphas[name, 0.5] < alphas[name, 0.1] <= 1
    assert alphas["model", 1.0] > alphas["unigram", 1.0]
    for each in found["estimates"]:
        assert each["interval"][0] < each["alpha"] < each["interval"][1]
        assert (each["drafted_share"] < 1) == (each["drafter"] == "lookup")


def test_the_table_says_what_it_shows(pair: Path) -> None:
    done = run(
        pair, "--drafter", "model", "--drafter", "lookup", "--lenience", "1,0.5", "--top-k", "8", "--text-tokens", "20"
    )
    assert done.exit_code == 0, done.output
    head, _, model, lookup, *_ = done.stdout.splitlines()
    assert head.split() == ["drafter", "α,", "l", "=", "1", "α,", "l", "=", "0.5", "drafted"]
    assert model.split()[0] == "model"
    assert model.split()[-1] == "100%"
    assert lookup.split()[0] == "lookup"
    assert "temperature 1, top-k 8; float32 on cpu." in done.stdout
    assert "In brackets: 95 %, with" in done.stdout
    assert " prompts as independent observations." in done.stdout
    assert re.search(r"^model +0\.\d{3} \(0\.\d{3}–[01]\.\d{3}\)", done.stdout, re.MULTILINE)


def test_few_observations_have_no_interval(pair: Path) -> None:
    (pair / "two.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in PROMPTS[:2]))
    done = run(pair, "--temperature", "0", "--text-tokens", "12", prompts="two.jsonl")
    assert re.search(r"^model +[01]\.\d{3}$", done.stdout, re.MULTILINE), done.stdout
    assert "Too few observations for an interval: 2 texts." in done.stdout
    (pair / "two.jsonl").write_text(json.dumps({"text": "abc"}))
    done = run(pair, "--temperature", "0", "--text-tokens", "12", prompts="two.jsonl")
    assert "in 1 text after 1 prompt;" in done.stdout


def test_the_greedy_text_of_a_prompt_is_used_once(pair: Path) -> None:
    done = run(pair, "--temperature", "0", "--tokens", "5000", "--text-tokens", "12")
    assert done.exit_code == 0, done.output
    assert "in 10 texts after 10 prompts; temperature 0" in done.stdout
    assert "5,000 tokens were requested, but at temperature 0 each prompt gives one text" in done.stdout


def test_the_options_are_those_of_the_measurement() -> None:
    offered = {str(option.name) for option in main.commands["alpha"].params}
    own = {"as_json", "ngram_documents", "prompts_file"}
    assert offered - own == alpha.Options.__annotations__.keys() - {"ngram_by_line", "prompts"}
    defaults = {option.name: option.default for option in main.commands["alpha"].params}
    for name in ("tokens", "keep_mass", "max_support", "ngram_order", "ngram_entries", "lookup_min_match", "seed"):
        assert defaults[name] == getattr(alpha.Options("", "", (), ()), name)


def test_progress_in_a_log_is_a_line_for_each_kind_of_work(pair: Path) -> None:
    done = run(pair, "--text-tokens", "20")
    assert not {"\r", "\x1b"}.intersection(done.stderr)
    lines = [re.sub(r"^outrider: \d+ s: ", "", line) for line in done.stderr.splitlines()]
    assert [line.partition(":")[0] for line in lines] == [
        "Loading the models", "The target writes", "The target writes", "Measuring", "Measuring",
    ]  # fmt: skip
    assert lines[2] == "The target writes: 200 of 200 tokens"
    assert re.fullmatch(r"Measuring: (2\d\d) of \1 tokens", lines[4])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--lenience", "0"], 2, "'--lenience': 0.0 is not in the range 0<x<=1"),
        (["--lenience", "1,1.5"], 2, "'--lenience': 1.5 is not in the range 0<x<=1"),
        (["--lenience", "half"], 2, "'--lenience': 'half' is not a valid float range"),
        (
            ["--drafter", "staged"],
            2,
            "'staged' is not one of 'model', 'parallel', 'unigram', 'bigram', 'ngram'",
        ),
        (["--skip-layers", "0"], 2, "make the draft: leave out --draft and --drafter"),
        (["--find-skip-layers", "1"], 2, "make the draft: leave out --draft and --drafter"),
        (["--drafter", "parallel"], 1, "draft' has no mask token"),
        (["--drafter", "bigram"], 2, "--drafter bigram has no text to count: give --ngram-corpus FILE"),
        (["--ngram-corpus", "no/such.txt"], 2, "File 'no/such.txt' does not exist"),
        (["--prompts-file", "no/such.jsonl"], 2, "File 'no/such.jsonl' does not exist"),
        (["--top-p", "0"], 2, "'--top-p': 0.0 is not in the range 0<x<=1"),
        (["--text-tokens", "5000"], 1, "--text-tokens is 5000, and the longest prompt has 5 tokens"),
        (["--draft", "no/such/model"], 1, "there is no folder 'no/such/model'; give a folder, or a hub id"),
        (["--draft", str(MODELS / "draft")], 1, "--draft and --target differ in their vocabularies"),
    ],
)
def test_bad_input_is_one_line(pair: Path, arguments: list[str], code: int, message: str) -> None:
    refused = run(pair, *arguments)
    assert (refused.exit_code, refused.stdout) == (code, "")
    assert message in refused.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "abc"}\n\n{"prompt": "abc"}\n', "line 3 has neither text nor messages"),
        ("\n", "has no prompts"),
        ('{"messages": [{"role": "user"}]}', "a message of prompt 1 has no role or no content"),
        ('{"messages": [{"role": "user", "content": "abc"}]}', "prompt 1: the tokenizer has no chat template"),
    ],
)
def test_bad_prompts_are_one_line(pair: Path, content: str, message: str) -> None:
    (pair / "bad.jsonl").write_text(content)
    refused = run(pair, prompts="bad.jsonl")
    assert (refused.exit_code, refused.stdout) == (1, "")
    *progress, line = refused.stderr.splitlines()
    assert progress in ([], ["outrider: 0 s: Loading the models"])
    assert line.startswith("outrider: --prompts-file")
    assert message in line


def test_a_target_needs_a_draft_of_its_own(pair: Path) -> None:
    refused = run(pair, draft="")
    assert refused.exit_code == 2
    assert "--target is given, so give --draft too" in refused.stderr
    assert run(pair, "--drafter", "lookup", "--tokens", "20", draft="").exit_code == 0


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech")
    encoder_decoders.save("whisper", folder / "target")
    encoder_decoders.save("whisper", folder / "draft", encoder_decoders.NOISE)
    (folder / "clips").mkdir()
    for seed, seconds in enumerate((0.7, 2.3)):  # a window has a second
        path = folder / "clips" / f"{seed}.wav"
        soundfile.write(path, encoder_decoders.noise(seconds, seed), encoder_decoders.RATE)
    (folder / "clips" / "notes.txt").write_text("no speech")
    return folder


def transcribe(folder: Path, *arguments: str) -> Result:
    models = ["--target", str(folder / "target"), "--draft", str(folder / "draft")]
    return CliRunner().invoke(main, ["alpha", *models, "--dtype", "float32", "--tokens", "100", *arguments])


def test_speech_is_measured_in_windows(speech: Path) -> None:
    given = [
        "--audio",
        str(speech / "clips"),
        "--text-tokens",
        "20",
        "--language",
        "de",
        "--timestamps",
        "--lenience",
        "1,.5",
    ]
    done = transcribe(speech, *given, "--lenience", "1,.5", "--drafter", "model", "--drafter", "lookup", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["prompts"] == 4, "windows: one of the first clip, three of the second"
    assert found["tokens"] >= 100
    exact, lenient, *_ = found["estimates"]
    assert 0.1 < exact["alpha"] < lenient["alpha"] <= 1
    assert (found["language"], found["audio"]) == ("de", [str(speech / "clips")])
    one = transcribe(speech, "--audio", str(speech / "clips" / "0.wav"))
    assert "after 1 speech window; temperature 1" in one.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 1, "target takes speech: give --audio FILE_OR_FOLDER"),
        (["--audio", "TARGET"], 1, "the folder has no file that ends in .wav, .flac, .ogg, .mp3"),
        (["--audio", "NOTES"], 1, "cannot decode"),
        (["--audio", "CLIPS", "--language", "tlh"], 1, "--language is 'tlh'; the model offers de, en"),
        (["--audio", "CLIPS", "--prompts-file", "NOTES"], 2, "--audio and --prompts-file are given"),
        (["--language", "de"], 2, "--language is given; give --audio too"),
    ],
)
def test_speech_that_cannot_be_measured_is_one_line(
    speech: Path, arguments: list[str], code: int, message: str
) -> None:
    paths = {"TARGET": speech / "target", "NOTES": speech / "clips" / "notes.txt", "CLIPS": speech / "clips"}
    refused = transcribe(speech, *(str(paths.get(word, word)) for word in arguments))
    assert (refused.exit_code, refused.stdout) == (code, "")
    assert message in refused.stderr.splitlines()[-1]


def test_a_target_of_text_takes_no_speech(pair: Path, speech: Path) -> None:
    models = ["--target", str(pair / "target"), "--draft", str(pair / "draft")]
    refused = CliRunner().invoke(main, ["alpha", *models, "--audio", str(speech / "clips")])
    assert refused.exit_code == 1
    assert "target takes no speech: give --prompts-file" in refused.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose layers 0 and 2 of 4 do nothing."""
    folder = tmp_path_factory.mktemp("idle")
    target = pairs.write_target(folder / "target", seed=1)
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in PROMPTS))
    config = AutoConfig.from_pretrained(target, num_hidden_layers=4)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            for output in (layer.self_attn.o_proj, layer.mlp.down_proj):
                output.weight.mul_(0 if number in (0, 2) else 20)
    model.save_pretrained(target)
    return folder


def test_the_search_finds_the_layers_that_do_least(idle: Path) -> None:
    """Idle ones first, without trying more; then the better of the other two, by α of each measured alone."""
    done = run(idle, "--find-skip-layers", "3", "--json", draft="")
    assert done.exit_code == 0, done.output
    assert re.search(r"Searching: [\d,]+ of [\d,]+ tokens", done.stderr)
    found = json.loads(done.stdout)
    assert [step["skip_layers"] for step in found["steps"][:2]] == ["0", "0,2"]
    alphas = {}
    for text in ("0,2", "0-2", "0,2-3"):
        alone = run(idle, "--skip-layers", text, "--json", draft="")
        assert alone.exit_code == 0, alone.output
        (estimate,) = json.loads(alone.stdout)["estimates"]
        alphas[text] = estimate["alpha"]
    assert found["steps"][1]["alpha"] == pytest.approx(alphas.pop("0,2"), abs=1e-4)
    best = max(alphas, key=lambda text: alphas[text])
    assert found["steps"][2] == {
        "layer": 1 if best == "0-2" else 3, "skip_layers": best, "alpha": pytest.approx(alphas[best], abs=1e-4)
    }  # fmt: skip
    assert abs(alphas["0-2"] - alphas["0,2-3"]) > 0.01


def test_the_search_says_how_to_serve_its_layers(idle: Path) -> None:
    done = run(idle, "--find-skip-layers", "1", draft="")
    assert done.exit_code == 0, done.output
    target = idle / "target"
    serve = f"outrider serve --target {target} --draft {target} --drafter model --skip-layers 0"
    assert done.stdout.splitlines()[-1] == f"To serve: {serve}"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--find-skip-layers", "4"], 1, "--find-skip-layers is 4, and"),
        (["--skip-layers", "4"], 1, "has layers 0 to 3, and no layer 4"),
        (["--skip-layers", "0", "--find-skip-layers", "1"], 2, "give --skip-layers, or --find-skip-layers, not both"),
        (["--skip-layers", "0", "--drafter", "lookup"], 2, "make the draft: leave out --draft and --drafter"),
    ],
)
def test_layers_that_cannot_be_left_out_are_one_line(idle: Path, arguments: list[str], code: int, message: str) -> None:
    refused = run(idle, *arguments, draft="")
    assert (refused.exit_code, refused.stdout) == (code, "")
    assert message in refused.stderr.splitlines()[-1]
    assert "The target writes" not in refused.stderr
