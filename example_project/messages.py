"""Celery's messages as files, for a machine that has no broker."""

import os
import time
import uuid
from pathlib import Path
from typing import Any

from kombu.transport import filesystem
from kombu.utils.json import dumps


class Channel(filesystem.Channel):
    def _put(self, queue: str, payload: dict[str, Any], **kwargs: Any) -> None:
        # Whole, or not at all: kombu's own lets a worker find a message that is half written.
        name = f"{time.monotonic_ns() // 1_000_000}_{uuid.uuid4()}.{queue}.msg"
        # A worker takes whatever has the queue's name and ".msg" anywhere in its own.
        draft = Path(self.data_folder_out, f"{uuid.uuid4()}.draft")
        draft.write_text(dumps(payload))
        os.replace(draft, Path(self.data_folder_out, name))


class Transport(filesystem.Transport):
    Channel = Channel
