"""`redis://`: the same ledger as scripts inside a Redis server or cluster."""
