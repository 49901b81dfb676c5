"""
What `import django_fencedlock` and the start of an app take, and which modules come along.

Run from the top of the checkout: ``python -m benchmarks.imports``. Each time in a process of its
own, with bytecode that is compiled already. The CPU time is told; that of Django is not in it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

from benchmarks.report import COUNTED, Report, options

WORK = "import"
#: What nothing may import before it is used.
HEAVY = (
    "celery",
    "kombu",
    "redis",
    "psycopg",
    "MySQLdb",
    "pymysql",
    "prometheus_client",
    "django_redis",
)

_DJANGO = """
import django
from django.conf import settings
settings.configure(INSTALLED_APPS={apps}, USE_TZ=True, FENCEDLOCK={locks}, DATABASES={{
    "default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}}})
import django.db.models, django.core.checks
"""
_MEASURED = """
import json, sys, time
before, began = set(sys.modules), time.process_time()
{code}
spent = time.process_time() - began
new = set(sys.modules) - before
print(json.dumps([spent, len(new), sorted({{name.partition(".")[0] for name in new}})]))
"""
#: Any app with a model has Django import its database backend.
_OTHERS = ["django.contrib.contenttypes", "django.contrib.auth"]
_APPS = [*_OTHERS, "django_fencedlock"]
_REDIS = {
    "default": {
        "BACKEND": "django_fencedlock.backends.redis.RedisBackend",
        "LOCATION": "redis://127.0.0.1/0",
    }
}
#: By what is done: the apps, the setting, the code. Redis is named, but no lock is taken.
WAYS = {
    "django.setup() without the app": (_OTHERS, {}, "django.setup()"),
    "import django_fencedlock": ([], {}, "import django_fencedlock"),
    "django.setup() with the app": (_APPS, {}, "django.setup()"),
    "django.setup() with the app, redis configured": (_APPS, _REDIS, "django.setup()"),
}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    report = Report(given)
    print(
        f"load {os.getloadavg()[0]:.1f}, {given.rounds} rounds\nCPU ms  modules  what comes along"
    )
    rounds = [
        {way: _try(*how) for way, how in WAYS.items()}
        # Compiled in the first round.
        for _ in range(1 + (1 if given.short else given.rounds))
    ][1:]
    for way in WAYS:
        spent = statistics.median(each[way][0] for each in rounds) * 1000
        _, modules, roots = rounds[0][way]
        heavy = [name for name in roots if name in HEAVY]
        known = [name for name in roots if name not in (*sys.stdlib_module_names, "__mp_main__")]
        print(f"{spent:6.1f} {modules:8}  {way}: {', '.join(known) or 'nothing'}", flush=True)
        report.add(WORK, way, "CPU time", spent, "ms")
        report.add(WORK, way, "modules", modules, COUNTED)
        report.add(WORK, way, "drivers and Celery", len(heavy), COUNTED, aim=0)


def _try(apps: list[str], locks: dict[str, object], code: str) -> tuple[float, int, list[str]]:
    environment = {key: value for key, value in os.environ.items() if key[:6] != "DJANGO"}
    script = _DJANGO.format(apps=apps, locks=locks) + _MEASURED.format(code=code)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        stdout=subprocess.PIPE,
        timeout=60,
        check=True,
    )
    spent, modules, roots = json.loads(done.stdout)
    return spent, modules, roots


if __name__ == "__main__":
    main()
