"""Tensor maths of speculative decoding: sampling, random numbers and the verification of proposals.

Import the modules themselves (`from kernels.verify import verify`): importing the package alone loads nothing heavy.
"""
