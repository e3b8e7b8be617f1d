"""The ledger: which prompts are granted, which groups are trained, and the books that close."""
