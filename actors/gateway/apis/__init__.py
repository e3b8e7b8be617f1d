"""The APIs that agents use: each reads requests and writes answers, streams and errors."""
