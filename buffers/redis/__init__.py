"""`redis://`: payloads and the journal in a Redis server or cluster, beside the ledger's daemon."""
