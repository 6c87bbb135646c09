"""An endpoint: a `Generator` behind a URL, for `scripts/serve.py`."""
