-- Generated from django_fencedlock/migrations/0003_forced_releases.py by: python -m tests.mirror
-- Never edit this file.
BEGIN;
--
-- Create model ForcedRelease
--
CREATE TABLE "django_fencedlock_forcedrelease" ("owner" varchar(32) NOT NULL PRIMARY KEY, "name" character varying(200) NOT NULL, "released_by" varchar(200) NOT NULL, "released_at" timestamp with time zone NOT NULL);
--
-- Change Meta options on heldlock
--
-- (no-op)
CREATE INDEX "django_fencedlock_forcedrelease_owner_e83165b6_like" ON "django_fencedlock_forcedrelease" ("owner" varchar_pattern_ops);
CREATE INDEX "django_fencedlock_forcedrelease_released_at_12ced739" ON "django_fencedlock_forcedrelease" ("released_at");
COMMIT;
