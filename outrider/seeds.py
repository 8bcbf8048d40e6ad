"""Seeds of the samples of one request."""

_MASK64 = (1 << 64) - 1


def derive_seed(seed: int, sample: int) -> int:
    """The seed of a sample: the request's own for the first sample, and a number derived from it for the others.

    Output number `sample` of SplitMix64 (Steele, Lea and Flood, 2014) begun at `seed`: distinct for distinct samples.
    """
    if sample == 0:
        return seed
    z = (seed + sample * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)
