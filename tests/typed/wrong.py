"""
Mistakes that type checkers find; mypy complains of an ``ignore`` that nothing needs.

Pyright is told in `shop.py` alone what is right: it reads these comments, and doesn't miss them.
"""

from celery import shared_task

from django_fencedlock import lock
from django_fencedlock.celery import single_instance
from tests.typed.shop import Account, charge, nightly


@lock("report:{user_id}")
def build(user_id: int) -> str:
    return str(user_id)


@shared_task(bind=True)
@single_instance("feed:{url}")
def fetch(self: object, url: str) -> str:
    return url


def arguments() -> None:
    build("7")  # type: ignore[arg-type]
    charge()  # type: ignore[call-arg]
    charge(1, 2)  # type: ignore[arg-type]
    charge.delay("1")  # type: ignore[arg-type]
    nightly.delay(1)  # type: ignore[call-arg]


def leases() -> None:
    with lock("x") as lease:
        print(lease.tokn)  # type: ignore[attr-defined]
    with Account.fencing.lock(pk=1) as lease:
        Account().save(lease=lease.token)  # type: ignore[arg-type]
    print(lock("x").acquire().token)  # type: ignore[union-attr]
    lock("x", timeout=3)  # type: ignore[call-overload]
    with lock("x", required=False) as maybe:
        print(maybe.token)  # type: ignore[union-attr]
    lock("x", required=False)(len)  # type: ignore[misc]
    lock("x").release()  # type: ignore[attr-defined]


single_instance("x", on_conflict="skipp")  # type: ignore[call-overload]
single_instance("x", ttl="3")  # type: ignore[call-overload]
single_instance(Account, pk=3)  # type: ignore[call-overload]
