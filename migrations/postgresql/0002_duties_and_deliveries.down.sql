-- Generated from django_fencedlock/migrations/0002_duties_and_deliveries.py by: python -m tests.mirror
-- Never edit this file.
BEGIN;
--
-- Create model Duty
--
DROP TABLE "django_fencedlock_duty" CASCADE;
--
-- Create model Delivery
--
DROP TABLE "django_fencedlock_delivery" CASCADE;
COMMIT;
