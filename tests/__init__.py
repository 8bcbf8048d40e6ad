"""The tests. They mirror the tree: what holds for `kernels/sparse.py` is in `tests/kernels/test_sparse.py`."""
