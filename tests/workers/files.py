"""
Kombu's filesystem transport, but for one thing: a message appears as a whole.

Kombu's own lets a worker that looks often find one that is half written, and lose it.
"""

import os
import time
import uuid
from pathlib import Path
from typing import Any

from kombu.transport import filesystem
from kombu.utils.json import dumps


class Channel(filesystem.Channel):  # type: ignore[misc]
    def _put(self, queue: str, payload: dict[str, Any], **kwargs: Any) -> None:
        name = f"{time.monotonic_ns() // 1_000_000}_{uuid.uuid4()}.{queue}.msg"
        draft = Path(self.data_folder_out, f"{name}.draft")
        draft.write_text(dumps(payload))
        os.replace(draft, Path(self.data_folder_out, name))


class Transport(filesystem.Transport):  # type: ignore[misc]
    Channel = Channel
