"""Choose the demo's prompts: beginnings of held-out modules' parts, cut where a programmer would pause.

It needs source text and the tokenizer, and no model.

    python -m models.prompts > models/demo/prompts.jsonl
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from models import DEMO
from models.corpus import Document, held_out_documents, name_hash
from models.tokenizer import load_tokenizer

COUNT = 64
SHORTEST, LONGEST = 24, 100  # tokens
FIRST = "copy.py:67"  # the demo's default: short, and known to everyone

# Possible ends of a prompt: the kind of pause, and the line that makes it.
PAUSES = {
    "docstring": re.compile(r'^ *"""[A-Z][^"]*$'),
    "function": re.compile(r"^ *(async )?def \w+\([^()]*\):$"),
    "class": re.compile(r"^ *class \w+(\([\w., ]*\))?:$"),
    "imports": re.compile(r"^(import|from) .*[^\\,(]$"),
    "branch": re.compile(r"^ +(if|for|while|with|try|else)\b.*:$"),
}


@dataclass(frozen=True)
class Prompt:
    """A prompt: where it is from (`module:line`, the last line it holds), how it ends, and its text."""

    source: str
    pause: str
    text: str


def candidates(document: Document, tokenizer: PreTrainedTokenizerFast) -> Iterator[Prompt]:
    """Every natural pause of a module, with as many whole lines before it as fit, begun at the start of a block."""
    lines = document.text.split("\n")
    for last, line in enumerate(lines[:-1]):
        pause = next((name for name, pattern in PAUSES.items() if pattern.match(line)), None)
        if pause is None or (pause == "imports" and not _ends_imports(lines, last)):
            continue
        text = _fitting(lines, last, tokenizer)
        if text is not None:
            yield Prompt(f"{document.name}:{last + 1}", pause, text)


def choose(documents: list[Document], tokenizer: PreTrainedTokenizerFast) -> list[Prompt]:
    """`COUNT` prompts, modules and pauses taken in turn so that none prevails. Raises ValueError where too few."""
    shelves: dict[tuple[str, str], list[Prompt]] = defaultdict(list)
    for document in documents:
        for prompt in candidates(document, tokenizer):
            shelves[document.name, prompt.pause].append(prompt)
    for prompts in shelves.values():
        prompts.sort(key=lambda prompt: name_hash(prompt.source))
    chosen: list[Prompt] = []
    depth = 0
    while len(chosen) < COUNT:
        layer = [prompts[depth] for prompts in shelves.values() if depth < len(prompts)]
        if not layer:
            raise ValueError(f"held-out modules hold {len(chosen)} prompts; {COUNT} are asked for")
        chosen += sorted(layer, key=lambda prompt: name_hash(prompt.source))[: COUNT - len(chosen)]
        depth += 1
    return chosen


def _ends_imports(lines: list[str], index: int) -> bool:
    return not lines[index + 1].strip() and any(
        PAUSES["imports"].match(line) for line in lines[max(0, index - 2) : index]
    )


def _fitting(lines: list[str], last: int, tokenizer: PreTrainedTokenizerFast) -> str | None:
    """The longest run of lines up to `last` that fits and begins after a blank line or at the module's start."""
    best = None
    for first in range(last, -1, -1):
        text = "\n".join(lines[first : last + 1]) + "\n"
        length = len(tokenizer(text)["input_ids"])
        if length > LONGEST:
            break
        if length >= SHORTEST and lines[first].strip() and (first == 0 or not lines[first - 1].strip()):
            best = text
    return best


def main() -> None:
    """Print the prompts, one JSON object a line."""
    tokenizer = load_tokenizer(DEMO / "target")
    prompts = sorted(choose(held_out_documents(), tokenizer), key=lambda prompt: prompt.source != FIRST)
    for number, prompt in enumerate(prompts):
        row = {"id": f"{number:02d}-{prompt.pause}", "source": prompt.source, "text": prompt.text}
        print(json.dumps(row, ensure_ascii=False))


if __name__ == "__main__":
    main()
