"""
Run the demonstration, or a command of Django's.

python -m example_project demo
python -m example_project manage migrate
"""

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path


def main() -> int:
    arguments = _parser().parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
    return arguments.run(arguments)


def _demo(arguments: argparse.Namespace) -> int:
    if not hasattr(signal, "SIGSTOP"):
        print("This system has no SIGSTOP, so the demo can't pause a process.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="fencedlock-demo-") as temporary:
        directory = Path(arguments.keep or temporary).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        # Before Django reads the settings; the workers inherit it.
        os.environ["EXAMPLE_DATA"] = str(directory)
        from .demo import demo

        return demo()


def _worker(arguments: argparse.Namespace) -> int:
    from .worker import work

    work(arguments)
    return 0


def _manage(arguments: argparse.Namespace) -> int:
    from django.core.management import execute_from_command_line

    execute_from_command_line(["python -m example_project manage", *arguments.command])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m example_project", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="pause a lock's holder past its lease, and watch")
    demo.add_argument("--keep", metavar="DIR", help="leave the database in DIR; else it is removed")
    demo.set_defaults(run=_demo)

    manage = commands.add_parser("manage", help="run a command of Django's", add_help=False)
    manage.add_argument("command", nargs=argparse.REMAINDER)
    manage.set_defaults(run=_manage)

    # Started by the demo.
    worker = commands.add_parser("worker")
    worker.add_argument("--account", type=int, required=True)
    worker.add_argument("--amount", type=int, required=True)
    worker.add_argument("--ttl", type=float, required=True)
    worker.add_argument("--ask", action="store_true", help="wait for an answer before writing")
    worker.add_argument("--checked", action="store_true", help="check the token when writing")
    worker.set_defaults(run=_worker)
    return parser


if __name__ == "__main__":
    sys.exit(main())
