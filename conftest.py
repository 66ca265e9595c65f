"""Modules that need an extra which is not installed have no doctests to run."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("flwr") else ["src/nestling/engines/flower.py", "src/nestling/deploy/app.py"]
