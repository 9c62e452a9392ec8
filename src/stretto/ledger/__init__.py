"""The run's database: what was drawn, rolled out, shipped and trained, and what a resume may use again."""

from stretto.ledger.audit import audit
from stretto.ledger.reader import LedgerReader
from stretto.ledger.writer import Ledger

__all__ = ["Ledger", "LedgerReader", "audit"]
