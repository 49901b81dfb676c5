"""All faults."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from .celery_faults import CELERY_FAULTS
from .clock_faults import CLOCK_FAULTS
from .nemesis import PROCESS_FAULTS, Fault, Lab
from .server_faults import PROXIED, SERVER_FAULTS

#: What may go wrong at the same time: one of a group, and one of another.
GROUPS = (
    ("pause", "pause-many", "kill"),
    (
        "empty",
        "full-memory",
        "full-file",
        "restart-redis",
        "restart-database",
        "end-sessions",
        "full-disk",
        "kill-leader",
        "lose-quorum",
        "empty-node",
    ),
    ("lose-replies", "hold-back", "slow", "cut"),
)


def mix(lab: Lab) -> None:
    able = [found for group in GROUPS if (found := _able(lab, group))]
    chosen = [lab.random.choice(group) for group in lab.random.sample(able, 2)]
    with ThreadPoolExecutor(len(chosen)) as pool:
        for inject in [pool.submit(fault.inject, lab) for fault in chosen]:
            inject.result()


def _able(lab: Lab, group: Sequence[str]) -> list[Fault]:
    return [
        fault
        for fault in map(BY_NAME.__getitem__, group)
        if lab.site.name in fault.sites and not fault.missing()
    ]


MIX = Fault("mix", mix, PROXIED, {"injections": 4, "takeovers": 1}, forgets=True, far="some")
FAULTS = (*PROCESS_FAULTS, *SERVER_FAULTS, MIX, *CLOCK_FAULTS, *CELERY_FAULTS)
BY_NAME = {fault.name: fault for fault in FAULTS}
