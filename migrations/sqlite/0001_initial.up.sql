-- Generated from django_fencedlock/migrations/0001_initial.py by: python -m tests.mirror
-- Never edit this file.
BEGIN;
--
-- Create model Fence
--
CREATE TABLE "django_fencedlock_fence" ("name" varchar(200) NOT NULL PRIMARY KEY, "token" bigint NOT NULL, "owner" varchar(32) NOT NULL);
--
-- Create model ForcedRelease
--
CREATE TABLE "django_fencedlock_forcedrelease" ("owner" varchar(32) NOT NULL PRIMARY KEY, "name" varchar(200) NOT NULL, "released_by" varchar(200) NOT NULL, "released_at" datetime NOT NULL);
--
-- Create model MessageRecord
--
CREATE TABLE "django_fencedlock_messagerecord" ("nonce" varchar(36) NOT NULL PRIMARY KEY, "name" varchar(200) NOT NULL, "owner" varchar(32) NOT NULL, "task_id" varchar(100) NOT NULL, "tries" integer NOT NULL, "began_at" datetime NOT NULL, "finished_at" datetime NULL, "outcome" varchar(10) NOT NULL, "kept_until" datetime NOT NULL);
--
-- Create model HeldLock
--
CREATE TABLE "django_fencedlock_heldlock" ("id" bigint NOT NULL PRIMARY KEY, "name" varchar(200) NOT NULL, "slot" varchar(32) NOT NULL, "alias" varchar(100) NOT NULL, "backend" varchar(30) NOT NULL, "owner" varchar(32) NOT NULL, "fenced" bool NOT NULL, "host" varchar(100) NOT NULL, "boot_id" varchar(40) NOT NULL, "pid_namespace" varchar(40) NOT NULL, "pid" bigint NOT NULL, "pid_started" bigint NOT NULL, "thread" varchar(100) NOT NULL, "task_name" varchar(200) NOT NULL, "task_id" varchar(100) NOT NULL, "acquired_at" datetime NOT NULL, "renewed_at" datetime NOT NULL, "expires_at" datetime NOT NULL, "session_pid" bigint NULL, "session_started" datetime NULL, "session_key" bigint NULL, "permits" integer NULL, "no_readers_until" datetime NULL, CONSTRAINT "fencedlock_heldlock_unique" UNIQUE ("name", "slot"));
--
-- Create model LockEvent
--
CREATE TABLE "django_fencedlock_lockevent" ("id" integer NOT NULL PRIMARY KEY AUTOINCREMENT, "happened_at" datetime NOT NULL, "name" varchar(200) NOT NULL, "kind" varchar(10) NOT NULL, "alias" varchar(100) NOT NULL, "token" bigint NULL, "holder" varchar(400) NOT NULL, "note" varchar(400) NOT NULL, "times" bigint NOT NULL);
--
-- Create model PendingRun
--
CREATE TABLE "django_fencedlock_pendingrun" ("id" integer NOT NULL PRIMARY KEY AUTOINCREMENT, "name" varchar(200) NOT NULL, "task_name" varchar(200) NOT NULL, "alias" varchar(100) NOT NULL, "owner" varchar(32) NOT NULL, "wanted" bigint NOT NULL, "started" bigint NOT NULL, "done" bigint NOT NULL, "body" text NOT NULL, "options" text NOT NULL, "queue" varchar(200) NOT NULL, "tries" integer NOT NULL, "rescues" integer NOT NULL, "due_at" datetime NULL, "updated_at" datetime NOT NULL, CONSTRAINT "fencedlock_pendingrun_unique" UNIQUE ("name", "task_name"));
CREATE INDEX "django_fencedlock_forcedrelease_released_at_12ced739" ON "django_fencedlock_forcedrelease" ("released_at");
CREATE INDEX "django_fencedlock_messagerecord_kept_until_8c81436c" ON "django_fencedlock_messagerecord" ("kept_until");
CREATE INDEX "fencedlock_event_of_name" ON "django_fencedlock_lockevent" ("name", "kind", "id");
CREATE INDEX "fencedlock_event_of_kind" ON "django_fencedlock_lockevent" ("kind", "id");
CREATE INDEX "django_fencedlock_pendingrun_due_at_fd398316" ON "django_fencedlock_pendingrun" ("due_at");
COMMIT;
