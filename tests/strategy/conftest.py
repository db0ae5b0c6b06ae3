"""Fixtures of tests that compare strategies with one process."""

from reference_run import reference as reference
from reference_run import text as text
