"""
The fault lab: tries to get a stale write through, and would notice.

Clients, in processes of their own, take locks and write under them, while a nemesis pauses, kills
and cuts off whatever it can. Every client writes a history; the database itself writes a trail of
what was committed. The checker compares both with what is promised. See docs/dev/fault_lab.md.
"""
