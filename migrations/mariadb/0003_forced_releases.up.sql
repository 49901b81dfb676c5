-- Generated from django_fencedlock/migrations/0003_forced_releases.py by: python -m tests.mirror
-- Never edit this file.
--
-- Create model ForcedRelease
--
CREATE TABLE `django_fencedlock_forcedrelease` (`owner` varchar(32) NOT NULL PRIMARY KEY, `name` varchar(200) COLLATE `utf8mb4_nopad_bin` NOT NULL, `released_by` varchar(200) NOT NULL, `released_at` datetime(6) NOT NULL);
--
-- Change Meta options on heldlock
--
-- (no-op)
CREATE INDEX `django_fencedlock_forcedrelease_released_at_12ced739` ON `django_fencedlock_forcedrelease` (`released_at`);
