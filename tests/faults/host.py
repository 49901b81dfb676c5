"""
A process that has everything loaded, and forks a client whenever the lab wants one.

``python -m tests.faults.host`` reads one order a line, as JSON, and answers each with a line.
"""

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def main() -> None:
    import django

    django.setup()
    from . import client
    from .settings import LAB

    # No process waits for the clients, and a zombie would look alive.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    _say(ready=True)
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "client":
            job: Callable[[], Any] = _running(order["name"], LAB)
        elif order["do"] == "prepare":
            job = _writing(order["to"], lambda: client.prepare(LAB["using"], LAB["rows"]))
        else:
            job = _writing(order["to"], lambda: client.collect(LAB["using"]))
        _say(pid=_fork(job))


def _say(**answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _fork(job: Callable[[], Any]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(0)
            job()
            status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Close sessions as at the end of any process.
        import atexit

        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(status)


def _running(name: str, lab: Any) -> Callable[[], None]:
    from .kinds import CLIENTS

    # Created in the process itself: no other process may hold its account open.
    return lambda: CLIENTS[lab["kind"]](name, lab).run()


def _writing(path: str, job: Callable[[], Any]) -> Callable[[], None]:
    def work() -> None:
        whole = Path(path).with_suffix(".part")
        whole.write_text(json.dumps(job()))
        # A reader of the file finds all of it.
        whole.rename(path)

    return work


if __name__ == "__main__":
    main()
