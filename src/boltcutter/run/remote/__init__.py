"""Part: run folders on object storage."""
