"""What both servers of databases have in common: who logs in, and where."""

from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

from .process import Process
from .server import Server


class DatabaseServer(Server):
    """A server that a URL names, with a user, a password and a database."""

    #: What URLs and Django call it.
    engine: ClassVar[str]
    default_port: ClassVar[int]
    default_user: ClassVar[str]
    default_database: ClassVar[str]

    def __init__(self, url: str, process: Process | None = None) -> None:
        parts = urlsplit(url)
        super().__init__(parts.hostname or "127.0.0.1", parts.port or self.default_port, process)
        self.user = unquote(parts.username or self.default_user)
        self.password = unquote(parts.password or "")
        self.database = parts.path.lstrip("/") or self.default_database

    @property
    def url(self) -> str:
        return self.url_of(self.database)

    def url_of(self, database: str) -> str:
        secret = f":{self.password}" if self.password else ""
        return f"{self.engine}://{self.user}{secret}@{self.host}:{self.port}/{database}"

    def django(self, database: str | None = None, by: Any = None) -> dict[str, Any]:
        return {
            "ENGINE": f"django.db.backends.{self.engine}",
            "NAME": database or self.database,
            "USER": self.user,
            "PASSWORD": self.password,
            "HOST": (by or self).host,
            "PORT": str((by or self).port),
        }
