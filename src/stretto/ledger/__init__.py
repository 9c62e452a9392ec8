"""The run's database of draws, rollouts, batches and versions, from which a resume continues."""

from stretto.ledger.audit import audit
from stretto.ledger.kept import Limits
from stretto.ledger.reader import LedgerReader
from stretto.ledger.writer import Ledger

__all__ = ["Ledger", "LedgerReader", "Limits", "audit"]
