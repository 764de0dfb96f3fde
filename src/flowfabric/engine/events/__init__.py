"""The event feed: its reader, cursors, completions and subscriptions, independent of storage."""
