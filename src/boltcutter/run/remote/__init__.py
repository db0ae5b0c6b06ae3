"""Run folders on object storage."""
