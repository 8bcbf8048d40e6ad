"""Tests of `kernels`: every path against the reference, the reference against enumeration, both against mutants."""
