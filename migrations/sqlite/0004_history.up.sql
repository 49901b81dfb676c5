-- Generated from django_fencedlock/migrations/0004_history.py by: python -m tests.mirror
-- Never edit this file.
BEGIN;
--
-- Create model Contender
--
CREATE TABLE "django_fencedlock_contender" ("owner" varchar(32) NOT NULL PRIMARY KEY, "name" varchar(200) NOT NULL, "alias" varchar(100) NOT NULL, "words" varchar(400) NOT NULL, "since" datetime NOT NULL, "seen_at" datetime NOT NULL);
--
-- Create model LockEvent
--
CREATE TABLE "django_fencedlock_lockevent" ("id" integer NOT NULL PRIMARY KEY AUTOINCREMENT, "happened_at" datetime NOT NULL, "name" varchar(200) NOT NULL, "kind" varchar(10) NOT NULL, "alias" varchar(100) NOT NULL, "token" bigint NULL, "holder" varchar(400) NOT NULL, "note" varchar(400) NOT NULL, "times" bigint NOT NULL);
CREATE INDEX "django_fencedlock_contender_name_66848d45" ON "django_fencedlock_contender" ("name");
CREATE INDEX "fencedlock_event_of_name" ON "django_fencedlock_lockevent" ("name", "kind", "id");
CREATE INDEX "fencedlock_event_of_kind" ON "django_fencedlock_lockevent" ("kind", "id");
COMMIT;
