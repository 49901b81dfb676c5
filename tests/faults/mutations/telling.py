"""Mutations of what is written behind everybody's back: history, unfenced locks."""

# ruff: noqa: E501 - quoted code is as long as it is
from __future__ import annotations

from .mutation import Mutation

_HISTORY = "tests/test_history.py"
_SCRIBE = "tests/test_scribe.py"
_UNFENCED = "tests/test_unfenced.py"

MUTATIONS = (
    Mutation(
        "Every grant gets a row, however short",
        "history.py",
        "WORTH = 1.0",
        "WORTH = 0.0",
        (_HISTORY,),
    ),
    Mutation(
        "Grants that were given back fill the memory",
        "history.py",
        '        """Note that a lease was given back: its grant is worth no row if it has none yet."""\n'
        "        self._granted.pop(lease.owner, None)\n",
        '        """Note nothing."""\n',
        (_HISTORY,),
    ),
    Mutation(
        "There is no bound for grants that aren't written yet",
        "history.py",
        "        if len(self._granted) < MOST:",
        "        if self._granted is not None:",
        (_HISTORY,),
    ),
    Mutation(
        "There is no bound for events that aren't written yet",
        "history.py",
        "        if len(self._happened) < MOST:",
        "        if self._happened is not None:",
        (_HISTORY,),
    ),
    Mutation(
        "A loss is told of without the grant",
        "history.py",
        "        if self._is_untold(lease):\n            # However",
        "        if not lease:\n            # However",
        (_HISTORY,),
    ),
    Mutation(
        "A writer that doesn't give up is counted once",
        "history.py",
        "            row.age, row.times = now - at, row.times + 1\n",
        "            row.age, row.times = now - at, 1\n",
        (_HISTORY,),
    ),
    Mutation(
        "A history that was turned off is written",
        "history.py",
        "        if not conf.history() or self._scribe.is_quiet():\n            return\n        try:",
        "        if self._scribe.is_quiet():\n            return\n        try:",
        (_HISTORY,),
    ),
    Mutation(
        "Many grants drive the refused writes of their name out of the history",
        "fences/events.py",
        "PARTITION BY name, kind ORDER",
        "PARTITION BY name ORDER",
        (_HISTORY,),
    ),
    Mutation(
        "The history of names that nobody uses any more is kept for ever",
        "fences/events.py",
        "        if random.random() < len(rows) / SLACK:",
        "        if random.random() < 0:",
        (_HISTORY,),
    ),
    Mutation(
        "The scribe waits for SQLite's file as long as a lock does",
        "scribe.py",
        "    ledger_for(private).patience(private, BRIEFLY)\n",
        "",
        (_SCRIBE, _HISTORY),
    ),
    Mutation(
        "What somebody's lock was in the way of is left out at once",
        "scribe.py",
        "            if ledger_for(connections[database]).is_row_locked(exc) and len(self._again) < AGAIN:",
        "            if len(self._again) < 0:",
        (_SCRIBE, _HISTORY),
    ),
    Mutation(
        "There is no bound for what is kept for another try",
        "scribe.py",
        ".is_row_locked(exc) and len(self._again) < AGAIN:",
        ".is_row_locked(exc):",
        (_SCRIBE, _HISTORY),
    ),
    Mutation(
        "A database that is away is tried again each second",
        "scribe.py",
        "        if self._rests_until.get(database, 0.0) > clock():",
        "        if self._rests_until.get(database, 0.0) < 0:",
        (_SCRIBE, _HISTORY),
    ),
    Mutation(
        "Nobody is told how much was left out",
        "scribe.py",
        "        self._tell_left_out()\n",
        "",
        (_SCRIBE, _HISTORY),
    ),
    Mutation(
        "A lock fails where no thread can be started to write of it",
        "scribe.py",
        "                except RuntimeError:",
        "                except ZeroDivisionError:",
        (_SCRIBE, _HISTORY),
    ),
    Mutation(
        "The scribe's thread ends though something was noted meanwhile",
        "scribe.py",
        "            if self._noted:\n                self._runs = True\n                return False\n",
        "",
        (_SCRIBE, _HISTORY),
    ),
    Mutation(
        "The scribe's thread ends at an error",
        "scribe.py",
        '                logger.exception("What the scribe has to write isn\'t written")\n',
        "                raise\n",
        (_SCRIBE, _HISTORY),
    ),
    Mutation(
        "A main process writes what its children do",
        "scribe.py",
        "        return self._hushed or self.is_testing()",
        "        return self.is_testing()",
        (_SCRIBE, _HISTORY),
    ),
    Mutation(
        "A child inherits a connection that is open",
        "scribe.py",
        "            self._forks = threading.get_ident()\n            self.close()\n",
        "            self._forks = threading.get_ident()\n",
        (_HISTORY,),
    ),
    Mutation(
        "A child writes its parent's events a second time",
        "scribe.py",
        "        self._reset()\n        for book in self.books:\n            book.forget()\n",
        "        self._reset()\n",
        (_HISTORY,),
    ),
    Mutation(
        "What happened last is lost at the interpreter's exit",
        "scribe.py",
        "                self.flush(AT_EXIT)\n",
        "                pass\n",
        (_HISTORY,),
    ),
    Mutation(
        "The row of an unfenced lock stays after its release",
        "unfenced.py",
        "            self._over.append(lease)\n",
        "            pass\n",
        (_UNFENCED,),
    ),
    Mutation(
        "The row of an unfenced lock stays that was given back while it was written",
        "unfenced.py",
        "                # It ended meanwhile.\n                self.ended(lease)\n",
        "                pass\n",
        (_UNFENCED,),
    ),
)
