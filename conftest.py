"""Modules that need an extra which is not installed have no doctests to run."""

from importlib.util import find_spec

_NEED_FLOWER = ("engines/flower", "deploy/app", "deploy/certificates", "deploy/keys", "deploy/sites")
collect_ignore = [] if find_spec("flwr") else [f"src/nestling/{name}.py" for name in _NEED_FLOWER]
collect_ignore += [] if find_spec("lm_eval") else ["src/nestling/inference/harness.py"]
