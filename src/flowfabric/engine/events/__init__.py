"""The event feed: one reader, its cursor, completions and subscriptions. Knows no storage."""
