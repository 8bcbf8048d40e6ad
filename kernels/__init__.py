"""Tensor maths of speculative decoding: laws, draws and the verification of proposals.

Import the modules themselves (`from kernels.verify import verify`). This package knows nothing of services, models or
tokenizers, and importing it alone loads nothing heavy.
"""
