-- Generated from django_fencedlock/migrations/0002_duties_and_deliveries.py by: python -m tests.mirror
-- Never edit this file.
--
-- Create model Delivery
--
CREATE TABLE `django_fencedlock_delivery` (`nonce` varchar(36) COLLATE `utf8mb4_nopad_bin` NOT NULL PRIMARY KEY, `name` varchar(200) COLLATE `utf8mb4_nopad_bin` NOT NULL, `owner` varchar(32) NOT NULL, `task_id` varchar(100) NOT NULL, `tries` integer NOT NULL, `began_at` datetime(6) NOT NULL, `finished_at` datetime(6) NULL, `outcome` varchar(10) NOT NULL, `kept_until` datetime(6) NOT NULL);
--
-- Create model Duty
--
CREATE TABLE `django_fencedlock_duty` (`id` bigint AUTO_INCREMENT NOT NULL PRIMARY KEY, `name` varchar(200) COLLATE `utf8mb4_nopad_bin` NOT NULL, `task_name` varchar(200) COLLATE `utf8mb4_nopad_bin` NOT NULL, `alias` varchar(100) NOT NULL, `owner` varchar(32) NOT NULL, `wanted` bigint NOT NULL, `started` bigint NOT NULL, `done` bigint NOT NULL, `content_type` varchar(100) NOT NULL, `content_encoding` varchar(30) NOT NULL, `body` longtext NOT NULL, `options` longtext NOT NULL, `queue` varchar(200) COLLATE `utf8mb4_nopad_bin` NOT NULL, `tries` integer NOT NULL, `rescues` integer NOT NULL, `due_at` datetime(6) NULL, `updated_at` datetime(6) NOT NULL, CONSTRAINT `fencedlock_duty_unique` UNIQUE (`name`, `task_name`));
CREATE INDEX `django_fencedlock_delivery_kept_until_357aa259` ON `django_fencedlock_delivery` (`kept_until`);
CREATE INDEX `django_fencedlock_duty_due_at_2d9fa153` ON `django_fencedlock_duty` (`due_at`);
