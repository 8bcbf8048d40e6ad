"""The speech pair: its synthesised speech, and how target and draft are made and measured."""
