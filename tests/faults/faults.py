"""
All faults.
"""

from .celery_faults import CELERY_FAULTS
from .clock_faults import CLOCK_FAULTS
from .nemesis import PROCESS_FAULTS
from .server_faults import SERVER_FAULTS

FAULTS = (*PROCESS_FAULTS, *SERVER_FAULTS, *CLOCK_FAULTS, *CELERY_FAULTS)
BY_NAME = {fault.name: fault for fault in FAULTS}
