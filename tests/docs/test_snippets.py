"""Snippets of pages run: all `sh` and `python` blocks of a page, in order, in one folder.

- Services that a page starts by `outrider serve` or `python -m`, fronts and gateways run in the background until the
  page ends. A page that starts no service finds the demo pair.
- Files that a page expects of its reader, and services on other machines, are there: see `_prepared`.
- Hosts of the examples are this machine, and their ports are free ones. `make` runs with `-n`, `pip install` not at
  all.
- Ids of models on the hub are folders of a cache, with the weights of the demo pair.
- Commands that take minutes read fewer texts, by variables of the environment.
- A `text` block right after a `python` block is its output.
- Where a fence says why its block does not run ("```sh no-test: needs a cluster"), its commands are checked instead:
  flags, files and targets of make exist. `tests.clients` runs the programs that have an environment of their own.
"""

import ast
import asyncio
import contextlib
import inspect
import io
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from draft_service.settings import DraftSettings
from outrider.cli import main as outrider_command
from outrider.cli.processes import Pair
from outrider.service.settings import ServiceSettings
from tests.certificates import Authority
from tests.cluster import Cluster, free_address, wait_healthy
from tests.docs.pages import BY_CLIENTS, NEEDS, PAGES, Block, blocks, name
from tests.docs.services import Services, find_smg
from tests.machine import need_tools
from tests.project.tree import ROOT
from verifier_service.settings import VerifierSettings

LANGUAGES = ("sh", "python")
BLOCK_S = 120.0
HUB = {"meta-llama/Llama-3.1-8B-Instruct": "target", "meta-llama/Llama-3.2-1B-Instruct": "draft"}
# A quarter of a minute or more each.
# The README has the first steps of the tutorial.
SLOW = (
    "docs/tutorial/first-text.md",
    *(
        f"docs/how-to/{page}.md"
        for page in ("choose-a-draft", "evaluate", "measure-your-deployment", "openai", "playground", "speech")
    ),
)
CALLING = ("BENCH", "CHECK", "GENERATE", "TRANSCRIBE")  # commands whose address a page may leave out
FEWER_TEXTS = {
    "OMP_NUM_THREADS": "1",
    "OUTRIDER_ALPHA_TOKENS": "64",
    "OUTRIDER_BENCH_DRAFTERS": "model",
    "OUTRIDER_BENCH_GAMMAS": "2",
    "OUTRIDER_BENCH_MAX_NEW_TOKENS": "4",
    "OUTRIDER_BENCH_REPEATS": "1",
    "OUTRIDER_BENCH_TEMPERATURES": "1",
    "OUTRIDER_BENCH_TEXTS": "1",
    "OUTRIDER_CHECK_GAMMAS": "2",
    "OUTRIDER_CHECK_TEXTS": "12",
    "OUTRIDER_CHECK_TOKENS": "3",
}
SETTINGS: dict[str, type[ServiceSettings]] = {"draft_service": DraftSettings, "verifier_service": VerifierSettings}
NAMES = (
    {f"OUTRIDER_{field.upper()}" for kind in SETTINGS.values() for field in kind.model_fields}
    | {f"OUTRIDER_{command.upper()}" for command in outrider_command.commands}
)  # fmt: skip

_ADDRESS = re.compile(
    r"\b(?:127\.0\.0\.1|0\.0\.0\.0|localhost|[a-z]+-box|draft-[ab]|HOST):"
    r"(50051|50052|5006\d|80\d\d|8443|90\d\d|30000)\b"
)
_PORT = re.compile(r"(?<=--port )\d+\b")
_STARTS = re.compile(r"^ *(?:outrider serve|python -m (?:draft|verifier)_service)\b", re.MULTILINE)
_MAKE = re.compile(r"^( *)make\b", re.MULTILINE)
_PIP = re.compile(r"^ *pip install\b.*$", re.MULTILINE)
_ACTIVATE = re.compile(r"^ *(?:\.|source) \.venv/bin/activate$", re.MULTILINE)  # the programs are there already


def run(page: Path) -> list[Block]:
    """Return the blocks of a page that a test runs."""
    return [block for block in blocks(page, *LANGUAGES) if block.reason is None]


class Reader:
    """Runs the blocks of a page, in a folder with links to everything in the repository."""

    def __init__(self, page: Path, folder: Path, addresses: dict[str, str]) -> None:
        self._addresses = addresses
        self._names: dict[str, Any] = {"__name__": name(page)}
        self._folder = folder / "clone"
        for each in ROOT.iterdir():
            if not each.name.startswith((".", "build", "site")):
                (self._folder / each.name).symlink_to(each)
        draft, verifier = addresses["50051"], addresses["50052"]
        health = {"--health-listen": "127.0.0.1:0"}
        self._services = Services(
            folder,
            {
                "verifier_service": {"--listen": verifier, **health},
                "draft_service": {"--listen": draft, "--verifier": verifier, **health},
                "serve": {"--listen": draft, "--verifier-listen": verifier},
            },
        )

    def close(self) -> None:
        self._services.close()

    def here(self, text: str) -> str:
        """Return a block with the addresses of this machine."""

        def local(port: str) -> str:
            return self._addresses.setdefault(port, free_address())

        text = _ADDRESS.sub(lambda found: self._addresses.get(found[0]) or local(found[1]), text)
        return _PORT.sub(lambda found: local(found[0]).rpartition(":")[2], text)

    def shell(self, text: str) -> None:
        path = os.pathsep.join([str(self._services.programs), os.environ["PATH"]])
        ours = {f"OUTRIDER_{command}_DRAFT": self._addresses["50051"] for command in CALLING}
        python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [
                "bash",
                "-euo",
                "pipefail",
                "-c",
                self.here(_ACTIVATE.sub("", _PIP.sub("", _MAKE.sub(r"\1make -n", text)))),
            ],
            cwd=self._folder,
            env={**os.environ, **FEWER_TEXTS, **ours, "PATH": path, "PYTHONPATH": python_path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=BLOCK_S,
            check=False,
        )
        assert done.returncode == 0, f"exit code {done.returncode}:\n{done.stdout[-4000:]}"

    def python(self, text: str) -> str:
        """Run it after the page's blocks before it, `await` included; return its output."""
        code = compile(self.here(text), "<page>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        with contextlib.chdir(self._folder), contextlib.redirect_stdout(io.StringIO()) as printed:
            result = eval(code, self._names)
            if inspect.iscoroutine(result):
                asyncio.run(result)
        return printed.getvalue()


def _case(page: Path) -> Any:
    return pytest.param(page, id=name(page), marks=[pytest.mark.slow] if name(page) in SLOW else [])


@pytest.mark.parametrize("page", [_case(page) for page in PAGES if run(page)])
def test_snippets_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    run_here = run(page)
    monkeypatch.setenv("HF_HUB_CACHE", str(_hub_cache(tmp_path / "hub")))
    for program in ("openssl", "curl"):
        if any(re.search(rf"^ *{program}\b", block.text, re.MULTILINE) for block in run_here):
            need_tools(program)
    if any(re.search(r"^ *smg\b", block.text, re.MULTILINE) for block in run_here):
        find_smg()
    if any(_STARTS.search(block.text) for block in run_here if block.language == "sh"):
        addresses = {"50051": free_address(), "50052": free_address()}
    else:
        pair: Pair = request.getfixturevalue("demo_pair")
        addresses = {"50051": pair.draft.address, "50052": pair.verifier.address}
    folder = tmp_path / "clone"
    folder.mkdir()
    with _prepared(page, folder, request) as more:
        _run(Reader(page, tmp_path, addresses | more), run_here)


def _run(reader: Reader, run_here: list[Block]) -> None:
    try:
        for block in run_here:
            try:
                if block.language == "sh":
                    reader.shell(block.text)
                else:
                    printed = reader.python(block.text)
                    assert printed == _output(block, printed)
            except Exception as error:
                raise AssertionError(f"{block} does not run: {error}") from error
    finally:
        reader.close()


@contextlib.contextmanager
def _prepared(page: Path, folder: Path, request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """What the page expects of its reader; yield addresses of hosts.

    Of openai.md: two draft services with TLS, and the files of a front that other machines reach.
    """
    if name(page) != "docs/how-to/openai.md":
        yield {}
        return
    authority = Authority(folder, "ca")
    front = authority.issue("api.example.org", "127.0.0.1", file="front")
    for file in ("draft-token", "keys"):
        (folder / file).write_text("a-token-of-some-length\n", encoding="ascii")
        (folder / file).chmod(0o600)
    pair: Pair = request.getfixturevalue("demo_pair")
    security = ("--tls-cert", str(front.cert), "--tls-key", str(front.key), "--health-listen", "127.0.0.1:0")
    with Cluster(security) as cluster:
        drafts = [cluster.draft(pair.verifier) for _ in range(2)]
        wait_healthy(*drafts)
        yield {f"draft-{letter}:50051": draft.address for letter, draft in zip("ab", drafts, strict=True)}


def _hub_cache(folder: Path) -> Path:
    """Fill the folder as a download of the models would."""
    for model, demo in HUB.items():
        cached = folder / f"models--{model.replace('/', '--')}"
        snapshot = cached / "snapshots" / ("0" * 40)
        snapshot.parent.mkdir(parents=True)
        snapshot.symlink_to(ROOT / "models" / "demo" / demo)
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text(snapshot.name, encoding="utf-8")
    return folder


def _output(block: Block, otherwise: str) -> str:
    """Return the `text` block right after a block of Python."""
    found = list(blocks(block.page))
    after = found[found.index(block) + 1 :][:1]
    if not after or after[0].language != "text":
        return otherwise
    lines = block.page.read_text(encoding="utf-8").splitlines()
    end = block.line + block.text.count("\n") + 1
    return after[0].text if not "".join(lines[end : after[0].line - 1]).strip() else otherwise


# ---------------------------------------------------------------------------------------- blocks that do not run here


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_fences_say_why_a_block_does_not_run(page: Path) -> None:
    for block in blocks(page):
        assert not block.info.strip() or block.reason in (*NEEDS, BY_CLIENTS), f"{block}: {block.info}"


def test_programs_with_an_environment_of_their_own_have_a_test() -> None:
    tests = "".join(each.read_text(encoding="utf-8") for each in (ROOT / "tests" / "clients").glob("test_*.py"))
    for block in (block for page in PAGES for block in blocks(page) if block.reason == BY_CLIENTS):
        assert f'command("{block.text.split()[0]}"' in tests, block


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_name_existing_flags_files_and_targets(page: Path) -> None:
    for block in blocks(page, "sh"):
        for words in _commands(block.text):
            _check(block, words)


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command, without heredocs and comments."""
    text = re.sub(r"<<'?(\w+)'?.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL).replace("\\\n", " ")
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        while words and (re.match(r"[A-Z_]+=", words[0]) or words[0] in {"taskset", "numactl", "sudo"}):
            words = words[1:]
        if words:
            yield words


def _check(block: Block, words: list[str]) -> None:
    flags = {word.partition("=")[0] for word in words if word.startswith("--")}
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    if words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        known = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert set(targets) <= set(known), f"{block}: {words}"
    elif words[:2] == ["pip", "install"]:
        with (ROOT / "pyproject.toml").open("rb") as file:
            extras = tomllib.load(file)["project"]["optional-dependencies"]
        asked = {extra for word in words[2:] for extra in re.findall(r"[\w-]+", word.partition("[")[2])}
        # A copy in place of the clone would not find the models of the demo.
        assert (words[2], words[3].partition("[")[0]) == ("-e", "."), f"{block}: {words}"
        assert asked <= set(extras), f"{block}: {words}"
    elif words[0] == "outrider" and words[1:2] and not words[1].startswith("-"):
        assert words[1] in outrider_command.commands, f"{block}: outrider {words[1]}"
        assert flags <= _options(outrider_command.commands[words[1]]), f"{block}: {words}"
    elif module in SETTINGS:
        flags = {word.partition("=")[0] for word in words[words.index(module) :] if word.startswith("--")}
        assert flags <= _flags(module), f"{block}: {flags - _flags(module)}"
    elif words[0] == "kubectl" and "-k" in words:
        overlay = ROOT / words[words.index("-k") + 1]
        assert (overlay / "kustomization.yaml").is_file(), f"{block}: {overlay}"


def _options(command: click.Command) -> set[str]:
    found = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    if command.context_settings.get("ignore_unknown_options"):
        passed = {flag.removeprefix("--") for module in SETTINGS for flag in _flags(module)}
        found |= {f"--{prefix}{flag}" for flag in passed for prefix in ("", "verifier-", "draft-")}
    return found | {"--help"}


def _flags(module: str) -> set[str]:
    named = {field.replace("_", "-") for field in SETTINGS[module].model_fields}
    return {f"--{each}" for each in named} | {f"--no-{each}" for each in named} | {"--help", "--version"}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_variables_that_pages_name_exist(page: Path) -> None:
    named = set(re.findall(r"\bOUTRIDER_[A-Z_]+[A-Z]\b", page.read_text(encoding="utf-8")))
    commands = tuple(f"OUTRIDER_{command.upper()}_" for command in outrider_command.commands)
    assert {each for each in named - NAMES if not each.startswith(commands)} == set()


OTHER_FLAGS = {
    "--model-server-metrics-port",  # an endpoint picker
    "--build-arg",  # docker
    "--max-restarts",
    "--nproc-per-node",
    "--shutdown-timeout",  # torchrun
}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_flags_that_pages_name_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for block in blocks(page):
        text = text.replace(block.text, "")
    named = set(re.findall(r"`(--[a-z][a-z-]*[a-z])(?=[ =`])", text))
    known = OTHER_FLAGS.union(*map(_flags, SETTINGS), *map(_options, outrider_command.commands.values()))
    assert named - known == set()
