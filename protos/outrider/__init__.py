"""Namespace of the contract's versions."""
