"""The translation pair: its toy language, and how target and draft are made and measured."""
