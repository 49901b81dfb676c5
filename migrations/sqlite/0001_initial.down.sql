-- Generated from django_fencedlock/migrations/0001_initial.py by: python -m tests.mirror
-- Never edit this file.
BEGIN;
--
-- Create model PendingRun
--
DROP TABLE "django_fencedlock_pendingrun";
--
-- Create model LockEvent
--
DROP TABLE "django_fencedlock_lockevent";
--
-- Create model HeldLock
--
DROP TABLE "django_fencedlock_heldlock";
--
-- Create model MessageRecord
--
DROP TABLE "django_fencedlock_messagerecord";
--
-- Create model ForcedRelease
--
DROP TABLE "django_fencedlock_forcedrelease";
--
-- Create model Fence
--
DROP TABLE "django_fencedlock_fence";
COMMIT;
