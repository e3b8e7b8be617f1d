"""`python -m sglang.launch_server` where there is no SGLang: the server that stands in for it."""

import runpy

runpy.run_module("tests.standins.sglang_server", run_name="__main__")
