"""A buffer's state on disk: the ledger in SQLite, the payloads in segments."""
