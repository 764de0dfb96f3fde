"""Keeps what is logged before a command has set up its log, such as warnings about settings."""

import logging

_MOST = 100


class _EarlyRecords(logging.Handler):
    """Keeps warnings until `take_early_records`. Commands without a log drop them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.records) < _MOST:
            self.records.append(record)


_early = _EarlyRecords()


def keep_early_records() -> None:
    """Start keeping the warnings of this process."""
    _early.records.clear()
    logging.getLogger("flowfabric").addHandler(_early)


def take_early_records() -> list[logging.LogRecord]:
    """Return the kept warnings and stop keeping them."""
    logging.getLogger("flowfabric").removeHandler(_early)
    found, _early.records = _early.records, []
    return found
