"""One run: clients at work, one fault, and what the checker says of it."""

import random
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import checker
from .checker import Terms, Violation
from .history import History, entries, read_operations
from .hosts import Crew, Host
from .nemesis import Fault, Lab
from .sites import Site
from .workers import Workers

#: BROKEN is the lab itself.
HELD, VIOLATED, CALM, BROKEN = "held", "VIOLATED", "too calm", "BROKEN"
#: How much has to have happened whatever goes wrong, or a run shows nothing.
NEEDED = {"grants": 10, "writes": 10}
#: What has to have happened besides with other kinds of locks.
NEEDED_OF: Mapping[str, Mapping[str, int]] = {"shared": {"readers": 5}}
#: Injections after which a run that shows nothing isn't given more time.
ENOUGH = 8
#: Violations that fencing is there to prevent.
CORRUPTION = {"I3", "I4", "I5"}


@dataclass(frozen=True)
class Plan:
    """How a run goes. Without `fenced`, clients write past the fence, which has to be found."""

    fault: Fault
    seed: str
    seconds: float
    most: float
    directory: Path
    fenced: bool = True
    ttl: float = 1.0
    clients: int = 5
    rows: int = 2
    #: The kind of locks: one of `kinds.CLIENTS`.
    kind: str = "exclusive"


@dataclass
class Result:
    site: str
    plan: Plan
    verdict: str
    violations: list[Violation] = field(default_factory=list)
    facts: Counter[str] = field(default_factory=Counter)
    #: Clients that didn't end within their time.
    hung: list[str] = field(default_factory=list)
    kept: Path | None = None

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {what}" for what, count in self.facts.items() if count)
        what = f"{self.site} {self.plan.fault.name} {self.plan.kind}"
        text = f"{what} seed {self.plan.seed}: {self.verdict}; {counts}"
        lines = [text, *(f"  {each}" for each in self.violations[:10])]
        if self.hung:
            lines.append(f"  hung: {', '.join(self.hung)}")
        if self.kept:
            lines.append(f"  kept in {self.kept}")
        return "\n".join(lines)


def run(site: Site, plan: Plan) -> Result:
    plan.directory.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=f"{site.name}-{plan.fault.name}-", dir=plan.directory))
    try:
        with _Run(site, plan, directory) as running:
            running.work()
            result = running.finish()
    except Exception:
        result = Result(site.name, plan, BROKEN)
        (directory / "error").write_text(traceback.format_exc())
    if result.verdict == HELD and not result.hung:
        shutil.rmtree(directory)
    else:
        result.kept = directory
        (directory / "verdict").write_text(f"{result}\n")
    return result


class _Run:
    def __init__(self, site: Site, plan: Plan, directory: Path) -> None:
        self.site, self.plan, self.directory = site, plan, directory
        self.terms = Terms(plan.ttl, forgets=plan.fault.forgets)
        self._stack = ExitStack()

    def __enter__(self) -> "_Run":
        with ExitStack() as stack:
            self.site.renew(self.directory)
            stack.callback(self.site.heal)
            self.near = self._host(stack)
            self.near.ask("prepare", self.directory / "prepared")
            self.crew = self._crew(stack)
            chance = random.Random(self.plan.seed)
            self.lab = Lab(self.site, self.crew, self.directory, self.plan.ttl, chance)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def work(self) -> None:
        self.crew.fill()
        begun = time.monotonic()
        while True:
            self.lab.sleep(0.3, 0.8)
            self.plan.fault.inject(self.lab)
            self.crew.fill()
            passed = time.monotonic() - begun
            # On a machine that stands still now and then, little happens in much time.
            patience = 2 if len(self.lab.injections) < ENOUGH else 1
            if passed > patience * self.plan.most:
                return
            if passed > self.plan.seconds and self._has_shown_it():
                return

    def finish(self) -> Result:
        self.site.heal()
        (self.directory / "stop").touch()
        hung = self.crew.wait_for_end(timeout=20 + 10 * self.plan.ttl)
        found, facts = self._judge(self._history())
        verdict = VIOLATED if found else HELD if _suffices(facts, self.plan) else CALM
        return Result(self.site.name, self.plan, verdict, found, facts, hung)

    def _judge(self, history: History) -> tuple[list[Violation], Counter[str]]:
        """Return what is wrong, but for what the fault breaks by its nature; and the counts."""
        found = checker.violations(history, self.terms)
        wrong = [each for each in found if each.promise not in self.plan.fault.tolerates]
        facts = Counter(checker.facts(history))
        facts["tolerated"] = len(found) - len(wrong)
        return wrong, facts

    def _has_shown_it(self) -> bool:
        if self.plan.fenced and not self.plan.fault.tolerates:
            return _suffices(checker.facts(self._history(trail=False)), self.plan)
        found, facts = self._judge(self._history())
        if self.plan.fenced:
            return _suffices(facts, self.plan)
        # A lost update, which is more than a write that came too late.
        return any(each.promise == "I5" for each in found)

    def _history(self, trail: bool = True) -> History:
        history = History(read_operations(self.directory), injections=self.lab.injections)
        if trail:
            path = self.directory / "trail.json"
            found = self.near.ask("collect", path)
            history.trail = entries(found["trail"])
            history.counts = {(table, name): count for table, name, count in found["counts"]}
            history.operations = read_operations(self.directory)
        return history

    def _crew(self, stack: ExitStack) -> Crew | Workers:
        plan = self.plan
        if plan.fault.celery is None:
            return Crew(list(self._hosts(stack)), plan.clients)
        lab = {**self._lab(far=False), **plan.fault.celery}
        return stack.enter_context(closing(Workers(lab, self.directory, plan.clients, plan.rows)))

    def _hosts(self, stack: ExitStack) -> Iterator[Host]:
        fault = self.plan.fault
        environments = fault.environments(self.directory)
        if fault.far == "none" and environments == [{}]:
            yield self.near
            return
        for environment in environments:
            ways = {"none": (False,), "some": (False, True), "all": (True,)}
            for far in ways[fault.far]:
                yield self._host(stack, far, environment)

    def _host(
        self, stack: ExitStack, far: bool = False, environment: Mapping[str, str] | None = None
    ) -> Host:
        log = self.directory / "clients.log"
        return stack.enter_context(closing(Host(self._lab(far), log, **(environment or {}))))

    def _lab(self, far: bool) -> dict[str, Any]:
        return self.site.lab(far) | {
            "seed": self.plan.seed,
            "ttl": self.plan.ttl,
            "rows": self.plan.rows,
            "fenced": self.plan.fenced,
            "kind": self.plan.kind,
            "directory": str(self.directory),
            "habits": dict(self.plan.fault.habits),
            "ways": self.plan.fault.ways,
        }


def _suffices(facts: Mapping[str, int], plan: Plan) -> bool:
    needed = {**NEEDED, **plan.fault.needs, **NEEDED_OF.get(plan.kind, {})}
    return all(facts[what] >= least for what, least in needed.items())
