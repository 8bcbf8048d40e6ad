"""What the benchmarks of a pair are asked alike on their command lines."""

from __future__ import annotations

import argparse
from pathlib import Path

DEMO = Path(__file__).parents[1] / "models" / "demo"


def pair_parser(program: str, description: str, *, quick: str) -> argparse.ArgumentParser:
    """Return a parser that knows the models, the prompts and the output file; `quick` says what `--quick` does."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--resume", action="store_true", help="go on with what the output file holds")
    parser.add_argument("--output", type=Path, help="JSON file to write; what is drawn goes beside it")
    parser.add_argument("--target", type=Path, default=DEMO / "target", help="folder of the target")
    parser.add_argument("--draft", type=Path, default=DEMO / "draft", help="folder of the draft")
    parser.add_argument("--prompts-file", type=Path, default=DEMO / "prompts.jsonl", help="one JSON object a line")
    return parser
