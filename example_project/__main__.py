"""
Run the demonstration, or a Django command.

python -m example_project demo
python -m example_project manage migrate
"""

import argparse
import os
import signal
import sys


def main() -> int:
    arguments = _parser().parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
    return arguments.run(arguments)


def _demo(arguments: argparse.Namespace) -> int:
    if not hasattr(signal, "SIGSTOP"):
        print("This system has no SIGSTOP, so the demo can't pause a process.", file=sys.stderr)
        return 2
    from .demo import show

    return show.run(
        redis=arguments.redis,
        postgres=arguments.postgres,
        keep=arguments.keep,
        serve=arguments.serve,
        port=arguments.port,
    )


def _manage(arguments: argparse.Namespace) -> int:
    from django.core.management import execute_from_command_line

    execute_from_command_line(["python -m example_project manage", *arguments.command])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m example_project", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="pause a lock holder until its lease has expired")
    demo.add_argument("--redis", action="store_true", help="store locks and messages in Redis")
    demo.add_argument("--postgres", action="store_true", help="store data and locks in PostgreSQL")
    demo.add_argument("--serve", action="store_true", help="then serve the site until Ctrl-C")
    demo.add_argument(
        "--port", type=int, default=0, help="the port for --serve (default: a free one)"
    )
    demo.add_argument("--keep", metavar="DIR", help="keep the files in DIR")
    demo.set_defaults(run=_demo)

    manage = commands.add_parser("manage", help="run a Django command", add_help=False)
    manage.add_argument("command", nargs=argparse.REMAINDER)
    manage.set_defaults(run=_manage)
    return parser


if __name__ == "__main__":
    sys.exit(main())
