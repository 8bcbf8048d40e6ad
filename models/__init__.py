"""How the shipped pairs are made and measured: the demo pair here, `translation` and `speech` in their folders."""

from pathlib import Path

DEMO = Path(__file__).parent / "demo"
