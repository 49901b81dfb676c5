-- Generated from django_fencedlock/migrations/0002_pending_runs_and_message_records.py by: python -m tests.mirror
-- Never edit this file.
BEGIN;
--
-- Create model PendingRun
--
DROP TABLE "django_fencedlock_pendingrun";
--
-- Create model MessageRecord
--
DROP TABLE "django_fencedlock_messagerecord";
COMMIT;
