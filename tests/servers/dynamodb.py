"""An emulator of Amazon's DynamoDB; no server of Amazon's runs elsewhere."""

import json
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from . import workspace
from .finding import Found
from .process import Process, free_port
from .server import Server


class DynamoDB(Server):
    """
    dynoxide, which checks conditions atomically, as Amazon does.

    It has its data in memory, or, if `durable`, in a file that outlives a kill.
    """

    name = "dynamodb"
    #: Any is accepted.
    region = "us-east-1"
    access_key = secret_key = "test"

    def __init__(self, url: str, process: Process | None = None) -> None:
        parts = urlsplit(url)
        super().__init__(parts.hostname or "127.0.0.1", parts.port or 8000, process)
        self.url = url

    @classmethod
    def launch(cls, found: Found, *arguments: str, durable: bool = False) -> "DynamoDB":
        directory, port = workspace.new_directory("dynamodb"), free_port()
        server = cls(f"http://127.0.0.1:{port}")
        command = [found.path, "serve", "--host", "127.0.0.1", "--port", port, *arguments]
        if durable:
            command += ["--db-path", directory / "tables"]
        server._process = server.as_process(command, directory)
        server.start()
        return server

    def request(self, operation: str, body: Any = None, *, timeout: float = 5) -> Any:
        """Send an operation, such as ``request("GetItem", {...})``; HTTPError if it is refused."""
        # The emulator reads no more of a signature.
        credential = f"{self.access_key}/20250101/{self.region}/dynamodb/aws4_request"
        request = urllib.request.Request(
            self.url,
            data=json.dumps(body or {}).encode(),
            headers={
                "Content-Type": "application/x-amz-json-1.0",
                "X-Amz-Target": f"DynamoDB_20120810.{operation}",
                "X-Amz-Date": "20250101T000000Z",
                "Authorization": f"AWS4-HMAC-SHA256 Credential={credential}, "
                "SignedHeaders=host, Signature=0",
            },
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.load(answer)

    def answers(self) -> bool:
        try:
            return "TableNames" in self.request("ListTables", timeout=2)
        except OSError:
            return False

    def empty(self) -> None:
        """Delete all tables."""
        for name in self.request("ListTables")["TableNames"]:
            self.request("DeleteTable", {"TableName": name})
