"""A TCP proxy that misbehaves on demand, and that listens in: for tests, and for benchmarks of distance."""

from tests.proxy.flow import Segment, Way
from tests.proxy.proxy import BOTH, Proxy

__all__ = ["BOTH", "Proxy", "Segment", "Way"]
