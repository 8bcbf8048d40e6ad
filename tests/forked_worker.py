"""Workers of pytest-xdist, forked from the fork server: it has imported most of what tests import.

Run as a program, in place of the interpreter that a worker would start with, this file gives its standard streams to a
child of the fork server, and ends with it. It imports as little as possible.
"""

import os
import select
import shlex
import signal
import sys
from multiprocessing.connection import Client
from multiprocessing.reduction import send_handle


def is_possible() -> bool:
    """Return whether this system can wait for a process of another parent, as Linux can."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def command() -> str:
    """Return the command in place of an interpreter's, as a shell reads it."""
    return shlex.join([sys.executable, "-P", "-S", __file__])


def join() -> int:
    """Start a worker, wait until it ends, and return its exit code. If this process ends first, so does the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the controller ends its workers
    with Client(os.environ["TESTS_FORK_SERVER"]) as channel:
        channel.send(("tests.forked_worker", [], dict(os.environ), None, ()))
        for descriptor in range(3):
            send_handle(channel, descriptor, 0)
        child = channel.recv()
        for descriptor in range(2):
            os.close(descriptor)
        select.select([os.pidfd_open(child)], [], [])
        channel.send(child)
        return int(channel.recv())


def main() -> int:
    """Run the worker, in the child: execnet sends it as one line of Python."""
    exec(eval(sys.stdin.readline()), {"__name__": "__main__"})
    return 0


if __name__ == "__main__":
    sys.exit(join())
