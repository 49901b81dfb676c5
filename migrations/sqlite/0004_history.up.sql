-- Generated from django_fencedlock/migrations/0004_history.py by: python -m tests.mirror
-- Never edit this file.
BEGIN;
--
-- Create model LockEvent
--
CREATE TABLE "django_fencedlock_lockevent" ("id" integer NOT NULL PRIMARY KEY AUTOINCREMENT, "happened_at" datetime NOT NULL, "name" varchar(200) NOT NULL, "kind" varchar(10) NOT NULL, "alias" varchar(100) NOT NULL, "token" bigint NULL, "holder" varchar(400) NOT NULL, "note" varchar(400) NOT NULL, "times" bigint NOT NULL);
CREATE INDEX "fencedlock_event_of_name" ON "django_fencedlock_lockevent" ("name", "kind", "id");
CREATE INDEX "fencedlock_event_of_kind" ON "django_fencedlock_lockevent" ("kind", "id");
COMMIT;
