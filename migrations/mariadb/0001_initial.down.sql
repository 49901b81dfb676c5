-- Generated from django_fencedlock/migrations/0001_initial.py by: python -m tests.mirror
-- Never edit this file.
--
-- Create model HeldLock
--
DROP TABLE `django_fencedlock_heldlock` CASCADE;
--
-- Create model Fence
--
DROP TABLE `django_fencedlock_fence` CASCADE;
