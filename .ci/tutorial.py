"""
Follow docs/tutorial.md to the letter, in an empty directory, with the package that was built.

Blocks of Python are the files that they name. Blocks of the shell are run one after the other. A
block of text is what the one before it prints. Comments above the blocks say the rest.
"""

import contextlib
import http.cookiejar
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).resolve().parent.parent / "docs/tutorial.md"
BLOCK = re.compile(r"(?:<!-- (?P<note>[^\n]+?) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)```", re.S)
#: What differs from one run to the next: ids, numbers, the host, and spaces that align a table.
VARIES = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}|\d+|(?<= on )[\w.-]+(?=, pid)|\s+")
#: How long to wait for a command, or for a line of a log.
PATIENCE = 60


class Block(NamedTuple):
    note: str
    language: str
    text: str


class Reader:
    """A reader with a few terminals, who does what the page says."""

    def __init__(self, home: Path, wheel: Path, terminals: contextlib.ExitStack) -> None:
        self.home = home
        self.wheel = wheel
        self.terminals = terminals
        self.port = free_port()
        self.printed = ""

    def follow(self, block: Block) -> None:
        print(f"--- {block.note or block.language}\n{block.text.rstrip()}", flush=True)
        if block.language == "python":
            self.write(block.text)
        elif block.note.endswith("terminal shows"):
            self.await_line(block.note.partition(" ")[0], block.text)
        elif block.language == "text":
            assert masked(block.text) in masked(self.printed), "The page shows another output."
        elif block.note.endswith("terminal"):
            self.start(self.as_here(block.text), block.note.partition(" ")[0])
        else:
            self.run(block)

    def as_here(self, text: str) -> str:
        # The built package instead of a checkout; and another server may have the port.
        text = text.replace("../django-fencedlock", str(self.wheel))
        return text.replace("runserver", f"runserver --noreload {self.port}")

    def write(self, text: str) -> None:
        title, _, code = text.partition("\n")
        path = self.home / title.removeprefix("# ").removeprefix("At the end of ")
        if title.startswith("# At the end of "):
            code = path.read_text() + "\n" + code
        path.write_text(code)

    def run(self, block: Block) -> None:
        done = subprocess.run(
            ["bash", "-euc", self.as_here(block.text)],
            cwd=self.home,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=3 * PATIENCE,
        )
        print(done.stdout, flush=True)
        self.printed = done.stdout
        kind, _, wanted = block.note.partition(": ")
        assert (done.returncode != 0) == (kind == "fails"), f"It ended with {done.returncode}."
        assert "identified some issues" not in done.stdout, "The checks found something."
        assert wanted in done.stdout, f"It should have said {wanted!r}."

    def start(self, command: str, name: str) -> None:
        log = self.log(name).open("w")
        process = subprocess.Popen(
            ["bash", "-euc", f"exec {command}"],
            cwd=self.home,
            # A file gets lines in blocks otherwise, which a terminal doesn't.
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.terminals.callback(end, process)
        self.await_line(name, "ready." if name == "second" else "Quit the server")

    def log(self, name: str) -> Path:
        return self.home / f"{name}.log"

    def await_line(self, name: str, wanted: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while masked(wanted) not in masked(shown := self.log(name).read_text()):
            assert time.monotonic() < deadline, f"{wanted!r} isn't in:\n{shown}"
            time.sleep(0.1)

    def look_at_the_admin(self) -> None:
        site = f"http://127.0.0.1:{self.port}/admin/"
        jar = http.cookiejar.CookieJar()
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))
        browser.open(f"{site}login/").read()
        token = next(cookie.value for cookie in jar if cookie.name == "csrftoken")
        form = {"username": "ada", "password": "choose-one", "csrfmiddlewaretoken": token}
        data = urllib.parse.urlencode({**form, "next": "/admin/"}).encode()
        home = browser.open(f"{site}login/", data).read().decode()
        assert "Held locks" in home
        page = browser.open(f"{site}django_fencedlock/heldlock/").read().decode()
        for wanted in ("billing.account:1", "billing.tasks.deposit", "fencedlock-held"):
            assert wanted in page, f"{wanted!r} isn't on the page of held locks."


def masked(output: str) -> str:
    """Return an output without what varies. A "..." on the page isn't supported."""
    return VARIES.sub("#", output.strip())


def end(process: subprocess.Popen[bytes]) -> None:
    """End what a terminal runs, and all that it started, also if that is paused."""
    for number in (signal.SIGCONT, signal.SIGTERM):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main(wheel: Path) -> None:
    blocks = [
        Block(found["note"] or "", found["language"], found["text"])
        for found in BLOCK.finditer(PAGE.read_text())
    ]
    with tempfile.TemporaryDirectory() as home, contextlib.ExitStack() as terminals:
        reader = Reader(Path(home), wheel.resolve(), terminals)
        for block in blocks:
            if "fencedlock list" in block.text:
                reader.look_at_the_admin()
            try:
                reader.follow(block)
            except Exception:
                for log in Path(home).glob("*.log"):
                    print(f"--- {log.name}\n{log.read_text()}", flush=True)
                raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
