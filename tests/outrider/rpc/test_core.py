"""How gRPC's core waits for messages, in the commands."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("given", [None, "-event_engine_client"])
def test_the_core_knows_its_option_and_services_do_not_inherit_it(given: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    if given is not None:
        environment["GRPC_EXPERIMENTS"] = given  # a user's own choice stays
    # Of an unknown name the core complains when it is imported.
    program = "import outrider.cli, os; print(os.environ.get('GRPC_EXPERIMENTS'))"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{given}\n", "")
