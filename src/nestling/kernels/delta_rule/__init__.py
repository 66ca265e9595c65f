"""The delta-rule memory: `delta_rule` over a piece of a stream, `delta_rule_step` for one token, and `choose`."""

from nestling.kernels.delta_rule.dispatch import choose, delta_rule, delta_rule_step

__all__ = ["choose", "delta_rule", "delta_rule_step"]
