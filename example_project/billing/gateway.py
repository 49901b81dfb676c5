"""
A fake payment service, which uses a file instead of a web API.

It is as unreliable as a real one: it loses requests, and answers after the money was charged.
"""

import contextlib
import random
import sqlite3
import uuid
from collections.abc import Iterator
from decimal import Decimal

from django.conf import settings

TABLE = """
CREATE TABLE IF NOT EXISTS charge (
    idempotency_key TEXT PRIMARY KEY, receipt TEXT, amount TEXT, token INTEGER
)
"""

# The service compares the token in the statement that writes. A repeated key returns the first
# charge. A token older than the newest one for that key returns nothing.
CHARGE = """
INSERT INTO charge VALUES (:key, :receipt, :amount, :token)
ON CONFLICT (idempotency_key) DO UPDATE SET token = excluded.token WHERE excluded.token >= token
RETURNING receipt, amount
"""


class NoAnswer(Exception):
    """The payment service did not answer. It may have charged the amount."""


class StaleRequest(Exception):
    """A newer holder of the lock has already used the payment service."""


class AmountDiffers(Exception):
    """The key was charged before with another amount."""


def charge(key: str, amount: Decimal, token: int) -> str:
    """
    Charge an amount, and return the receipt.

    Args:
        key: Identifies the payment, not the caller: a second request with the same key charges
            nothing.
        token: The caller's token: a stale caller is rejected.
    """
    _lose_now_and_then()
    request = {"key": key, "receipt": uuid.uuid4().hex, "amount": str(amount), "token": token}
    with _service() as service:
        # SQLite completes the statement only after all rows are fetched.
        answer = service.execute(CHARGE, request).fetchall()
    _lose_now_and_then()
    if not answer:
        raise StaleRequest(f"A newer request than token {token} has arrived for {key!r}.")
    receipt, charged = answer[0]
    if Decimal(charged) != amount:
        # Returning the receipt would mean that this amount was paid.
        raise AmountDiffers(f"{key!r} was already charged with {charged}, not {amount}.")
    return str(receipt)


def charges() -> list[tuple[str, Decimal]]:
    """Return all charges of the service."""
    with _service() as service:
        rows = service.execute("SELECT idempotency_key, amount FROM charge ORDER BY 1")
        return [(key, Decimal(amount)) for key, amount in rows]


def is_lost() -> bool:
    """Return whether to lose one message, at random."""
    return random.random() < settings.GATEWAY_LOSES


def _lose_now_and_then() -> None:
    if is_lost():
        raise NoAnswer("The payment service did not answer.")


@contextlib.contextmanager
def _service() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(settings.GATEWAY_FILE, timeout=10, isolation_level=None)
    with contextlib.closing(connection):
        connection.execute(TABLE)
        yield connection
