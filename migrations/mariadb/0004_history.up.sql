-- Generated from django_fencedlock/migrations/0004_history.py by: python -m tests.mirror
-- Never edit this file.
--
-- Create model LockEvent
--
CREATE TABLE `django_fencedlock_lockevent` (`id` bigint AUTO_INCREMENT NOT NULL PRIMARY KEY, `happened_at` datetime(6) NOT NULL, `name` varchar(200) COLLATE `utf8mb4_nopad_bin` NOT NULL, `kind` varchar(10) NOT NULL, `alias` varchar(100) NOT NULL, `token` bigint NULL, `holder` varchar(400) NOT NULL, `note` varchar(400) NOT NULL, `times` bigint NOT NULL);
CREATE INDEX `fencedlock_event_of_name` ON `django_fencedlock_lockevent` (`name`, `kind`, `id`);
CREATE INDEX `fencedlock_event_of_kind` ON `django_fencedlock_lockevent` (`kind`, `id`);
