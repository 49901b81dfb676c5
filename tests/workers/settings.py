"""Django's settings in a worker: those of the tests, and what the test that started it says."""

import json
import os

from tests.settings import *  # noqa: F403
from tests.settings import DATABASES

# Celery runs Django's checks when it starts, and those ask this one, which isn't started for it.
DATABASES.pop("mariadb", None)

FENCEDLOCK = json.loads(os.environ["FENCEDLOCK_TEST_LOCKS"])
