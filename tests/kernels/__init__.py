"""Tests of `kernels`: every path against the oracle, the oracle against enumeration, and both against mutants."""
