"""What is silently wrong in a training: checks of the user's unchanged module, while it trains."""

from boltcutter.diagnosis.checks import CHECKS, Check, Finding, FindingError, Line, check
from boltcutter.diagnosis.evidence import Evidence
from boltcutter.diagnosis.invariants import Invariants

__all__ = ["CHECKS", "Check", "Evidence", "Finding", "FindingError", "Invariants", "Line", "check"]
