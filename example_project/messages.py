"""A Celery transport that stores messages as files, for machines without a broker."""

import os
import time
import uuid
from pathlib import Path
from typing import Any

from kombu.transport import filesystem
from kombu.utils.json import dumps


class Channel(filesystem.Channel):
    def _put(self, queue: str, payload: dict[str, Any], **kwargs: Any) -> None:
        # Written atomically. With kombu's own method, a worker can read an incomplete message.
        name = f"{time.monotonic_ns() // 1_000_000}_{uuid.uuid4()}.{queue}.msg"
        # A worker reads every file with the queue's name and ".msg" in its name.
        draft = Path(self.data_folder_out, f"{uuid.uuid4()}.draft")
        draft.write_text(dumps(payload))
        os.replace(draft, Path(self.data_folder_out, name))


class Transport(filesystem.Transport):
    Channel = Channel
