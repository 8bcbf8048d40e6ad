"""A process that logs as a service does, for tests of how processes are started, watched and stopped.

`python -m tests.outrider.cli.stand_in WORDS`, each word a step: `listen` logs an address, `listen=N` also a grace,
`say=TEXT` a line, `deaf` ignores SIGTERM, `wait` sleeps, `exit=N` ends.
"""

import json
import signal
import sys
import time


def main(words: list[str]) -> None:
    for word in words:
        name, _, value = word.partition("=")
        match name:
            case "listen":
                grace = {"grace": float(value)} if value else {}
                print(json.dumps({"event": "listening", "address": "127.0.0.1:1", **grace}))
            case "say":
                print(value, file=sys.stderr)
            case "deaf":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            case "wait":
                time.sleep(60)
            case "exit":
                sys.exit(int(value))


if __name__ == "__main__":
    main(sys.argv[1:])
