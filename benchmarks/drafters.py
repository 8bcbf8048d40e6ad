"""α of every drafter on the demo pair, through both services: what it drafts, what is accepted, and what it costs.

Two kinds of prompts: code to go on with, and code that is to be written once more, as an edit of it is. The drafter
`ngram` counts what the demo target was trained on, none of which is in the prompts.

    python -m benchmarks.drafters [--prompts 16] [--tokens 64]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.arguments import DEMO
from models.corpus import training_documents
from outrider.cli.processes import ServiceProcess
from outrider.client import Client, Completion

DRAFTERS = ("model", "ngram", "lookup", "random")
TEMPERATURES = (0.0, 1.0)
GAMMA = 5
HEALTHY_WITHIN_S = 300.0


def main() -> int:
    """Runs and prints a table, then one JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drafters", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompts", type=int, default=16, help="prompts of each kind")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to write after each")
    parser.add_argument("--corpus-mb", type=float, default=4.0, help="MB of the training text that ngram counts")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder, services(Path(folder), given.corpus_mb) as client:
        print("| prompts | T | drafter | drafted | accepted | α | tokens a round | µs a drafted token |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for kind, prompts in kinds_of_prompts(given.prompts).items():
            for temperature in TEMPERATURES:
                for drafter in DRAFTERS:
                    done = [write(client, prompt, drafter, temperature, given.tokens) for prompt in prompts]
                    rows.append(row(kind, temperature, drafter, done))
                    print("| " + " | ".join(str(value) for value in rows[-1].values()) + " |", flush=True)
    print(json.dumps(rows))
    return 0


@contextmanager
def services(folder: Path, corpus_mb: float) -> Iterator[Client]:
    """The demo pair in float32, and a client of it."""
    corpus = folder / "corpus.txt"
    text = "\n".join(document.text for document in training_documents())
    corpus.write_text(text[: int(corpus_mb * 1e6)], encoding="utf-8")
    flags = ("--listen", "127.0.0.1:0", "--dtype", "float32", "--threads", "1")
    with ExitStack() as running:
        verifier = running.enter_context(
            ServiceProcess.start(["verifier_service", "--model", str(DEMO / "target"), *flags])
        )
        arguments = ["--model", str(DEMO / "draft"), "--verifier", verifier.address, "--ngram-corpus", str(corpus)]
        draft = running.enter_context(ServiceProcess.start(["draft_service", *arguments, *flags]))
        begun = time.monotonic()
        for service in (verifier, draft):
            service.wait_healthy(HEALTHY_WITHIN_S)
        print(f"healthy after {time.monotonic() - begun:.0f} s", file=sys.stderr)
        yield running.enter_context(Client(draft.address, timeout=HEALTHY_WITHIN_S))


def kinds_of_prompts(count: int) -> dict[str, list[str]]:
    """Code to go on with, and the same code followed by its own beginning."""
    lines = (DEMO / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    texts = [json.loads(line)["text"] for line in lines]
    return {"go on": texts, "once more": [f"{text}\n\n# Once more:\n{text[: len(text) // 4]}" for text in texts]}


def write(client: Client, prompt: str, drafter: str, temperature: float, tokens: int) -> Completion:
    """One text, judged token by token, so that α is the paper's."""
    return client.complete(
        prompt,
        drafter=drafter,
        temperature=temperature,
        max_new_tokens=tokens,
        ignore_eos=True,
        gamma=GAMMA,
        rule="tokenwise",
        seed=1,
    )


def row(kind: str, temperature: float, drafter: str, done: list[Completion]) -> dict[str, object]:
    """What the texts come to together; α is weighted by what was drafted."""
    statistics = [each.statistics for each in done]
    drafted = sum(each.num_draft_tokens for each in statistics)
    drafting = sum(each.samples[0].timings.draft_us for each in done)
    written = sum(len(each.token_ids) for each in done)
    return {
        "prompts": kind,
        "T": temperature,
        "drafter": drafter,
        "drafted": drafted,
        "accepted": sum(each.num_accepted_tokens for each in statistics),
        "alpha": round(sum(each.alpha * each.num_draft_tokens for each in statistics) / max(1, drafted), 3),
        "tokens_per_round": round(written / sum(each.num_rounds for each in statistics), 2),
        "us_per_drafted_token": round(drafting / max(1, drafted)),
    }


if __name__ == "__main__":
    sys.exit(main())
