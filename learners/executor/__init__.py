"""What runs on every rank: commands in one order, who joins, starts and lives."""
