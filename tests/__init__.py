"""The tests. They mirror the tree: tests of `kernels/sparse.py` are in `tests/kernels/test_sparse.py`."""
