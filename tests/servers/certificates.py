"""Certificates for servers and clients that speak TLS, made with openssl."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from . import finding, workspace
from .process import run_as_server_user

_DAYS = 2
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc")


@dataclass(frozen=True)
class Identity:
    """A certificate and its key, as PEM files."""

    certificate: Path
    key: Path


class Authority:
    """It signs certificates, and is not known to the system: another one is a mismatch."""

    def __init__(self) -> None:
        self._directory = workspace.new_directory("certificates")
        #: What the other side has to trust.
        self.certificate = self._directory / "authority.pem"
        self._key = self._directory / "authority.key"
        self._make("authority", "CN", "basicConstraints=critical,CA:TRUE", "keyUsage=keyCertSign")
        self.client = self.issue("client")

    def issue(self, name: str, field: str = "O") -> Identity:
        """
        Return a new certificate for *name*, and for a server on 127.0.0.1.

        With the name in the field CN, etcd's gateway refuses a client once users have to log in.
        """
        self._make(
            name,
            field,
            "subjectAltName=IP:127.0.0.1,DNS:localhost",
            "basicConstraints=CA:FALSE",
            "extendedKeyUsage=serverAuth,clientAuth",
            signed=True,
        )
        return Identity(self._directory / f"{name}.pem", self._directory / f"{name}.key")

    def client_context(self) -> ssl.SSLContext:
        """Return a context that trusts this authority and shows a certificate of it."""
        context = ssl.create_default_context(cafile=self.certificate)
        context.load_cert_chain(self.client.certificate, self.client.key)
        return context

    def _make(self, name: str, field: str, *extensions: str, signed: bool = False) -> None:
        key, certificate = (self._directory / f"{name}.{suffix}" for suffix in ("key", "pem"))
        command: list[object] = [finding.openssl(), "req", "-x509", "-config", "/dev/null", *_KEY]
        command += [
            "-subj",
            f"/{field}={name}",
            "-days",
            _DAYS,
            "-keyout",
            key,
            "-out",
            certificate,
        ]
        for extension in extensions:
            command += ["-addext", extension]
        if signed:
            command += ["-CA", self.certificate, "-CAkey", self._key]
        run_as_server_user(*command)
