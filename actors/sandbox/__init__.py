"""Programs that a model wrote, run apart from the daemon: `sandbox.Sandbox` and `isolation`.

`child`, `landlock`, `namespaces`, `privileges` and `seccomp` run in the process that becomes the
program; they import the standard library alone, and this file imports nothing, so that it starts in
milliseconds.
"""
