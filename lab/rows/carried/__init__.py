"""Rows carried elsewhere: from older forms to today's (`upgrade`, `old_forms`), and out to one table (`export`)."""
