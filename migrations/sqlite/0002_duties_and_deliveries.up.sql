-- Generated from django_fencedlock/migrations/0002_duties_and_deliveries.py by: python -m tests.mirror
-- Never edit this file.
BEGIN;
--
-- Create model Delivery
--
CREATE TABLE "django_fencedlock_delivery" ("nonce" varchar(36) NOT NULL PRIMARY KEY, "name" varchar(200) NOT NULL, "owner" varchar(32) NOT NULL, "task_id" varchar(100) NOT NULL, "tries" integer NOT NULL, "began_at" datetime NOT NULL, "finished_at" datetime NULL, "outcome" varchar(10) NOT NULL, "kept_until" datetime NOT NULL);
--
-- Create model Duty
--
CREATE TABLE "django_fencedlock_duty" ("id" integer NOT NULL PRIMARY KEY AUTOINCREMENT, "name" varchar(200) NOT NULL, "task_name" varchar(200) NOT NULL, "alias" varchar(100) NOT NULL, "owner" varchar(32) NOT NULL, "wanted" bigint NOT NULL, "started" bigint NOT NULL, "done" bigint NOT NULL, "content_type" varchar(100) NOT NULL, "content_encoding" varchar(30) NOT NULL, "body" text NOT NULL, "options" text NOT NULL, "queue" varchar(200) NOT NULL, "tries" integer NOT NULL, "rescues" integer NOT NULL, "due_at" datetime NULL, "updated_at" datetime NOT NULL, CONSTRAINT "fencedlock_duty_unique" UNIQUE ("name", "task_name"));
CREATE INDEX "django_fencedlock_delivery_kept_until_357aa259" ON "django_fencedlock_delivery" ("kept_until");
CREATE INDEX "django_fencedlock_duty_due_at_2d9fa153" ON "django_fencedlock_duty" ("due_at");
COMMIT;
