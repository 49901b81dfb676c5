"""
A payment service, or what this example has for one: a file of its own instead of a web API.

It is as unreliable as a real one: requests get lost on the way there, and answers on the way back,
when the money has been taken already.
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

# The service compares the token in the very statement that writes. Whoever asks again with the same
# key is answered with the first charge; an older token than was seen for that key gets nothing.
CHARGE = """
INSERT INTO charge VALUES (:key, :receipt, :amount, :token)
ON CONFLICT (idempotency_key) DO UPDATE SET token = excluded.token WHERE excluded.token >= token
RETURNING receipt, amount
"""


class NoAnswer(Exception):
    """The payment service did not answer: the money may have been taken, or not."""


class StaleRequest(Exception):
    """The payment service has heard from a newer holder of the lock."""


class AmountDiffers(Exception):
    """The same was to be paid before, with another amount, and may have been taken then."""


def charge(key: str, amount: Decimal, token: int) -> str:
    """
    Have an amount charged, and return the receipt.

    Args:
        key: Says what is to be paid, and never who asks: the second request with the same key
            charges nothing.
        token: Says who asks: one that was overtaken is refused.
    """
    _lose_now_and_then()
    request = {"key": key, "receipt": uuid.uuid4().hex, "amount": str(amount), "token": token}
    with _service() as service:
        # To its end: without that, SQLite doesn't count the statement as done.
        answer = service.execute(CHARGE, request).fetchall()
    _lose_now_and_then()
    if not answer:
        raise StaleRequest(f"A newer request than that under token {token} came for {key!r}.")
    receipt, charged = answer[0]
    if Decimal(charged) != amount:
        # Asked for in vain: to answer with the receipt would be to say that this amount was paid.
        raise AmountDiffers(f"{key!r} was charged {charged}, and can't be charged {amount}.")
    return str(receipt)


def charges() -> list[tuple[str, Decimal]]:
    """Return what was charged, as the service's own books have it."""
    with _service() as service:
        rows = service.execute("SELECT idempotency_key, amount FROM charge ORDER BY 1")
        return [(key, Decimal(amount)) for key, amount in rows]


def is_lost() -> bool:
    """Throw the dice for one message."""
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
