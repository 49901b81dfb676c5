"""Serve the site after the demonstration, for this machine only."""

import contextlib
import secrets
from collections.abc import Iterator

from django.contrib.auth import get_user_model
from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler
from django.core.wsgi import get_wsgi_application
from django.db import connection

from django_fencedlock import lock
from django_fencedlock.exceptions import FencedLockError

from . import DemoFailed
from .seed import seed

HOST, USER = "127.0.0.1", "demo"


class _Quiet(WSGIRequestHandler):
    def log_message(self, *args: object) -> None:
        """Don't write to the terminal."""


def serve(port: int) -> None:
    """Serve the site until Ctrl-C; port 0 picks a free one."""
    seed()
    password = _make_login()
    connection.close()
    try:
        server = ThreadedWSGIServer((HOST, port), _Quiet)
    except OSError as exc:
        raise DemoFailed(f"Could not listen on {HOST}:{port}: {exc}") from exc
    server.daemon_threads = True
    server.set_app(StaticFilesHandler(get_wsgi_application()))
    site = f"http://{HOST}:{server.server_port}"
    print(f"\nThe site is at {site}/\n\n   user      {USER}\n   password  {password}\n")
    print("Ctrl-C stops the site and its servers.", flush=True)
    with server, _a_lock():
        server.serve_forever()


@contextlib.contextmanager
def _a_lock() -> Iterator[None]:
    """Hold a lock that you can see and release in the admin, unless another site holds it."""
    lease = lock("the-site").acquire(blocking=False)
    try:
        yield
    finally:
        if lease is not None:
            with contextlib.suppress(FencedLockError):
                lease.release()


def _make_login() -> str:
    """Create a superuser, and return its new password."""
    password = secrets.token_urlsafe(9)
    user, _ = get_user_model().objects.get_or_create(
        username=USER, defaults={"is_staff": True, "is_superuser": True}
    )
    user.set_password(password)
    user.save()
    return password
