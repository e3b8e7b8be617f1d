"""The APIs that agents speak: each reads a request, and writes an answer, a stream and an error."""
