"""Drafters: whatever proposes tokens. `base` is the seam, the rest are the kinds there are."""
