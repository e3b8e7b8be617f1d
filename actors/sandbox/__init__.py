"""Runs programs that a model wrote, isolated from the daemon: `sandbox.Sandbox` and `isolation`.

`child`, `landlock`, `namespaces`, `privileges` and `seccomp` run in the process that becomes the
program; they import only the standard library, and this file imports nothing, so that process
starts in milliseconds.
"""
