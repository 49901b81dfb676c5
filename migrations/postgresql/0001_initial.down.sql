-- Generated from django_fencedlock/migrations/0001_initial.py by: python -m tests.mirror
-- Never edit this file.
BEGIN;
--
-- Create model PendingRun
--
DROP TABLE "django_fencedlock_pendingrun" CASCADE;
--
-- Create model LockEvent
--
DROP TABLE "django_fencedlock_lockevent" CASCADE;
--
-- Create model HeldLock
--
DROP TABLE "django_fencedlock_heldlock" CASCADE;
--
-- Create model MessageRecord
--
DROP TABLE "django_fencedlock_messagerecord" CASCADE;
--
-- Create model ForcedRelease
--
DROP TABLE "django_fencedlock_forcedrelease" CASCADE;
--
-- Create model Fence
--
DROP TABLE "django_fencedlock_fence" CASCADE;
COMMIT;
