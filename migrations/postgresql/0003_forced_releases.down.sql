-- Generated from django_fencedlock/migrations/0003_forced_releases.py by: python -m tests.mirror
-- Never edit this file.
BEGIN;
--
-- Change Meta options on heldlock
--
-- (no-op)
--
-- Create model ForcedRelease
--
DROP TABLE "django_fencedlock_forcedrelease" CASCADE;
COMMIT;
