"""How the shipped pairs are made and measured: the demo pair here, `translation` and `speech` in their folders."""
