"""Check of a user's pass on the graphs of every family, in many layouts. See docs/extend/pass.md."""
