"""Drafters, which propose tokens: the interface (`base`), the guard around each, and the kinds."""
