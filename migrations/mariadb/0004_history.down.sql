-- Generated from django_fencedlock/migrations/0004_history.py by: python -m tests.mirror
-- Never edit this file.
--
-- Create model LockEvent
--
DROP TABLE `django_fencedlock_lockevent` CASCADE;
