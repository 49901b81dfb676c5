"""``python -m tests.faults``: the whole matrix of faults and backends."""

import sys

from .command import main

sys.exit(main())
