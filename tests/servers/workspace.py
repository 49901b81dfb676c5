"""Where servers live: one temp directory per test process, and the user they run as."""

import fcntl
import functools
import itertools
import os
import pwd
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

_PREFIX = "fencedlock-run-"
_numbers = itertools.count(1)


@functools.cache
def server_user() -> pwd.struct_passwd:
    """Return the user for the servers, which refuse to run as root."""
    if os.getuid() != 0:
        return pwd.getpwuid(os.getuid())
    names = {entry.pw_name for entry in pwd.getpwall()}
    return pwd.getpwnam("postgres" if "postgres" in names else "nobody")


def reachable(path: Path) -> bool:
    if server_user().pw_uid == os.getuid():
        return True
    return all(parent.stat().st_mode & 0o001 for parent in path.resolve().parents)


@functools.cache
def root() -> Path:
    _sweep()
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
    directory.chmod(0o711)
    _lock(directory)
    return directory


def new_directory(name: str) -> Path:
    directory = root() / f"{name}-{next(_numbers)}"
    directory.mkdir(mode=0o700)
    os.chown(directory, server_user().pw_uid, server_user().pw_gid)
    return directory


def remove() -> None:
    if root.cache_info().currsize:
        shutil.rmtree(root(), ignore_errors=True)
        root.cache_clear()


def cache_directory() -> Path:
    """Return the directory where copies of servers stay from one run to the next."""
    directory = Path(tempfile.gettempdir()) / f"fencedlock-servers-{os.getuid()}"
    directory.mkdir(mode=0o755, exist_ok=True)
    if directory.stat().st_uid != os.getuid() or directory.is_symlink():
        # Every user can create names in /tmp, and this directory has programs that get executed.
        raise PermissionError(f"{directory} belongs to another user. Remove it, or set TMPDIR.")
    directory.chmod(0o755)
    return directory


def cached(key: str, fill: Callable[[Path], None]) -> Path:
    """Return a directory of the cache; if there is none, fill one."""
    target = cache_directory() / key
    if not target.exists():
        # Filled under another name: other processes see all of it or nothing.
        filling = target.with_name(f"{key}.{os.getpid()}")
        filling.mkdir(mode=0o755)
        try:
            fill(filling)
            filling.chmod(0o755)
            filling.rename(target)
        except OSError:
            # Another process was faster.
            if not target.exists():
                raise
        finally:
            shutil.rmtree(filling, ignore_errors=True)
    return target


def _lock(directory: Path) -> None:
    # The lock is taken before the file gets its final name: _sweep() never sees it free.
    # The descriptor stays open for the life of the process; that is what holds the lock.
    descriptor = os.open(directory / "lock.new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    (directory / "lock.new").rename(directory / "lock")


def _sweep() -> None:
    # A killed pytest stops its servers, but leaves their files.
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/lock"):
        if _abandoned(lock):
            shutil.rmtree(lock.parent, ignore_errors=True)


def _abandoned(lock: Path) -> bool:
    try:
        with lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
