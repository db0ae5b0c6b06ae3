"""Run folders: record, lineage, resume, comparison."""
