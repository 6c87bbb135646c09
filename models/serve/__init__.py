"""An endpoint: a `Generator` at a URL, for `scripts/serve.py`."""
