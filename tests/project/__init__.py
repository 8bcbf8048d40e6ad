"""The rules that hold for the whole tree: style, types, imports, size, pins, and what an installation holds."""
