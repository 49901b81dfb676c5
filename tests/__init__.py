import os
import sys
from pathlib import Path

# Containers often forbid to write bytecode. Each process of the tests would then compile Django and
# Celery again, which takes several seconds, and the tests start hundreds of processes.
if sys.dont_write_bytecode:
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(Path(__file__).parents[1] / ".pytest_cache" / "bytecode")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
