"""The run's database: what was drawn, rolled out, shipped, trained, and what a resume may use of it."""

from stretto.ledger.audit import audit
from stretto.ledger.reader import LedgerReader
from stretto.ledger.writer import Ledger

__all__ = ["Ledger", "LedgerReader", "audit"]
