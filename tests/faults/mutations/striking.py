"""Mutations of how bodies are interrupted, and of what is known of messages that come again."""

from __future__ import annotations

from .mutation import Mutation

_ABORTING = "tests/test_aborting.py"
_DELIVERIES = "tests/test_deliveries.py"
_REDELIVERY = "tests/test_redelivery.py"

MUTATIONS = (
    Mutation(
        "What is thrown into a body is an Exception, which bodies swallow",
        "celery/strikes.py",
        "class Abort(BaseException):",
        "class Abort(Exception):",
        (_ABORTING,),
    ),
    Mutation(
        "A run is struck again, after it was told",
        "celery/strikes.py",
        "        return self.armed and self.is_lost and not self.struck",
        "        return self.armed and self.is_lost",
        (_ABORTING,),
    ),
    Mutation(
        "A run is struck outside of its body",
        "celery/strikes.py",
        "        return self.armed and self.is_lost and not self.struck",
        "        return self.is_lost and not self.struck",
        (_ABORTING,),
    ),
    Mutation(
        "A run is struck whose own lock isn't lost",
        "celery/strikes.py",
        "        return self.armed and self.is_lost and not self.struck",
        "        return self.armed and not self.struck",
        (_ABORTING,),
    ),
    Mutation(
        "A body runs whose lock was lost before it began",
        "celery/strikes.py",
        "        self.armed = True\n        if self.is_lost:\n            raise Abort\n",
        "        self.armed = True\n",
        (_ABORTING,),
    ),
    Mutation(
        "Who notices the loss in the body is struck before others were told",
        "celery/strikes.py",
        "            threads.start(self._strike_soon)\n",
        "            self.strike()\n",
        (_ABORTING,),
    ),
    Mutation(
        "The loss of an outer run's lock doesn't end the body within",
        "celery/strikes.py",
        "            cell = cell._outer\n        return cell",
        "            cell = None\n        return cell",
        (_ABORTING,),
    ),
    Mutation(
        "An abort of two runs ends the inner one alone",
        "celery/strikes.py",
        "            if outer.armed and outer.is_lost:\n",
        "            if outer is None:\n",
        (_ABORTING,),
    ),
    Mutation(
        "After an inner run nobody is in the outer one's place",
        "celery/strikes.py",
        "            _innermost[self._place] = self._outer\n",
        "            _innermost.pop(self._place, None)\n",
        (_ABORTING,),
    ),
    Mutation(
        "The handler of somebody else's signal is replaced",
        "celery/strikes.py",
        "    if found is signal.SIG_DFL:",
        "    if found is not on_signal:",
        (_ABORTING,),
    ),
    Mutation(
        "A strike goes to whoever has the signal by now, and may end the process",
        "celery/strikes.py",
        "        if signal.getsignal(self._number) is on_signal:\n",
        "        if self._number:\n",
        (_ABORTING,),
    ),
    Mutation(
        "The server goes on with the statement of a body that was struck",
        "celery/strikes.py",
        "        cancel_statements()\n",
        "",
        (_ABORTING,),
    ),
    # Not the loop that awaits it: on Python 3.12 the mutex's own calls let it arrive just as well,
    # so nobody could notice.
    Mutation(
        "A strike that has looked at its run hits after it was disarmed",
        "celery/strikes.py",
        "        with self._mutex:\n            self.armed = False\n        if self.struck:",
        "        self.armed = False\n        if self.struck:",
        (f"{_ABORTING}::test_aborts_at_random_moments_hit_their_own_run_alone",),
    ),
    Mutation(
        "A transaction that a body was struck in stays open for the next task",
        "celery/struck.py",
        "            if not _is_quiet(connection):\n                _close(connection)\n",
        "            pass\n",
        (_ABORTING,),
    ),
    Mutation(
        "A message whose delivery died counts as the first",
        "fences/deliveries.py",
        'f"THEN {old}tries ELSE {old}tries + 1 END"',
        'f"THEN {old}tries ELSE {old}tries END"',
        (_DELIVERIES,),
    ),
    Mutation(
        "A request that came twice counts as two deliveries",
        "fences/deliveries.py",
        "f\"CASE WHEN {old}outcome <> '' OR {old}owner = %(owner)s \"",
        "f\"CASE WHEN {old}outcome <> '' \"",
        (_DELIVERIES,),
    ),
    Mutation(
        "A delivery that was taken over ends the message",
        "fences/deliveries.py",
        "\"nonce = %(nonce)s AND owner = %(owner)s AND outcome = ''\"",
        "\"nonce = %(nonce)s AND outcome = ''\"",
        (_DELIVERIES,),
    ),
    Mutation(
        "A message ends twice",
        "fences/deliveries.py",
        "\"nonce = %(nonce)s AND owner = %(owner)s AND outcome = ''\"",
        '"nonce = %(nonce)s AND owner = %(owner)s"',
        (_DELIVERIES,),
    ),
    Mutation(
        "A delivery after the end makes the message its own",
        "fences/deliveries.py",
        "f\"CASE WHEN {old}outcome <> '' THEN {old}owner ELSE %(owner)s END\"",
        '"%(owner)s"',
        (_DELIVERIES,),
    ),
    Mutation(
        "The record of a message that still runs is swept",
        "fences/deliveries.py",
        " WHERE {over} AND {_DEAD.format(now=statements.now)} ",
        " WHERE {over} ",
        (_DELIVERIES,),
    ),
    Mutation(
        "The record of a message is swept that has come again meanwhile",
        "fences/deliveries.py",
        'f"DELETE FROM {DELIVERY} WHERE nonce IN ({inside}) AND {over}"',
        'f"DELETE FROM {DELIVERY} WHERE nonce IN ({inside})"',
        (_DELIVERIES,),
    ),
    Mutation(
        "An end of a moment ago is past",
        "fences/deliveries.py",
        '_KNOWN = "tries, outcome, finished_at <= {settled}"',
        '_KNOWN = "tries, outcome, finished_at > {settled}"',
        (_DELIVERIES,),
    ),
    Mutation(
        "A message that ended just now is told as a skip while its worker is storing the result",
        "celery/redelivery.py",
        '            self._come_later("has just ended")\n',
        "            pass\n",
        (_REDELIVERY,),
    ),
    Mutation(
        "A second delivery waits in line for the first",
        "celery/redelivery.py",
        "        if holder is not None and holder.owner == found[0]:\n"
        '            self._come_later("runs")\n',
        "",
        (_REDELIVERY,),
    ),
    Mutation(
        "A message comes again at once, over and over",
        "celery/redelivery.py",
        "        countdown = random.uniform(SHORTEST, longest)\n",
        "        countdown = 0.0\n",
        (_REDELIVERY,),
    ),
    Mutation(
        "A failure that nobody was told of is final",
        "celery/redelivery.py",
        "        return None if begun.outcome == FAILURE else FINISHED\n",
        "        return FINISHED\n",
        (_REDELIVERY,),
    ),
)
