"""
All faults.
"""

from .nemesis import PROCESS_FAULTS

FAULTS = (*PROCESS_FAULTS,)
BY_NAME = {fault.name: fault for fault in FAULTS}
