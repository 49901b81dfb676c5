-- Generated from django_fencedlock/migrations/0002_pending_runs_and_message_records.py by: python -m tests.mirror
-- Never edit this file.
--
-- Create model MessageRecord
--
CREATE TABLE `django_fencedlock_messagerecord` (`nonce` varchar(36) COLLATE `utf8mb4_nopad_bin` NOT NULL PRIMARY KEY, `name` varchar(200) COLLATE `utf8mb4_nopad_bin` NOT NULL, `owner` varchar(32) NOT NULL, `task_id` varchar(100) NOT NULL, `tries` integer NOT NULL, `began_at` datetime(6) NOT NULL, `finished_at` datetime(6) NULL, `outcome` varchar(10) NOT NULL, `kept_until` datetime(6) NOT NULL);
--
-- Create model PendingRun
--
CREATE TABLE `django_fencedlock_pendingrun` (`id` bigint AUTO_INCREMENT NOT NULL PRIMARY KEY, `name` varchar(200) COLLATE `utf8mb4_nopad_bin` NOT NULL, `task_name` varchar(200) COLLATE `utf8mb4_nopad_bin` NOT NULL, `alias` varchar(100) NOT NULL, `owner` varchar(32) NOT NULL, `wanted` bigint NOT NULL, `started` bigint NOT NULL, `done` bigint NOT NULL, `content_type` varchar(100) NOT NULL, `content_encoding` varchar(30) NOT NULL, `body` longtext NOT NULL, `options` longtext NOT NULL, `queue` varchar(200) COLLATE `utf8mb4_nopad_bin` NOT NULL, `tries` integer NOT NULL, `rescues` integer NOT NULL, `due_at` datetime(6) NULL, `updated_at` datetime(6) NOT NULL, CONSTRAINT `fencedlock_pendingrun_unique` UNIQUE (`name`, `task_name`));
CREATE INDEX `django_fencedlock_messagerecord_kept_until_8c81436c` ON `django_fencedlock_messagerecord` (`kept_until`);
CREATE INDEX `django_fencedlock_pendingrun_due_at_fd398316` ON `django_fencedlock_pendingrun` (`due_at`);
