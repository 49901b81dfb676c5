-- Generated from django_fencedlock/migrations/0001_initial.py by: python -m tests.mirror
-- Never edit this file.
BEGIN;
--
-- Create model Fence
--
CREATE TABLE "django_fencedlock_fence" ("name" character varying(200) NOT NULL PRIMARY KEY, "token" bigint NOT NULL, "owner" varchar(32) NOT NULL);
--
-- Create model HeldLock
--
CREATE TABLE "django_fencedlock_heldlock" ("name" character varying(200) NOT NULL PRIMARY KEY, "alias" varchar(100) NOT NULL, "backend" varchar(30) NOT NULL, "owner" varchar(32) NOT NULL, "fenced" boolean NOT NULL, "host" varchar(100) NOT NULL, "boot_id" varchar(40) NOT NULL, "pid_namespace" varchar(40) NOT NULL, "pid" bigint NOT NULL, "pid_started" bigint NOT NULL, "thread" varchar(100) NOT NULL, "task_name" varchar(200) NOT NULL, "task_id" varchar(100) NOT NULL, "acquired_at" timestamp with time zone NOT NULL, "renewed_at" timestamp with time zone NOT NULL, "expires_at" timestamp with time zone NOT NULL, "session_pid" bigint NULL, "session_started" timestamp with time zone NULL, "session_key" bigint NULL);
COMMIT;
