"""What worker A and worker B do: change a balance under a lock. One process each."""

import argparse
import json
import logging
import sys
import threading
from typing import Any

import django

from django_fencedlock import LeaseLost, StaleFence, lock

_mouth = threading.Lock()


def work(arguments: argparse.Namespace) -> None:
    """Change the account as the command line says, and tell each step on stdout."""
    django.setup()
    logging.getLogger("django_fencedlock").addHandler(_Teller())
    if arguments.checked:
        try:
            change(arguments)
        except StaleFence as exc:
            say("refused", message=str(exc))
            # The way to go on: take the lock anew, read anew.
            arguments.ask = False
            change(arguments)
    else:
        try:
            change(arguments)
        except LeaseLost:
            say("lost")


def change(arguments: argparse.Namespace) -> None:
    """Read the balance, work for a while, and write what comes of it: all under the lock."""
    # The models can be imported only now that Django is set up.
    from .accounts.fencing import fenced
    from .accounts.models import Account

    with taken(arguments) as lease:
        say("acquired", token=lease.token)
        account = Account.objects.get(pk=arguments.account)
        say("read", balance=account.balance)
        if arguments.ask:
            say("asks")
            # Whoever answers may take long; and this process may be paused meanwhile.
            sys.stdin.readline()
            say("woke")
        account.balance += arguments.amount
        if arguments.checked:
            with fenced(lease):
                account.save()
        else:
            account.save()
        say("wrote", balance=account.balance, token=lease.token)
    say("released", token=lease.token)


def taken(arguments: argparse.Namespace) -> Any:
    """Return the lock of the account, and tell who has it."""
    account_lock = lock(f"account:{arguments.account}", ttl=arguments.ttl, blocking_timeout=15)
    if holder := account_lock.holder():
        say("waits", holder=str(holder), token=holder.token)
    return account_lock


def say(event: str, **facts: Any) -> None:
    """Tell the demo what happens. The keeper's thread logs, and so speaks as well."""
    line = json.dumps({"event": event, **facts}) + "\n"
    with _mouth:
        sys.stdout.write(line)
        sys.stdout.flush()


class _Teller(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say("log", message=record.getMessage())
